"""What the policies of LeRobot share here (smolvla.py, pi05.py): the folder that they come from, their
cameras, and what is trained. How they are sampled and trained: flow_policy.py.

LeRobot excludes versions that other simulators and policies want. It has an environment of its own: `tools/setup
lerobot` makes it, `policy.python` names it. So it is imported late, and options are read without it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vla_stream.environments.protocol import Observations, Specification
from vla_stream.errors import InputError
from vla_stream.policies import lerobot_checkpoint, networks, pretrained
from vla_stream.policies.flow_policy import FlowOptions, FlowPolicy, Sizes
from vla_stream.sections import PlainPath

Trained = Literal["all", "expert", "lora"]

_IMAGE = "observation.images."


class LeRobotOptions(FlowOptions):
    """Options that do not depend on which policy it is."""

    kind: ClassVar[str]  # as LeRobot's config.json names it
    vlm_kind: ClassVar[str | None] = None  # of the vision-language model's config, where LeRobot reads that

    checkpoint: PlainPath | None = Field(
        default=None, description="Folder that LeRobot saved. Default: a tiny random policy."
    )
    vlm: PlainPath | None = Field(
        default=None,
        validate_default=True,
        description="Folder of the vision-language model it was made from, for its tokenizer and config; needed with "
        "`checkpoint`.",
    )
    statistics: PlainPath | None = Field(
        default=None,
        validate_default=True,
        description="meta/stats.json of a LeRobotDataset with the robot's data. Default: the checkpoint's own.",
    )
    train: Trained = Field(
        default="expert",
        description="expert: not the vision-language model; lora: adapters in both, and the heads.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Compute denoising steps again for their gradients: less memory, a third more time."
    )
    compile: Literal[False] = Field(
        default=False, description="Not here: LeRobot calls parts of layers, past what would be compiled."
    )

    @field_validator("checkpoint")
    @classmethod
    def _whole(cls, folder: Path | None) -> Path | None:
        if folder is not None:
            lerobot_checkpoint.check(folder, cls.kind)
        return folder

    @field_validator("vlm")
    @classmethod
    def _has_a_tokenizer(cls, folder: Path | None, info: ValidationInfo) -> Path | None:
        if info.data.get("checkpoint") is None:
            return folder
        if folder is None:
            raise ValueError("the folder of the vision-language model that the checkpoint was made from")
        lerobot_checkpoint.check_backbone(folder, cls.vlm_kind)
        return folder

    @field_validator("statistics")
    @classmethod
    def _readable(cls, file: Path | None, info: ValidationInfo) -> Path | None:
        folder = info.data.get("checkpoint")
        if folder is not None:
            lerobot_checkpoint.read_statistics(folder, file)
        return file


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys and values of the prefix, and bool[B, N] where it is no padding."""

    cache: Any
    there: Tensor


class LeRobotPolicy(FlowPolicy):
    """Base of such a policy: `policy` is LeRobot's own, `model` the network in it."""

    policy: Any

    @staticmethod
    def check_installed() -> None:
        """Raises InputError."""
        if importlib.util.find_spec("lerobot") is None:
            raise InputError(
                "lerobot is not installed in this environment, expected it for this policy; run tools/setup lerobot, "
                "and set policy.python to .venvs/lerobot/bin/python"
            )

    def __init__(
        self, options: LeRobotOptions, specification: Specification, chunk: int, sizes: Sizes, config: Any
    ) -> None:
        """config: LeRobot's, of the checkpoint or of a tiny policy."""
        folder = options.checkpoint
        statistics = None if folder is None else lerobot_checkpoint.read_statistics(folder, options.statistics)
        super().__init__(options, specification, chunk, sizes, statistics)
        self._config = config
        # LeRobot calls the parts of a layer one by one: what can be computed again is a whole denoising step.
        self._steps_recomputed, self._recomputed = self._recomputed, False
        self._keys = image_keys(config.image_features, self._cameras)

    def close_lerobot(self, options: LeRobotOptions, adapted: Sequence[str], always: Sequence[nn.Module]) -> None:
        """Choose what is trained, add the heads. `policy` must be there, with `requires_grad` as LeRobot sets it.

        adapted: names of the linear layers that get adapters; always: what is trained beside these."""
        if options.train == "lora":
            self.policy.requires_grad_(False)
            networks.add_adapters(self.policy, adapted, options.lora_rank)
            for part in always:
                part.requires_grad_(True)
        self.close_flow(self.policy, ())

    def _images(self, observations: Observations) -> dict[str, Tensor]:
        """f[B, 3, h, w] in 0 … 1 under LeRobot's names."""
        return {
            key: self.tensor(observations.images[camera]).permute(0, 3, 1, 2) / 255
            for key, camera in zip(self._keys, self._cameras, strict=True)
        }

    def _velocity(self, prefix: Prefix, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """As `_expert`, in whatever precision."""
        model = self.policy.model
        with given_to(model.action_out_proj) as seen:
            velocity = model.denoise_step(prefix.there, prefix.cache, x, t.to(x.dtype))
        return seen[0], velocity

    def _expert(self, prefix: Prefix, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        with self.autocast():
            if self._steps_recomputed and torch.is_grad_enabled():
                output, velocity = checkpoint(self._velocity, prefix, x, t, use_reentrant=False)
            else:
                output, velocity = self._velocity(prefix, x, t)
        return output.to(x.dtype), velocity.to(x.dtype)


@contextmanager
def given_to(module: nn.Module) -> Iterator[list[Any]]:
    """What the module is called with inside, its first argument of each call."""
    seen: list[Any] = []
    hook = module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        yield seen
    finally:
        hook.remove()


def image_keys(known: Mapping[str, Any], cameras: Sequence[str]) -> list[str]:
    """LeRobot's names for the cameras, in the checkpoint's order. Raises InputError for more than it knows."""
    keys = [key for key in known if ".empty_camera_" not in key]
    if len(cameras) > len(keys):
        raise InputError(
            f"policy.options.cameras: {len(cameras)} cameras, but the checkpoint knows {len(keys)} "
            f"({', '.join(key.removeprefix(_IMAGE) for key in keys)}); choose as many"
        )
    return keys[: len(cameras)]


def projections(policy: nn.Module, parts: Sequence[nn.Module], without: Sequence[nn.Module]) -> list[str]:
    """Names of the query and value projections in these parts of the policy, which adapters are for."""
    there = {id(module) for part in parts for module in part.modules()} - {id(module) for module in without}
    return [
        name for name, module in policy.named_modules() if name.endswith(("q_proj", "v_proj")) and id(module) in there
    ]


def read_config(cls: Any, folder: Path) -> Any:
    """LeRobot's config of class `cls` from the folder, which was checked, for the CPU. Raises InputError."""
    import draccus

    data = pretrained.read_json(folder / pretrained.CONFIG)
    data |= {"device": "cpu", "rtc_config": None}
    del data["type"]
    try:
        # As LeRobot's own from_pretrained, which leaves a file in the folder for temporary ones.
        config = draccus.decode(cls, data)
    except Exception as exc:  # whatever draccus raises: the file is another version's, or somebody's
        reason = " ".join(str(exc).split())[:200]
        raise InputError(
            f"{folder / pretrained.CONFIG}: LeRobot's {cls.__name__} cannot read it ({reason}); save the policy anew "
            "with the LeRobot that is installed here"
        ) from exc
    return config


def tiny_features(config: Any, specification: Specification) -> None:
    """Put an environment's shapes into the config of a tiny policy."""
    from lerobot.configs import FeatureType, PolicyFeature

    config.input_features = {
        _IMAGE + camera: PolicyFeature(FeatureType.VISUAL, (3, *size)) for camera, size in specification.cameras.items()
    } | {"observation.state": PolicyFeature(FeatureType.STATE, (specification.state_dims,))}
    config.output_features = {"action": PolicyFeature(FeatureType.ACTION, (specification.action_dims,))}


def load_weights(policy: Any, folder: Path) -> None:
    """The folder's into LeRobot's policy, in float32: there the steps of a small learning rate do not round to nothing.
    Raises InputError for missing ones."""
    state = load_file(folder / pretrained.WEIGHTS)
    if hasattr(policy, "_fix_pytorch_state_dict_keys"):  # names of openpi's
        state = policy._fix_pytorch_state_dict_keys(state, policy.config)
    state = {name if name.startswith("model.") else f"model.{name}": x for name, x in state.items()}
    tied = _names_of_tied(policy)
    lost, unknown = policy.load_state_dict(state, strict=False)
    lost = sorted(name for name in lost if not any(other in state for other in tied.get(name, ())))
    if lost:
        raise InputError(
            f"{folder}: lacks {len(lost)} weights, first {lost[0]}, and has {len(unknown)} unknown ones; "
            "copy the folder anew"
        )
    policy.float()


def _names_of_tied(policy: nn.Module) -> dict[str, list[str]]:
    """For each name of a tensor that has several, all of them: a file holds it once."""
    by_place: dict[int, list[str]] = {}
    for name, tensor in policy.state_dict(keep_vars=True).items():
        by_place.setdefault(tensor.data_ptr(), []).append(name)
    return {name: names for names in by_place.values() if len(names) > 1 for name in names}


def tokenizer(vlm: Path) -> Any:
    """That of the vision-language model's folder."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(vlm / pretrained.TOKENIZER))
