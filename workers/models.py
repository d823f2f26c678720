"""What generators and the trainer share: the policy's construction, and its device."""

from __future__ import annotations

import time

import torch

from vla_stream import plugins
from vla_stream.config import DEMONSTRATIONS, Config
from vla_stream.environments.protocol import Specification
from vla_stream.errors import InputError
from vla_stream.learning import cloning, recordings
from vla_stream.policies.protocol import Policy
from workers.worker import Worker

SAY_WAITING_S = 10.0


def await_specification(worker: Worker) -> Specification | None:
    """The run's shapes, once the first simulator announced them; None when told to end before."""
    next_word_s = time.monotonic() + SAY_WAITING_S
    worker.state = "waiting for a simulator to announce its shapes"
    while not worker.draining:
        worker.patiently(worker.beat)
        specification = worker.patiently(worker.flow.specification)
        if specification is not None:
            worker.state = "loading"
            return specification
        if time.monotonic() > next_word_s:
            next_word_s = time.monotonic() + 6 * SAY_WAITING_S
            worker.say("waiting", f"{worker.role} waits for a simulator: none has announced its shapes yet")
        time.sleep(0.1)
    return None


def make_policy(config: Config, specification: Specification, device: torch.device) -> Policy:
    """The configured policy, freshly initialised. Raises InputError.

    A warm start's own seed decides its first weights too: the same one for every seed of the run."""
    cls, options = plugins.checked_policy(config.policy)
    torch.manual_seed(config.seed if config.pretrain is None else config.pretrain.seed)
    policy: Policy = cls(options, specification, config.policy.chunk)
    if isinstance(policy, torch.nn.Module):
        policy.to(device).eval()
    return policy


def load_demonstrations(
    config: Config, specification: Specification
) -> tuple[cloning.Demonstrated, cloning.Scenes | None]:
    """What the section `pretrain` says. Raises InputError."""
    assert config.pretrain is not None
    if config.pretrain.data is not None:
        return recordings.open_recordings(config, specification), None
    path = config.pretrain.demos or config.run_dir / DEMONSTRATIONS
    return cloning.load_demonstrations(path, config.environment.name, config.policy.chunk, specification)


def torch_device(name: str) -> torch.device:
    """`auto` is cuda where there is one, else cpu. Raises InputError for what this host does not have."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # Without CUDA in the build torch fails an assertion.
    except (RuntimeError, AssertionError) as exc:
        raise InputError(
            f"device is {name!r}, which torch cannot use here; set trainer.device, generators.device or --device "
            "to cpu or auto"
        ) from exc
    return device
