"""The config's section `algorithm`: all options, and which algorithm uses which. What they do: learning/algorithms.py.

An option that the chosen algorithm does not use is refused where it is set, and left out where a config is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from vla_stream.sections import Decay, Section

Name = Literal["ppo", "appo", "grpo", "rloo", "rft"]

_ALL = {"name", "imitation_coefficient"}
_GRADIENT = {
    *("granularity", "clip", "dual_clip", "max_kl"),
    *("entropy_coefficient", "entropy_decay", "reference_kl_coefficient"),
}
_CORRECTION = {"correction", "proximal", "behaviour_weight_cap", "behaviour_weight_above_cap"}
_CRITIC = {"gamma", "value_coefficient", "value_clip", "huber_delta", "normalise_advantages"}
_VTRACE = {"vtrace_lambda", "vtrace_rho_cap", "vtrace_gradient_rho_cap"}

OPTIONS: Mapping[str, set[str]] = {
    "ppo": _ALL | _GRADIENT | _CORRECTION | _CRITIC | {"gae_lambda"},
    "appo": _ALL | _GRADIENT | _CRITIC | _VTRACE,
    "grpo": _ALL | _GRADIENT | _CORRECTION | {"group_std", "length"},
    "rloo": _ALL | _GRADIENT | _CORRECTION | {"length"},
    "rft": _ALL,
}

# Of options that depend on another one: which, and with which of its values they are used.
_USED_WITH: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "clip": ("correction", ("decoupled", "none")),
    "dual_clip": ("correction", ("decoupled", "none")),
    "proximal": ("correction", ("decoupled",)),
    "behaviour_weight_cap": ("correction", ("decoupled", "tis")),
    "behaviour_weight_above_cap": ("correction", ("decoupled", "tis")),
}


class Algorithm(Section):
    name: Name = Field(
        default="ppo",
        description="ppo; appo: PPO on V-trace's advantages. Without a critic, on whole episodes: grpo, rloo: rows of "
        "a slot compared; rft: imitates rows that succeeded.",
    )
    correction: Literal["decoupled", "tis", "none"] = Field(
        default="decoupled",
        description="For data of older weights. decoupled: clipped ratio to the proximal policy, weighted by proximal "
        "÷ behaviour policy; tis: no clip, weighted by current ÷ behaviour policy; none: decoupled without its weight.",
    )
    proximal: Literal["recomputed", "interpolated"] = Field(
        default="recomputed",
        description="Proximal policy: by a pass before the update, or guessed from how old the data is.",
    )
    behaviour_weight_cap: float = Field(default=2.0, gt=0, description="Upper bound of the correction's weight.")
    behaviour_weight_above_cap: Literal["cap", "mask"] = Field(
        default="cap", description="What is done with weights above it. mask: they are 0."
    )
    clip: float = Field(default=0.2, gt=0, description="PPO clip range ε of the ratio to the proximal policy.")
    dual_clip: float | None = Field(
        default=None, gt=1, description="c: of a negative advantage, at most c times counts. Default: no such bound."
    )
    granularity: Literal["action", "chunk", "token"] = Field(
        default="action", description="Log-probs are summed per action, per whole chunk, or not at all (token)."
    )
    max_kl: float | None = Field(
        default=None, gt=0, description="An update ends before the step whose samples have a larger KL to its start."
    )
    entropy_coefficient: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    entropy_decay: Decay | None = Field(
        default=None, description="How that falls, for example {to: 0.1, at_update: 60}. Default: it stays."
    )
    reference_kl_coefficient: float = Field(
        default=0.0, ge=0, description="Weight of the KL divergence to the run's first weights."
    )
    imitation_coefficient: float = Field(
        default=0.0, ge=0, description="Weight of the behaviour-cloning loss of the demonstrations of `pretrain`."
    )
    gamma: float = Field(default=0.97, ge=0, le=1, description="Discount per chunk step (not per environment step).")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="λ of generalised advantage estimation.")
    vtrace_lambda: float = Field(default=0.95, ge=0, le=1, description="λ of V-trace.")
    vtrace_rho_cap: float = Field(default=1.0, gt=0, description="ρ̄: bound of the weights in the value targets.")
    vtrace_gradient_rho_cap: float = Field(default=1.0, gt=0, description="ρ̄_pg: bound of the advantages' weights.")
    value_coefficient: float = Field(default=0.5, ge=0, description="Weight of the value loss.")
    value_clip: float = Field(default=0.2, gt=0, description="Range in which a value may move per update.")
    huber_delta: float = Field(default=10.0, gt=0, description="δ of the value loss's Huber function.")
    normalise_advantages: bool = Field(
        default=True, description="By mean and std of all of the update; streaming: of the updates before it."
    )
    group_std: bool = Field(default=True, description="Advantages are divided by the std of the group's returns.")
    length: Literal["own", "max"] | None = Field(
        default=None,
        description="A row's loss is divided by its own length, or by that of the group's longest row. Default: own "
        "with group_std, else max.",
    )

    @property
    def used(self) -> set[str]:
        """The options that this algorithm uses."""
        options = OPTIONS[self.name]
        idle = {
            option
            for option, (switch, values) in _USED_WITH.items()
            if switch in options and getattr(self, switch) not in values
        }
        if self.entropy_coefficient == 0:
            idle.add("entropy_decay")
        return options - idle

    @property
    def has_critic(self) -> bool:
        """Whether a value function is trained."""
        return self.name in ("ppo", "appo")

    @property
    def guesses_proximal(self) -> bool:
        """Whether the proximal policy is interpolated, not evaluated."""
        return "proximal" in self.used and self.proximal == "interpolated"

    @property
    def compares_rows(self) -> bool:
        """Whether a slot is a group."""
        return self.name in ("grpo", "rloo")

    @property
    def length_of_rows(self) -> Literal["own", "max"]:
        """`length`, with its default."""
        return self.length or ("own" if self.name == "grpo" and self.group_std else "max")

    def at(self, update: int) -> Algorithm:
        """The options as they are in the given update, counted from 0."""
        if self.entropy_decay is None:
            return self
        return self.model_copy(
            update={"entropy_coefficient": self.entropy_coefficient * self.entropy_decay.factor(update)}
        )

    def problems(self) -> list[str]:
        """One line for each option that is set and not used, or that would end every update before it trains."""
        problems = [self._why_unused(option) for option in sorted(self.model_fields_set - self.used)]
        if self.guesses_proximal and self.max_kl is not None:
            problems.append(
                f"algorithm.max_kl is {self.max_kl} but algorithm.proximal is interpolated, which differs from the "
                "policy that an update starts with; remove max_kl, or set proximal to recomputed"
            )
        return problems

    def _why_unused(self, option: str) -> str:
        remove = f"algorithm.{option} is set but algorithm."
        if option not in OPTIONS[self.name]:
            users = " or ".join(name for name, options in OPTIONS.items() if option in options)
            return f"{remove}name is {self.name}, which does not use it; remove it, or set name to {users}"
        if option == "entropy_decay":
            return f"{remove}entropy_coefficient is 0; remove it, or raise entropy_coefficient"
        switch, values = _USED_WITH[option]
        return (
            f"{remove}{switch} is {getattr(self, switch)}, which does not use it; remove it, or set {switch} to "
            f"{' or '.join(values)}"
        )

    @model_serializer(mode="wrap")
    def _used_only(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {option: value for option, value in handler(self).items() if option in self.used}
