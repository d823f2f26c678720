"""Edge generator → simulator: a reply carries actions of finite numbers in agreeing shapes, or the reason why not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vla_stream.broker.codec import pack, seal
from vla_stream.errors import BadMessage
from vla_stream.policies.protocol import Act
from vla_stream.streams.actions import SCHEMA, ActionReply
from vla_stream.streams.obs_requests import RequestId

ID = RequestId("simulator-0", "9f2c11ab", batch=0, slot=1, ticket=17, attempt=1, step=3)
B, H, A = 3, 4, 2
ACT = Act(
    actions=np.linspace(-1, 1, B * H * A, dtype=np.float32).reshape(B, H, A),
    logprobs=np.full((B, H, A), -1.5, np.float32),
    values=np.array([0.1, 0.2, 0.3], np.float32),
    extras={"tokens": np.arange(B * 5, dtype=np.int64).reshape(B, 5)},
)
REPLY = ActionReply(ID, version=12, weights="0123456789abcdef", act=ACT)
FAILED = ActionReply(ID, version=12, weights="0123456789abcdef", act=None, error="request alone fails")


def with_arrays(rows: int = B, **changes: np.ndarray | None) -> dict[bytes, bytes]:
    arrays = {"actions": ACT.actions, "logprobs": ACT.logprobs, "values": ACT.values, "extra.t": np.zeros((B, 1))}
    arrays |= {name.replace("extra_", "extra."): array for name, array in changes.items()}
    present = {name: array for name, array in arrays.items() if array is not None}
    return seal(SCHEMA, {"id": str(ID), "version": 1, "weights": "x", "n": rows, "data": pack(present)})


def test_a_reply_comes_back_equal() -> None:
    returned = ActionReply.from_fields(REPLY.to_fields())
    assert (returned.id, returned.version, returned.weights, returned.error) == (ID, 12, "0123456789abcdef", "")
    assert returned.act is not None
    for name in ("actions", "logprobs", "values"):
        assert np.array_equal(getattr(returned.act, name), getattr(ACT, name))
    assert returned.act.extras.keys() == {"tokens"}
    assert np.array_equal(returned.act.extras["tokens"], ACT.extras["tokens"])


def test_an_error_reply_comes_back_with_its_reason_and_no_actions() -> None:
    assert ActionReply.from_fields(FAILED.to_fields()) == FAILED


def test_an_error_reply_always_has_a_reason() -> None:
    silent = replace(FAILED, error="")
    assert ActionReply.from_fields(silent.to_fields()).error == "the generator gave no reason"


def test_a_reply_reads_in_redis_cli() -> None:
    fields = REPLY.to_fields()
    assert fields[b"id"] == b"simulator-0/9f2c11ab/0.1/17.1/3"
    assert (fields[b"version"], fields[b"weights"], fields[b"n"]) == (b"12", b"0123456789abcdef", b"3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": None}, r"actions are missing, expected f32\[3, H, A\]"),
        ({"actions": ACT.actions.astype(np.float64)}, "actions are float64"),
        ({"actions": ACT.actions[:2]}, r"actions are float32\[2, 4, 2\]"),
        ({"actions": ACT.actions.reshape(B, -1)}, r"actions are float32\[3, 8\]"),
        ({"actions": ACT.actions[:, :0], "logprobs": ACT.logprobs[:, :0]}, r"actions are float32\[3, 0, 2\]"),
        ({"logprobs": ACT.logprobs[:, :2]}, r"logprobs are float32\[3, 2, 2\], expected f32\[3, 4, 2\]"),
        ({"logprobs": None}, "logprobs are missing"),
        ({"values": ACT.values[:, None]}, r"values are float32\[3, 1\], expected f32\[3\]"),
        ({"values": None}, "values are missing"),
        ({"extra_t": np.zeros((2, 1))}, "an extra array does not have 3 rows"),
        ({"extra_t": np.zeros(())}, "an extra array does not have 3 rows"),
        ({"actions": np.full_like(ACT.actions, np.nan)}, "hold NaN or infinity"),
        ({"logprobs": np.full_like(ACT.logprobs, -np.inf)}, "hold NaN or infinity"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_f27_arrays_of_other_shapes_types_or_without_meaning_are_refused(
    changes: dict[str, np.ndarray | None], message: str
) -> None:
    with pytest.raises(BadMessage, match=message):
        ActionReply.from_fields(with_arrays(**changes))


def test_f27_rows_must_agree_with_n() -> None:
    with pytest.raises(BadMessage, match=r"expected f32\[4, H, A\]"):
        ActionReply.from_fields(with_arrays(rows=4))


def test_f27_a_reply_without_actions_and_without_error_is_refused() -> None:
    with pytest.raises(BadMessage, match="lacks the field data"):
        ActionReply.from_fields(seal(SCHEMA, {"id": str(ID), "version": 1, "weights": "x", "n": 1}))


@pytest.mark.parametrize("reply", [REPLY, FAILED], ids=["actions", "error"])
def test_f27_another_schema_and_any_damage_are_refused(reply: ActionReply) -> None:
    fields = reply.to_fields()
    with pytest.raises(BadMessage, match="schema"):
        ActionReply.from_fields(fields | {b"schema": b"99"})
    for name in fields:
        with pytest.raises(BadMessage):
            ActionReply.from_fields(fields | {name: fields[name] + b"0"})
