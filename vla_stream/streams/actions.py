"""Edge generator → simulator: `actions:<simulator>`.

Delivery: added only while the simulator's stream exists (NOMKSTREAM), so that a late reply does not bring a dead
simulator's stream back. Repeats, and replies to an older incarnation, are dropped by request id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vla_stream.broker.codec import Fields, pack, seal, unpack, unseal
from vla_stream.errors import BadMessage
from vla_stream.policies.protocol import Act
from vla_stream.streams.obs_requests import RequestId
from vla_stream.streams.observations import MAX_ROWS, describe

SCHEMA = 2


@dataclass(frozen=True, slots=True)
class ActionReply:
    """The answer to one ObsRequest.

    id       that of the request
    version  of the weights that acted; weights: their digest (proof that new weights arrived)
    act      actions f32[n, H, A], logprobs f32[n, H, A], values f32[n], extras [n, …]; None when `error` says why not
    """

    id: RequestId
    version: int
    weights: str
    act: Act | None
    error: str = ""

    def to_fields(self) -> dict[bytes, bytes]:
        fields: dict[str, str | bytes | int] = {"id": str(self.id), "version": self.version, "weights": self.weights}
        if self.act is None:
            fields["error"] = self.error or "the generator gave no reason"
        else:
            arrays = {"actions": self.act.actions, "logprobs": self.act.logprobs, "values": self.act.values}
            arrays |= {f"extra.{name}": array for name, array in self.act.extras.items()}
            fields |= {"n": len(self.act.actions), "data": pack(arrays)}
        return seal(SCHEMA, fields)

    @classmethod
    def from_fields(cls, raw: Mapping[bytes, bytes]) -> ActionReply:
        """Raises BadMessage."""
        fields: Fields = unseal(SCHEMA, raw)
        act, error = None, ""
        if fields.has("error"):
            error = fields.text("error", 4096)
        else:
            act = _act(fields.data("data"), fields.integer("n", 1, MAX_ROWS))
        identity = RequestId.parse(fields.text("id", 256))
        return cls(identity, fields.integer("version"), fields.text("weights", 64), act, error)


def check_act(actions: object, logprobs: object, values: object, extras: Mapping[str, np.ndarray], rows: int) -> Act:
    """Whether that is a decision for `rows` rows: for what a policy returned as well as for what arrived.

    Raises BadMessage."""
    actions, logprobs, values = (
        array if isinstance(array, np.ndarray) else None for array in (actions, logprobs, values)
    )
    if actions is None or actions.dtype != np.float32 or actions.ndim != 3 or len(actions) != rows or not actions.size:
        raise BadMessage(f"actions are {describe(actions)}, expected f32[{rows}, H, A]")
    if logprobs is None or logprobs.dtype != np.float32 or logprobs.shape != actions.shape:
        raise BadMessage(f"logprobs are {describe(logprobs)}, expected f32{list(actions.shape)}")
    if values is None or values.dtype != np.float32 or values.shape != (rows,):
        raise BadMessage(f"values are {describe(values)}, expected f32[{rows}]")
    if not (np.isfinite(actions).all() and np.isfinite(logprobs).all()):
        raise BadMessage("actions or logprobs hold NaN or infinity")
    if any(array.ndim < 1 or len(array) != rows for array in extras.values()):
        raise BadMessage(f"an extra array does not have {rows} rows")
    return Act(actions, logprobs, values, extras)


def _act(data: bytes, rows: int) -> Act:
    arrays, _ = unpack(data)
    actions, logprobs, values = (arrays.pop(name, None) for name in ("actions", "logprobs", "values"))
    extras = {name.removeprefix("extra."): array for name, array in arrays.items()}
    return check_act(actions, logprobs, values, extras, rows)
