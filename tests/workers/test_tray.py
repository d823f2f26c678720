"""A generator's batch, read straight to its rows: the same observations as by the plain way, whatever comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from vla_stream.broker.codec import pack
from vla_stream.broker.lanes import PayloadReader, ShmLane, segment_name
from vla_stream.environments.protocol import Observations
from vla_stream.errors import BadMessage, PayloadUnreachable
from vla_stream.streams.obs_requests import ObsRequest, RequestId
from vla_stream.streams.observations import observation_pieces, pack_observations
from workers.tray import Tray

RANDOM = np.random.default_rng(0)


def look(rows: int, size: int = 9, words: str = "go") -> Observations:
    """Two cameras whose bytes end between two alignments."""
    images = {name: RANDOM.integers(0, 256, (rows, size, 5, 3), dtype=np.uint8) for name in ("front", "wrist")}
    return Observations(images, RANDOM.normal(size=(rows, 3)).astype(np.float32), [f"{words} {i}" for i in range(rows)])


def same(seen: Observations, expected: Observations) -> bool:
    equal = all(np.array_equal(seen.images[camera], image) for camera, image in expected.images.items())
    return equal and np.array_equal(seen.state, expected.state) and list(seen.instruction) == list(expected.instruction)


class Desk:
    """A simulator's lane, and a generator's reader with a tray of eight rows that knows the shapes."""

    def __init__(self, folder: Path) -> None:
        self.lane, self.segment = ShmLane(folder), segment_name(1, 1)
        self.reader = PayloadReader(None, str, folder)  # type: ignore[arg-type]
        self.tray = Tray(8)
        self.read(look(1))

    def request(self, observations: Observations, inline: bool = False) -> ObsRequest:
        packet = observation_pieces(observations)
        payload = b"".join(packet) if inline else None
        reference = "" if inline else self.lane.write(self.segment, 0, *packet)
        identity = RequestId("simulator-0", "9f2c11ab", 0, 0, 1, 1, 0)
        return ObsRequest(identity, len(observations), 0, "sample", payload, reference)

    def read(self, observations: Observations, inline: bool = False) -> Observations:
        return self.tray.read(self.reader, self.request(observations, inline))


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.lane.release(made.segment)


def landed(desk: Desk, observations: Observations) -> bool:
    return np.shares_memory(observations.state, desk.tray._arrays["state"])


def test_requests_of_the_known_shapes_lie_together_and_are_joined_without_a_copy(desk: Desk) -> None:
    sent = [look(rows) for rows in (2, 1, 3)]
    parts = [desk.read(one) for one in sent]
    joined = desk.tray.joined(parts, 6)
    assert all(map(same, parts, sent)) and same(joined, Observations.concatenate(sent))
    assert np.shares_memory(joined.images["wrist"], parts[2].images["wrist"])


def test_padding_repeats_the_last_row_in_place(desk: Desk) -> None:
    sent = [look(2), look(2)]
    joined = desk.tray.joined([desk.read(one) for one in sent], 7)
    assert same(joined, Observations.concatenate([*sent, sent[1].take([1, 1, 1])]))
    assert landed(desk, joined)


def test_padding_does_not_overwrite_a_request_that_waits_for_a_later_batch(desk: Desk) -> None:
    sent = [look(2), look(2)]
    parts = [desk.read(one) for one in sent]
    joined = desk.tray.joined(parts[:1], 4)
    assert same(joined, sent[0].take([0, 1, 1, 1])) and same(parts[1], sent[1])


@pytest.mark.parametrize("order", [(1, 0), (1,), (0, 2)])
def test_requests_that_do_not_lie_one_after_the_other_are_joined_all_the_same(desk: Desk, order: tuple[int]) -> None:
    sent = [look(2) for _ in range(3)]
    parts = [desk.read(one) for one in sent]
    joined = desk.tray.joined([parts[i] for i in order], 2 * len(order))
    assert same(joined, Observations.concatenate([sent[i] for i in order]))
    assert not landed(desk, joined)


def test_what_lies_in_a_tray_stays_when_the_next_one_is_filled(desk: Desk) -> None:
    sent = [look(3), look(3)]
    first = desk.read(sent[0])
    desk.tray = desk.tray.another()
    second = desk.read(sent[1])
    assert same(first, sent[0]) and landed(desk, second)
    assert same(desk.tray.joined([first, second], 6), Observations.concatenate(sent))


@pytest.mark.parametrize(
    ("observations", "inline"),
    [(look(2), True), (look(2, size=8), False), (look(9), False), (look(3, words="word " * 390), False)],
    ids=["inline", "another shape", "no room", "more words than the head holds"],
)
def test_what_has_no_place_here_is_read_the_plain_way(desk: Desk, observations: Observations, inline: bool) -> None:
    many = Observations.concatenate([observations] * 2)
    for sent in (observations, many):
        seen = desk.read(sent, inline)
        assert same(seen, sent) and not landed(desk, seen)
    assert same(desk.tray.joined([seen], len(many)), many)


def test_other_arrays_than_those_of_an_observation_are_refused_as_by_the_plain_way(desk: Desk) -> None:
    seen = look(1)
    arrays = {f"image.{camera}": image for camera, image in seen.images.items()}
    for packet in (
        pack(arrays, {"instruction": ["go"]}),
        pack({**arrays, "state": seen.state, "speed": seen.state}, {"instruction": ["go"]}),
        pack({**arrays, "state": seen.state * np.nan}, {"instruction": ["go"]}),
        pack({**arrays, "state": seen.state}, {"instruction": ["go", "on"]}),
        pack_observations(seen)[:-1],
    ):
        reference = desk.lane.write(desk.segment, 0, packet)
        request = ObsRequest(RequestId("simulator-0", "9f2c11ab", 0, 0, 1, 1, 0), 1, 0, "sample", None, reference)
        with pytest.raises(BadMessage):
            desk.tray.read(desk.reader, request)
    assert landed(desk, desk.read(seen)) and desk.tray._filled == 1


def test_f27_a_damaged_or_removed_observation_takes_no_row(desk: Desk) -> None:
    good, bad = look(2), desk.request(look(2))
    with (desk.lane.folder / desk.segment).open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"other")
    with pytest.raises(BadMessage, match="other bytes than were referenced"):
        desk.tray.read(desk.reader, bad)
    part = desk.read(good)
    assert same(part, good) and same(desk.tray.joined([part], 2), good)
    gone = desk.request(good)
    desk.lane.remove(desk.segment)
    with pytest.raises(PayloadUnreachable):
        desk.tray.read(desk.reader, gone)
    assert desk.tray._filled == 2
