"""An exported policy: whole, with its config and card, and good to evaluate and to begin from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from vla_stream.cli.main import call
from vla_stream.config import load
from vla_stream.environments.protocol import Observations
from vla_stream.environments.tabletop import Tabletop
from vla_stream.learning import checkpoint
from vla_stream.policies.tiny import Tiny
from vla_stream.streams.specification import specification_to_json
from workers.models import make_policy
from workers.trainer import load_policy

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has ended, of an untrained policy."""
    config = load([QUICKSTART], [f"runs_dir={tmp_path}", "name=mine", "pretrain=null"])
    policy = make_policy(config, Tabletop(1, 40, Tabletop.Options()).specification, torch.device("cpu"))
    assert isinstance(policy, Tiny)
    folder = config.run_dir
    meta = {"trained": 1280, "skipped": 0}
    for update in (20, 40):
        with torch.no_grad():
            next(policy.parameters()).fill_(update)
        checkpoint.save(folder / "checkpoints", update, update + 3, policy.state_dict(), {"m": torch.ones(2)}, meta)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    place = str(folder / "checkpoints" / "000040")
    after = {"success": 0.95, "low": 0.9, "high": 0.98, "episodes": 200, "seed": 10_000_000, "checkpoint": place}
    (folder / "summary.json").write_text(json.dumps({"after": after}))
    return folder


def test_an_export_holds_the_weights_the_config_and_a_card(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "shared"
    assert call(["export", str(output), "--checkpoint", str(run)]) == 0
    shown = capsys.readouterr().out
    assert f"{output}: tiny after update 40" in shown
    assert {item.name for item in output.iterdir()} == {
        *("policy.safetensors", "optimiser.safetensors", "meta.json", "config.yaml", "README.md"),
    }
    exported, kept = checkpoint.load(output), checkpoint.load(run / "checkpoints" / "000040")
    assert exported.optimiser == {} and (exported.update, exported.version) == (40, 43)
    assert all(torch.equal(exported.policy[name], tensor) for name, tensor in kept.policy.items())
    card = (output / "README.md").read_text()
    assert "Success after that run: 0.950 (95 % 0.900 to 0.980) of 200 held-out seeds from" in card
    assert "`tabletop`, episodes of at most 40 steps" in card and "ppo, buffered" in card
    assert [item.name for item in tmp_path.iterdir() if item.name.startswith(".")] == []


def test_an_exported_policy_is_loaded_and_evaluated_like_a_checkpoint(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "shared"
    assert call(["export", str(output), "--checkpoint", str(run / "checkpoints" / "000020")]) == 0
    config = load([output / "config.yaml"], [f"policy.init_from={output}"])
    policy = make_policy(config, Tabletop(1, 40, Tabletop.Options()).specification, torch.device("cpu"))
    load_policy(policy, output)
    assert isinstance(policy, Tiny) and next(policy.parameters()).detach().flatten()[0] == 20
    capfd.readouterr()
    assert call(["eval", str(output / "config.yaml"), "--checkpoint", str(output), "--episodes", "1", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["episodes"] == 1


def test_what_stands_in_the_way_is_one_line_and_nothing_is_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    assert call(["export", str(taken), "--checkpoint", str(run)]) == 2
    assert f"{taken}: exists, expected a name that is free" in capsys.readouterr().err
    assert call(["export", str(tmp_path / "new"), "--checkpoint", str(tmp_path)]) == 2
    assert "holds no complete checkpoint" in capsys.readouterr().err
    (run / "checkpoints" / "000040" / "policy.safetensors").write_bytes(b"damaged")
    assert call(["export", str(tmp_path / "new"), "--checkpoint", str(run / "checkpoints" / "000040")]) == 2
    assert "damaged" in capsys.readouterr().err
    (run / "config.yaml").unlink()
    assert call(["export", str(tmp_path / "new"), "--checkpoint", str(run)]) == 2
    assert "expected the config of the checkpoint's run" in capsys.readouterr().err
    assert sorted(item.name for item in tmp_path.iterdir()) == ["mine", "taken"] and not list(taken.iterdir())


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_the_export_of_a_vla_is_a_whole_model_too_and_needs_the_old_one_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModel

    from vla_stream.policies import vlm_network

    specification = Tabletop(1, 40, Tabletop.Options()).specification
    base, output = tmp_path / "base", tmp_path / "shared"
    vlm_network.build(vlm_network.read_config(None, "smolvlm"), None).save_pretrained(base)
    vlm_network.tokenizer(None).save(str(base / "tokenizer.json"))
    policy_section = f"policy={{name: vlm, chunk: 4, options: {{checkpoint: {base}}}}}"
    config = load([QUICKSTART], [f"runs_dir={tmp_path}", "name=mine", "pretrain=null", policy_section])
    policy: Any = make_policy(config, specification, torch.device("cpu"))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape))
    meta = {"trained": 8, "skipped": 0, "specification": specification_to_json(specification)}
    checkpoint.save(config.run_dir / "checkpoints", 4, 5, policy.state_dict(), {}, meta)
    (config.run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert call(["export", str(output), "--checkpoint", str(config.run_dir)]) == 0, capsys.readouterr().err
    AutoModel.from_pretrained(output, local_files_only=True)
    shutil.rmtree(base)
    again: Any = make_policy(load([output / "config.yaml"]), specification, torch.device("cpu"))
    load_policy(again, output)
    seen = Observations.blank(specification, 2)
    np.testing.assert_allclose(again.act(seen, None).actions, policy.act(seen, None).actions, atol=1e-5)
    assert "from_pretrained" in (output / "README.md").read_text()
