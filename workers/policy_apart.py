"""The policy's class, its options and its files, looked at in `policy.python`, or here.

Generators and the trainer run there as a whole. This is for what has to be known before they start.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from vla_stream import plugins
from vla_stream.config import Config, Policy
from vla_stream.environments.conformance import Report
from vla_stream.environments.protocol import Specification
from vla_stream.streams.specification import specification_from_json, specification_to_json
from workers import interpreters

_LOOK_S = 300.0  # a first import of torch and transformers from a cold disk takes minutes


def look(config: Config) -> None:
    """Raises InputError for the class, its options, what it needs and the files it starts from; and for an interpreter
    that is not there or cannot run vla-stream."""
    if config.policy.python is None:
        plugins.checked_policy(config.policy)
    else:
        _ask(config, "look", {})


def try_out(config: Config, specification: Specification) -> Report:
    """Whether the policy, made for these shapes, keeps the protocol. Raises InputError as `look`."""
    device = config.generators.device
    if config.policy.python is None:
        return _try_out(config.policy, specification, device)
    shapes = specification_to_json(specification)
    return Report(**_ask(config, "try", {"specification": shapes, "device": device})["report"])


def _ask(config: Config, question: str, more: dict[str, str]) -> dict[str, Any]:
    python = config.policy.python
    assert python is not None
    text = json.dumps({"policy": config.policy.model_dump(mode="json"), **more})
    limit_s = _LOOK_S if question == "look" else None
    return interpreters.ask(python, "policy.python", __name__, question, text, limit_s)


def _answer(question: str, text: str) -> dict[str, Any]:
    """There: to `look` or `try`."""
    asked = json.loads(text)
    policy = Policy.model_validate(asked["policy"])
    if question == "look":
        plugins.checked_policy(policy)
        return {}
    return {"report": asdict(_try_out(policy, specification_from_json(asked["specification"]), asked["device"]))}


def _try_out(described: Policy, specification: Specification, device_name: str) -> Report:
    import torch

    from vla_stream.policies import conformance, protocol
    from workers.models import torch_device

    torch.set_num_threads(1)
    cls, options = plugins.checked_policy(described)
    device = torch_device(device_name)

    def make() -> protocol.Policy:
        policy: protocol.Policy = cls(options, specification, described.chunk)
        if isinstance(policy, torch.nn.Module):
            policy.to(device)
        return policy

    return conformance.check_policy(make, specification, described.chunk)


if __name__ == "__main__":
    interpreters.reply(_answer)
