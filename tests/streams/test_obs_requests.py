"""Edge simulator → generator: what a request says, and what is refused of it."""

from __future__ import annotations

import dataclasses

import pytest

from vla_stream.broker.codec import seal
from vla_stream.errors import BadMessage
from vla_stream.streams.obs_requests import SCHEMA, ObsRequest, RequestId

ID = RequestId("simulator-0", "9f2c11ab", batch=0, slot=1, ticket=17, attempt=1, step=3)
REFERENCE = "shm:17.1-5c0ffee0:166080:55360:0123456789abcdef"
INLINE = ObsRequest(ID, n=8, min_version=5, mode="sample", payload=b"observations", ref="")
BY_REFERENCE = ObsRequest(ID, n=8, min_version=5, mode="mode", payload=None, ref=REFERENCE)


def resealed(**changes: str | bytes | int | None) -> dict[bytes, bytes]:
    """The fields of INLINE with changes and a digest that matches them; None removes a field."""
    fields = {name.decode(): value for name, value in INLINE.to_fields().items() if name not in {b"schema", b"digest"}}
    merged = fields | changes
    return seal(SCHEMA, {name: value for name, value in merged.items() if value is not None})


@pytest.mark.parametrize("request_", [INLINE, BY_REFERENCE], ids=["inline", "by reference"])
def test_a_request_comes_back_equal(request_: ObsRequest) -> None:
    assert ObsRequest.from_fields(request_.to_fields()) == request_


def test_a_request_reads_in_redis_cli_as_documented() -> None:
    fields = BY_REFERENCE.to_fields()
    del fields[b"digest"]
    assert fields == {
        b"id": b"simulator-0/9f2c11ab/0.1/17.1/3",
        b"simulator": b"simulator-0",
        b"slot": b"0.1",
        b"n": b"8",
        b"step": b"3",
        b"min_version": b"5",
        b"mode": b"mode",
        b"ref": REFERENCE.encode(),
        b"schema": b"2",
    }


def test_an_id_carries_its_meaning_and_comes_back_equal() -> None:
    assert str(ID) == "simulator-0/9f2c11ab/0.1/17.1/3"
    assert RequestId.parse(str(ID)) == ID


@pytest.mark.parametrize(
    "text",
    [
        "",
        "simulator-0",
        "simulator-0/9f2c11ab/0.1/17.1",
        "simulator-0/9F2C11AB/0.1/17.1/3",
        "simulator-0/9f2c11a/0.1/17.1/3",
        "simulator 0/9f2c11ab/0.1/17.1/3",
        "simulator-0/9f2c11ab/0/17.1/3",
        "simulator-0/9f2c11ab/0.1/17/3",
        "simulator-0/9f2c11ab/0.1/-17.1/3",
        "simulator-0/9f2c11ab/0.1/17.1/3/4",
        "simulator-0/9f2c11ab/0.1/17.1/3\n",
        "simulator-0/9f2c11ab/0.1/17.1/٣",
        "s" * 65 + "/9f2c11ab/0.1/17.1/3",
        "simulator-0/9f2c11ab/0.1/" + "9" * 19 + ".1/3",
    ],
)
def test_f27_a_foreign_id_is_refused(text: str) -> None:
    with pytest.raises(BadMessage, match="expected simulator/incarnation/"):
        RequestId.parse(text)
    with pytest.raises(BadMessage):
        ObsRequest.from_fields(resealed(id=text))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 0}, "field n is 0, expected 1 to 4096"),
        ({"n": 4097}, "field n is 4097"),
        ({"n": "many"}, "field n is b'many', expected an integer"),
        ({"n": None}, "lacks the field n"),
        ({"min_version": -1}, "field min_version is -1"),
        ({"mode": "greedy"}, "field mode is 'greedy', expected sample or mode"),
        ({"data": None}, "lacks the field ref"),
        ({"data": None, "ref": "r" * 257}, "field ref has 257 bytes"),
        ({"id": None}, "lacks the field id"),
    ],
    ids=str,
)
def test_f27_a_wrong_field_is_refused_by_name(changes: dict[str, str | int | None], message: str) -> None:
    with pytest.raises(BadMessage, match=message):
        ObsRequest.from_fields(resealed(**changes))


def test_f27_another_schema_and_any_damage_are_refused() -> None:
    fields = INLINE.to_fields()
    with pytest.raises(BadMessage, match="schema"):
        ObsRequest.from_fields(fields | {b"schema": b"99"})
    for name in fields:
        with pytest.raises(BadMessage):
            ObsRequest.from_fields(fields | {name: fields[name] + b"x"})


def test_a_request_is_a_value() -> None:
    assert dataclasses.replace(INLINE, n=4) != INLINE
