"""Edge simulator → trainer: segments travel whole, by value or by reference; what contradicts itself is refused."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace

import numpy as np
import pytest

from vla_stream.broker.codec import pack, seal, unpack, unseal
from vla_stream.environments.protocol import Observations
from vla_stream.errors import BadMessage, PayloadUnreachable
from vla_stream.learning.segments import Segment
from vla_stream.streams.observations import pack_observations
from vla_stream.streams.trajectories import ARRAYS, SCHEMA, Episode, Trajectory, parse_member

T, K, H, A = 3, 2, 4, 2
EPISODES = (
    Episode(version=4, success=True, at_end=False, reward=1.0, steps=9),
    Episode(version=5, success=False, at_end=False, reward=0.0, steps=12),
)


def observations(rows: int, fill: int, height: int = 4) -> Observations:
    image = np.full((rows, height, 4, 3), fill, np.uint8)
    return Observations({"front": image}, np.full((rows, 2), fill, np.float32), ["touch the red cube"] * rows)


def segment(final_rows: int = 1) -> Segment:
    random = np.random.default_rng(0)
    flags = {name: random.random((T, K)) < 0.5 for name in ("valid", "terminated", "truncated", "success")}
    return Segment(
        ticket=17,
        observations=(),
        final=None,
        final_index=np.array([[1, 0], [2, 1]], np.int64)[:final_rows].reshape(final_rows, 2),
        actions=random.normal(size=(T, K, H, A)).astype(np.float32),
        logprobs=random.normal(size=(T, K, H, A)).astype(np.float32),
        executed=random.random((T, K, H)) < 0.5,
        rewards=random.normal(size=(T, K)).astype(np.float32),
        versions=np.array([6, 5, 7], np.int64),
        extras={"tokens": np.arange(T * K * 5, dtype=np.int64).reshape(T, K, 5)},
        **flags,
    )


PACKETS = tuple(pack_observations(observations(K, step)) for step in range(T + 1))
FINAL = pack_observations(observations(1, 99))
NAME = "simulator-0/9f2c11ab/0.1/17.2"
INLINE = Trajectory(NAME, 2, segment(), PACKETS, FINAL, EPISODES)
REFERENCES = tuple(f"shm:17.2-5c0ffee0:{1024 * i}:100:0123456789abcdef" for i in range(T + 2))
BY_REFERENCE = replace(INLINE, payloads=REFERENCES[:-1], final_payload=REFERENCES[-1])


def never_read(reference: str) -> bytes:
    raise AssertionError(f"{reference} was read, but all payloads are inline")


def resealed(arrays: dict[str, np.ndarray | None], meta: dict[str, object], **fields: str | int) -> dict[bytes, bytes]:
    """INLINE's entry with changed arrays, meta and fields, and a digest that matches; None removes an array."""
    entry = unseal(SCHEMA, INLINE.to_fields())
    packed, packed_meta = unpack(entry.data("data"))
    merged = {name: array for name, array in (packed | arrays).items() if array is not None}
    plain: dict[str, str | int | bytes] = {name: entry.text(name) for name in ("id", "ticket", "n", "steps")}
    return seal(SCHEMA, plain | {"data": pack(merged, packed_meta | meta)} | fields)


def assert_equal(one: Segment, other: Segment) -> None:
    for field in fields_of(Segment):
        if field.name in {"observations", "final", "extras"}:
            continue
        assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name
    assert one.extras.keys() == other.extras.keys()
    assert all(np.array_equal(one.extras[name], other.extras[name]) for name in one.extras)


@pytest.mark.parametrize("sent", [INLINE, BY_REFERENCE], ids=["inline", "by reference"])
def test_a_trajectory_comes_back_equal(sent: Trajectory) -> None:
    returned = Trajectory.from_fields(sent.to_fields())
    assert_equal(returned.segment, sent.segment)
    assert (returned.id, returned.member, returned.version) == (NAME, "17.2", 5)
    assert returned.payloads == sent.payloads and returned.final_payload == sent.final_payload
    assert returned.episodes == EPISODES


def test_numbers_that_numpy_made_travel_as_well() -> None:
    episode = Episode(np.int64(4), np.bool_(True), np.bool_(False), np.float32(1), np.int64(9))  # type: ignore[arg-type]
    fields = replace(INLINE, episodes=(episode,)).to_fields()
    assert fields[b"success"] == b"1"
    assert Trajectory.from_fields(fields).episodes == (EPISODES[0],)


def test_a_trajectory_reads_in_redis_cli_as_documented() -> None:
    fields = INLINE.to_fields()
    del fields[b"digest"], fields[b"data"]
    assert fields == {
        b"id": NAME.encode(),
        b"simulator": b"simulator-0",
        b"ticket": b"17.2",
        b"n": b"2",
        b"steps": b"3",
        b"version": b"5",
        b"episodes": b"2",
        b"success": b"1",
        b"schema": b"3",
    }


def test_the_version_is_that_of_the_oldest_chunk_step() -> None:
    assert INLINE.version == 5


def test_loading_inline_payloads_gives_the_observations_of_every_chunk_step() -> None:
    loaded = Trajectory.from_fields(INLINE.to_fields()).load(never_read)
    assert [int(o.images["front"][0, 0, 0, 0]) for o in loaded.observations] == [0, 1, 2, 3]
    assert loaded.final is not None and int(loaded.final.images["front"][0, 0, 0, 0]) == 99
    assert_equal(loaded, INLINE.segment)


def test_loading_references_reads_each_once() -> None:
    stored = dict(zip(REFERENCES, (*PACKETS, FINAL), strict=True))
    read: list[str] = []

    def from_store(reference: str) -> bytes:
        read.append(reference)
        return stored[reference]

    loaded = Trajectory.from_fields(BY_REFERENCE.to_fields()).load(from_store)
    assert sorted(read) == sorted(REFERENCES) == sorted(BY_REFERENCE.references())
    assert len(loaded.observations) == T + 1 and len(loaded.final or ()) == 1


def test_a_payload_that_cannot_be_reached_is_told_as_such() -> None:
    def nowhere(reference: str) -> bytes:
        raise PayloadUnreachable(reference)

    with pytest.raises(PayloadUnreachable):
        Trajectory.from_fields(BY_REFERENCE.to_fields()).load(nowhere)


def test_a_segment_without_truncated_rows_has_no_final_observations() -> None:
    sent = replace(INLINE, segment=segment(final_rows=0), final_payload=None)
    returned = Trajectory.from_fields(sent.to_fields())
    assert returned.final_payload is None and returned.segment.final_index.shape == (0, 2)
    assert returned.load(never_read).final is None


ONES = np.ones((T, K), np.float32)
ARRAYS_REFUSED: list[tuple[dict[str, np.ndarray | None], str]] = [
    *(({name: None}, f"{name} is missing") for name in ARRAYS),
    ({"final_index": None}, "final_index is missing"),
    ({"actions": np.ones((T, K, H, A))}, "actions is float64"),
    ({"actions": np.ones((T, K, H), np.float32)}, r"expected float32\[T, k, H, A\]"),
    ({"actions": np.full((T, K, H, A), np.nan, np.float32)}, "actions holds NaN"),
    ({"rewards": np.full((T, K), np.inf, np.float32)}, "rewards holds NaN or infinity"),
    ({"logprobs": np.ones((T, K, H, A + 1), np.float32)}, "expected A = 2"),
    ({"executed": np.ones((T, K, H + 1), bool)}, "expected H = 4"),
    ({"rewards": ONES[:2]}, "expected T = 3"),
    ({"valid": np.ones((T, K + 1), bool)}, "expected k = 2"),
    ({"valid": ONES}, r"valid is float32\[3, 2\], expected bool\[T, k\]"),
    ({"versions": np.ones(T, np.int32)}, "versions is int32"),
    ({"final_index": np.array([[0, K]])}, "final_index points outside"),
    ({"final_index": np.array([[T, 0]])}, "final_index points outside"),
    ({"final_index": np.array([[-1, 0]])}, "final_index points outside"),
    ({"final_index": np.array([0, 0])}, r"final_index is int64\[2\]"),
    ({"extra.tokens": np.ones((T, K + 1))}, "an extra array does not start with"),
    ({"extra.tokens": np.ones(T)}, "an extra array does not start with"),
    ({"payload.0": None}, "observations 0 have neither bytes nor a reference"),
    (
        {
            "actions": np.ones((T, K, 0, A), np.float32),
            "logprobs": np.ones((T, K, 0, A), np.float32),
            "executed": np.ones((T, K, 0), bool),
        },
        "expected H of at least 1",
    ),
]


@pytest.mark.parametrize(("arrays", "message"), ARRAYS_REFUSED, ids=[message for _, message in ARRAYS_REFUSED])
def test_f27_arrays_that_do_not_agree_are_refused_by_name(arrays: dict[str, np.ndarray | None], message: str) -> None:
    with pytest.raises(BadMessage, match=message):
        Trajectory.from_fields(resealed(arrays, {}))


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"references": None}, "lacks its list of references"),
        ({"references": [1] * 5}, "lacks its list of references"),
        ({"references": [""] * 4}, "4 observation packets, expected 5"),
        ({"references": [""] * 5 + ["shm:x"]}, "6 observation packets, expected 5"),
        ({"episodes": None}, "episodes do not decode"),
        ({"episodes": [[1, True, 0.0]]}, "episodes do not decode"),
        ({"episodes": [["x", True, 0.0, 1]]}, "episodes do not decode"),
        ({"episodes": [[float("inf"), True, 0.0, 1]]}, "episodes do not decode"),
        ({"episodes": 5}, "episodes do not decode"),
    ],
    ids=str,
)
def test_f27_lists_of_another_form_are_refused(meta: dict[str, object], message: str) -> None:
    with pytest.raises(BadMessage, match=message):
        Trajectory.from_fields(resealed({}, meta))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 3}, "expected k = 3"),
        ({"steps": 2}, "expected T = 2"),
        ({"steps": 0}, "field steps is 0"),
        ({"n": 5000}, "field n is 5000"),
        ({"ticket": "17"}, "expected <number>.<attempt>"),
        ({"ticket": "a.b"}, "expected <number>.<attempt>"),
        ({"data": b"\x00\x01"}, "packet of 2 bytes"),
    ],
    ids=str,
)
def test_f27_fields_that_contradict_the_arrays_are_refused(fields: dict[str, str | int], message: str) -> None:
    with pytest.raises(BadMessage, match=message):
        Trajectory.from_fields(resealed({}, {}, **fields))


@pytest.mark.parametrize(
    ("step", "packet", "message"),
    [
        (0, b"not a packet", "packet"),
        (1, pack_observations(observations(K + 1, 0)), "3 rows, expected 2"),
        (2, pack_observations(observations(K, 0, height=5)), "change their shape between chunk steps"),
        (T + 1, pack_observations(observations(2, 0)), "2 rows, expected 1"),
        (T + 1, pack_observations(observations(1, 0, height=5)), "change their shape"),
    ],
)
def test_f27_observations_that_do_not_fit_the_segment_are_refused(step: int, packet: bytes, message: str) -> None:
    places = [*PACKETS, FINAL]
    places[step] = packet
    trajectory = replace(INLINE, payloads=tuple(places[:-1]), final_payload=places[-1])
    with pytest.raises(BadMessage, match=message):
        Trajectory.from_fields(trajectory.to_fields()).load(never_read)


def test_f27_another_schema_and_any_damage_are_refused() -> None:
    fields = INLINE.to_fields()
    with pytest.raises(BadMessage, match="schema"):
        Trajectory.from_fields(fields | {b"schema": b"99"})
    for name in fields:
        with pytest.raises(BadMessage):
            Trajectory.from_fields(fields | {name: fields[name] + b"0"})


def test_a_member_is_ticket_and_attempt() -> None:
    assert parse_member("17.2") == (17, 2)
    for foreign in ("", "17", "17.", ".2", "1.2.3", "-1.2", "\u0661.\u0662", "17.2 "):
        with pytest.raises(BadMessage, match="expected <number>"):
            parse_member(foreign)
