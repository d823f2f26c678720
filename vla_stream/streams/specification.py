"""The shapes that all workers of a run share, as canonical JSON in the `flow` hash.

The first simulator announces them; so generators and trainers need no simulator packages to build the policy.
"""

from __future__ import annotations

import json

from vla_stream.environments.protocol import Specification
from vla_stream.errors import BadMessage


def specification_to_json(specification: Specification) -> str:
    """Canonical text: equal specifications give equal texts."""
    plain = {
        "cameras": {camera: list(size) for camera, size in sorted(specification.cameras.items())},
        "state_dims": specification.state_dims,
        "action_dims": specification.action_dims,
        "action_low": specification.action_low,
        "action_high": specification.action_high,
    }
    return json.dumps(plain, sort_keys=True)


def specification_from_json(text: str) -> Specification:
    """The inverse. Raises BadMessage."""
    try:
        plain = json.loads(text)
        cameras = {str(name): (int(height), int(width)) for name, (height, width) in plain.pop("cameras").items()}
        return Specification(
            cameras,
            int(plain["state_dims"]),
            int(plain["action_dims"]),
            float(plain["action_low"]),
            float(plain["action_high"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as exc:
        raise BadMessage(f"specification {text[:200]!r} does not decode") from exc
