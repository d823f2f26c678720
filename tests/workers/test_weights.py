"""The way of the weights, from a trainer's memory to a generator's policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from live_run import Run
from own_server import own_server
from torch import Tensor, nn
from trainer_bench import Make

from vla_stream.broker.connection import UNREACHABLE, Client, connect
from vla_stream.broker.scripts import Scripts
from vla_stream.config import Trainer as TrainerConfig
from vla_stream.streams.keys import Keys
from vla_stream.streams.weights import CHUNK_BYTES, ENTRIES_KEPT, WeightsManifest
from workers.weights import Places, WeightsReader, WeightsWriter, to_bytes


class Net(nn.Module):
    """What a generator needs of a policy here: 5 MB of bf16, some f32, and an integer buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Parameter(torch.randn(2_500_000).to(torch.bfloat16))
        self.heads = nn.ModuleList([nn.Linear(7, 3), nn.Linear(3, 1)])
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def update(self) -> None:
        """Change a part of everything, as an optimiser step does."""
        with torch.no_grad():
            changed = torch.rand(self.body.shape) < 0.02
            self.body.view(torch.int16)[changed] += torch.randint(-2, 3, (int(changed.sum()),), dtype=torch.int16)
            self.heads[1].weight += 1.0
            self.steps += 1


class Bench:
    """A trainer's side, and as many generators' as wanted."""

    def __init__(self, client: Client, run: str, base_every: int = 20) -> None:
        self.client, self.keys = client, Keys(run)
        self.net, self.version = Net(), 0
        self.writer = WeightsWriter(client, Scripts(client), self.keys, base_every)
        self.buried: list[str] = []
        self.manifests: dict[int, WeightsManifest] = {}
        self.states: dict[int, dict[str, Tensor]] = {}

    def publish(self, count: int = 1) -> WeightsManifest:
        """So many versions, one after the other, as a trainer's commits leave them."""
        for _ in range(count):
            self.net.update()
            self.version += 1
            upload = self.writer.describe(self.version, self.version, 1, to_bytes(self.net.state_dict()))
            self.writer.upload(upload)
            fields: Any = upload.manifest.to_fields()
            self.client.xadd(self.keys.weights, fields, maxlen=ENTRIES_KEPT, approximate=False)
            self.writer.keep(upload)
            self.manifests[self.version] = upload.manifest
            self.states = {self.version: {name: t.clone() for name, t in self.net.state_dict().items()}}
        return self.manifests[self.version]

    def reader(self) -> WeightsReader:
        return WeightsReader(
            self.client,
            self.keys,
            lambda _, letters: self.buried.extend(reason for _, reason in letters),
            Places(Net(99)),  # type: ignore[arg-type]
        )

    def arrives(self, reader: WeightsReader) -> int:
        """The version that a look brings; the newest one must be what the trainer has, bit for bit."""
        reader.poll()
        newest = reader.newest()
        assert newest is not None and newest.digest == self.manifests[newest.version].digest
        if newest.version == self.version:
            expected = self.states[self.version]
            assert newest.state.keys() == expected.keys()
            assert all(same_bits(newest.state[name], tensor) for name, tensor in expected.items())
        return newest.version

    def chunk(self, version: int, index: int = 0) -> str:
        return self.keys.weight_chunk(version, 1, index)

    def fetched(self, reader: WeightsReader, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The names of the chunks that the reader asks for from now on."""
        asked: list[str] = []
        get = reader.client.get
        monkeypatch.setattr(reader.client, "get", lambda key: (asked.append(str(key)), get(key))[1])
        return asked


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


@pytest.fixture
def bench(client: Client, run_name: str) -> Iterator[Bench]:
    yield Bench(client, run_name)


def test_f26_weights_that_are_too_large_for_one_value_arrive_in_chunks(tmp_path: Path) -> None:
    # Redis's own limit is 512 MB, and what exceeds it costs the connection; here it is 4 MB.
    with (
        own_server(tmp_path, ["--proto-max-bulk-len", "4mb"]) as port,
        contextlib.closing(connect(f"redis://127.0.0.1:{port}/0", name="test")) as client,
    ):
        bench = Bench(client, "big")
        with pytest.raises(UNREACHABLE):
            client.set("vla:{big}:whole", to_bytes(bench.net.state_dict()))
        assert len(bench.publish().chunk_digests) == 3
        assert bench.arrives(bench.reader()) == 1
    assert not bench.buried


def test_after_a_base_only_what_changed_travels_and_gives_the_same_weights_bit_for_bit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = bench.publish()
    reader = bench.reader()
    assert base.after == 0 and bench.arrives(reader) == 1
    delta = bench.publish()
    asked = bench.fetched(reader, monkeypatch)
    assert (delta.after, delta.after_digest) == (1, base.digest)
    assert bench.arrives(reader) == 2
    assert asked == [bench.chunk(2)] and delta.size_bytes < 0.05 * base.size_bytes


def test_versions_published_between_two_looks_are_applied_in_their_order(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.publish(2)
    reader = bench.reader()
    assert bench.arrives(reader) == 2
    bench.publish(5)
    asked = bench.fetched(reader, monkeypatch)
    assert bench.arrives(reader) == 7
    assert asked == [bench.chunk(version) for version in (3, 4, 5, 6, 7)]


def test_a_generator_that_joins_late_loads_the_base_and_its_deltas(bench: Bench) -> None:
    bench.publish(6)
    assert [bench.manifests[version].after for version in range(1, 7)] == [0, 1, 2, 3, 4, 5]
    assert bench.arrives(bench.reader()) == 6
    assert not bench.buried


def test_a_reader_that_is_behind_the_newest_base_leaves_older_deltas_out(
    client: Client, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(client, run_name, base_every=3)
    bench.publish(2)
    reader = bench.reader()
    bench.arrives(reader)
    bench.publish(3)
    asked = bench.fetched(reader, monkeypatch)
    assert bench.arrives(reader) == 5
    assert asked == [*(bench.chunk(4, index) for index in range(3)), bench.chunk(5)]


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_f44_f27_a_delta_that_is_gone_or_damaged_leaves_the_older_weights_until_the_next_base(
    client: Client, run_name: str, harm: str
) -> None:
    bench = Bench(client, run_name, base_every=5)
    bench.publish(2)
    reader = bench.reader()
    assert bench.arrives(reader) == 2
    bench.publish(2)
    if harm == "gone":
        client.delete(bench.chunk(3))
    else:
        client.setrange(bench.chunk(3), 20, b"damage")
    late = bench.reader()
    assert bench.arrives(reader) == 2 and bench.arrives(late) == 2
    assert bench.buried == ([] if harm == "gone" else 2 * ["weights 3: chunk 0 does not match its digest"])
    bench.publish()
    assert bench.arrives(reader) == 2, "5 follows 4, which cannot be reached"
    bench.publish()
    assert bench.arrives(reader) == 6 and bench.arrives(late) == 6, "and 6 is a base"


def test_weights_here_that_are_not_what_they_seem_are_made_anew_from_the_base(bench: Bench) -> None:
    bench.publish(2)
    reader = bench.reader()
    bench.arrives(reader)
    assert reader._whole is not None
    reader._whole.data[-1] ^= 1  # a bit that memory lost
    bench.publish()
    assert bench.arrives(reader) == 3 and not bench.buried


def test_f27_a_delta_that_does_not_give_what_its_manifest_promises_is_buried(bench: Bench, client: Client) -> None:
    bench.publish()
    reader = bench.reader()
    bench.arrives(reader)
    upload = bench.writer.describe(2, 2, 1, to_bytes(Net(0).state_dict()))
    assert upload.manifest.after == 1
    fields: Any = replace(upload.manifest, digest="0" * 16).to_fields()
    bench.writer.upload(upload)
    client.xadd(bench.keys.weights, fields)
    assert bench.arrives(reader) == 1
    assert [reason.partition(":")[0] for reason in bench.buried] == ["weights 2"]
    bench.version = 2
    bench.publish()
    assert bench.arrives(reader) == 3, "the next one follows 1, which is here"


def test_weights_of_another_lineage_under_the_same_number_are_no_start_for_a_delta(
    bench: Bench, client: Client
) -> None:
    other = Bench(client, bench.keys.run)
    other.net = Net(7)
    other.publish(2)
    reader = other.reader()
    other.arrives(reader)
    client.delete(bench.keys.weights)  # a lost server; its successor's trainer begins with a base
    bench.publish(3)
    assert bench.manifests[3].after == 2 == reader.newest().version  # type: ignore[union-attr]
    reader._places, bench.buried = Places(Net()), other.buried  # type: ignore[arg-type]
    assert bench.arrives(reader) == 3 and not other.buried


def test_the_server_keeps_the_newest_base_and_its_deltas_and_the_rest_for_a_minute(
    client: Client, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(client, run_name)
    most = 0
    for _ in range(60):
        bench.publish()
        chunks = list(client.scan_iter(match=bench.keys.everything_pattern.replace("*", "weights:*"), count=1000))
        stay = [key for key in chunks if client.pttl(key) == -1]
        assert all(0 < client.pttl(key) <= 60_000 for key in set(chunks) - set(stay))
        most = max(most, len(stay))
        if bench.version == 21:
            assert len(chunks) - len(stay) == 3 + 19, "what was needed until now"
        for key in set(chunks) - set(stay):
            client.pexpire(key, 1)  # as if the minute was over
    assert most == 3 + 19, "a base of three chunks, and a delta in one for each version up to the next base"
    assert client.xlen(bench.keys.weights) == ENTRIES_KEPT
    assert bench.arrives(bench.reader()) == 60 and not bench.writer.missing()


def test_small_weights_and_weights_that_change_everywhere_are_published_full(bench: Bench, client: Client) -> None:
    bench.publish()
    with torch.no_grad():
        bench.net.body += torch.randn(bench.net.body.shape).to(torch.bfloat16)
    assert bench.publish().after == 0
    small = WeightsWriter(client, Scripts(client), Keys(f"{bench.keys.run}-small"), 20)
    for version in (1, 2):
        upload = small.describe(version, version, 1, to_bytes({"w": torch.ones(CHUNK_BYTES // 4 - 100)}))
        small.keep(upload)
        assert upload.manifest.after == 0


def test_every_base_and_its_deltas_are_among_the_entries_that_are_kept() -> None:
    (limit,) = [item.le for item in TrainerConfig.model_fields["weights_base_every"].metadata if hasattr(item, "le")]
    assert limit <= ENTRIES_KEPT


# ---- a policy takes them over


def test_tensors_are_exchanged_and_none_is_copied_while_the_policy_waits(bench: Bench) -> None:
    policy = Net(3)
    parameters, reader = list(policy.parameters()), bench.reader()
    bench.publish()
    bench.arrives(reader)
    newest = reader.newest()
    assert newest is not None
    Places(policy).take(newest.state)  # type: ignore[arg-type]
    assert all(same_bits(policy.state_dict()[name], tensor) for name, tensor in newest.state.items())
    assert all(policy.state_dict()[name].data_ptr() == tensor.data_ptr() for name, tensor in newest.state.items())
    assert all(now is before for now, before in zip(policy.parameters(), parameters, strict=True))


def test_a_policy_may_change_its_tensors_and_the_next_delta_is_still_right(bench: Bench) -> None:
    bench.publish()
    reader, policy = bench.reader(), Net()
    places = Places(policy)  # type: ignore[arg-type]
    bench.arrives(reader)
    newest = reader.newest()
    assert newest is not None
    places.take(newest.state)
    policy.steps = policy.steps + 100  # its buffer is another tensor now
    with torch.no_grad():
        policy.body.zero_()
    bench.publish()
    assert bench.arrives(reader) == 2
    newest = reader.newest()
    assert newest is not None
    places.take(newest.state)
    assert policy.steps == 2 and torch.equal(policy.body, bench.net.body)


def test_a_policy_gets_weights_in_the_dtype_that_it_runs_in(bench: Bench) -> None:
    policy = Net().to(torch.float32)
    bench.publish()
    reader = WeightsReader(bench.client, bench.keys, pytest.fail, Places(policy))  # type: ignore[arg-type]
    reader.poll()
    newest = reader.newest()
    assert newest is not None
    Places(policy).take(newest.state)  # type: ignore[arg-type]
    assert policy.body.dtype == torch.float32 and torch.equal(policy.body, bench.net.body.float())


class OwnWay(Net):
    """A policy that does more than torch when weights are loaded."""

    loads = 0

    def load_state_dict(self, state: Any, *_: Any, **__: Any) -> Any:
        self.loads += 1
        return super().load_state_dict(state)


def test_a_policy_that_loads_in_its_own_way_is_asked_to(bench: Bench) -> None:
    policy = OwnWay(3)
    Places(policy).take(bench.net.state_dict())  # type: ignore[arg-type]
    assert policy.loads == 1 and torch.equal(policy.body, bench.net.body)


def test_weights_that_are_not_the_policys_are_refused_by_name(bench: Bench) -> None:
    state = bench.net.state_dict()
    for wrong in ({**state, "extra": torch.ones(1)}, {**state, "body": torch.ones(3)}):
        with pytest.raises(RuntimeError, match=r"extra|body"):
            Places(Net()).take(wrong)  # type: ignore[arg-type]


# ---- a trainer publishes them


def five_mb(run: Run) -> dict[str, Any]:
    """A policy whose optimiser steps change some of its weights; its devices are this run's own."""
    return {"name": "emulated", "chunk": 2, "options": {"weights_mb": 5, "folder": str(run.folder)}}


def update(bench: Any, trainer: Any) -> WeightsManifest:
    bench.feed(2, trainer.version)
    assert trainer.step(None)
    manifest: WeightsManifest = bench.weights()
    return manifest


def newest_of(run: Run, policy: Any) -> tuple[int, dict[str, Tensor]]:
    reader = WeightsReader(run.client, run.keys, pytest.fail, Places(policy))
    reader.poll()
    newest = reader.newest()
    assert newest is not None
    return newest.version, dict(newest.state)


def test_a_trainer_publishes_deltas_and_its_successor_begins_with_a_base(make: Make, run: Run) -> None:
    bench = make(policy=five_mb(run), updates=9)
    trainer = bench.trainer()
    assert [update(bench, trainer).after for _ in range(2)] == [1, 2]
    version, state = newest_of(run, bench.policy)
    assert version == 3
    assert all(same_bits(state[name], tensor) for name, tensor in trainer.learner.policy.state_dict().items())
    again = bench.trainer()
    base = bench.weights()
    assert (base.version, base.after, base.epoch) == (4, 0, 2)
    for key in (run.keys.weight_chunk(old, 1, 0) for old in (1, 2, 3)):
        assert 0 < run.client.pttl(key) <= 60_000, "the old lineage's base and deltas may go"
    assert update(bench, again).after == 4
    assert newest_of(run, bench.policy)[0] == 5


@pytest.mark.parametrize("harm", ["the stream", "a chunk of the base", "a delta"])
def test_f44_weights_that_no_generator_could_load_any_more_are_published_anew(make: Make, run: Run, harm: str) -> None:
    bench = make(policy=five_mb(run), updates=9, flow={"lease_s": 0.05})
    trainer = bench.trainer()
    last = update(bench, trainer)
    run.client.delete(
        {
            "the stream": run.keys.weights,
            "a chunk of the base": run.keys.weight_chunk(1, 1, 1),
            "a delta": run.keys.weight_chunk(2, 1, 0),
        }[harm]
    )
    while trainer.version == 2:
        assert not trainer.step(None)
    base = bench.weights()
    assert (base.version, base.update, base.after, base.digest) == (3, 1, 0, last.digest)
    assert newest_of(run, bench.policy)[0] == 3
    assert [text for kind, text in run.events() if kind == "weights"] and run.kinds().count("rolled back") == 0
    assert update(bench, trainer).after == 3
    books = run.flow.books()
    assert books.outcomes["trained"] == 4 and books.balance == 0


def test_f44_a_connection_that_is_cut_while_weights_are_published_anew_does_not_fence_their_trainer_off(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(policy=five_mb(run), updates=9, flow={"lease_s": 0.05})
    trainer = bench.trainer()
    resume, tries = trainer.flow.resume, list[int]()

    def cut(*arguments: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise UNREACHABLE[0]("before it was sent")
        resume(*arguments)
        if len(tries) == 2:
            raise UNREACHABLE[0]("after it was done")

    monkeypatch.setattr(trainer.flow, "resume", cut)
    run.client.delete(run.keys.weights)
    trainer._mend_weights()
    state = run.flow.state()
    assert state is not None and len(tries) == 3
    assert (state.epoch, state.version) == (trainer.epoch, trainer.version) == (trainer.intake.epoch, state.version)
    assert newest_of(run, bench.policy)[0] == trainer.version
    bench.feed(version=trainer.version)
    assert trainer.step(None) and run.flow.books().balance == 0


def test_a_trainer_that_was_replaced_does_not_mend_weights(make: Make, run: Run) -> None:
    bench = make(policy=five_mb(run), flow={"lease_s": 0.05})
    replaced = bench.trainer()
    successor = bench.trainer()
    run.client.delete(run.keys.weights, run.keys.weight_chunk(1, 1, 0))
    replaced._mend_weights()
    state = run.flow.state()
    assert state is not None and (state.epoch, state.version) == (successor.epoch, successor.version) == (2, 2)
