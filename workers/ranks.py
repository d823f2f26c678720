"""Several processes as one trainer.

Rank 0 is the trainer: it alone takes segments from the stream, holds their leases, commits, writes checkpoints and
publishes, with the code of a single trainer. Of each N segments it keeps one and sends the others to ranks 1 to N - 1,
so that each trains exactly B/N per update. Those compute, and know nothing of Redis: where every rank were a consumer
of its own, a segment that one of them refuses would make all wait, a segment could be handed to one that has its share
already, and a crash would leave several pending lists, leases and epochs to bring together.

Whatever happens to one rank ends rank 0: it sees a process end, or a collective take longer than
`trainer.rank_deadline_s`. Its supervisor kills what is left of the group, and starts it from the newest checkpoint.

    rank 0 ── a line on its stdin: what to do ──▶ rank r          starts each, and watches it
           ── torch.distributed: its segment ───▶
           ◀─ torch.distributed: sums, weights ─▶

All ranks are on one host. Rank r has device r of the list that `--device` gave, or cuda:r: never run on a GPU so far.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vla_stream import config as configs
from vla_stream.broker.codec import pack, unpack
from vla_stream.broker.connection import UNREACHABLE
from vla_stream.config import Config
from vla_stream.environments.protocol import Specification
from vla_stream.errors import InputError, RunFailed, VlaStreamError
from vla_stream.learning.ranks import Alone, Replicas, Shards
from vla_stream.learning.segments import Segment
from vla_stream.learning.update import Learner, LearnerState, UpdateResult
from vla_stream.streams import presence
from vla_stream.streams.observations import pack_observations, unpack_observations
from vla_stream.streams.specification import specification_from_json, specification_to_json
from vla_stream.streams.trajectories import ARRAYS
from workers.lifeline import die_with_parent
from workers.models import load_demonstrations, make_policy, torch_device
from workers.processes import log_tail, signal_name
from workers.worker import Worker

COUNT_VARIABLE = "VLA_STREAM_RANKS"  # set by the supervisor: `trainers -n N` may want others than the config
LOOPBACK = "127.0.0.1"
READY, MEET = "ready", "meet"  # keys of the store in which ranks find each other
POLL_S = 0.05
WAIT_FOR_RANK_0_S = 24 * 3600.0  # a warm start takes as long as it takes; a rank ends with its rank 0
LAST_WORDS_S = 2.0  # a rank that has ended is told of first, and then what its end broke
LEAVE_S = 5.0
GIVES_UP = (2, 3)  # exit codes after which starting again is no remedy: see worker.run_process


class Group:
    """Rank 0's side: the other processes."""

    def __init__(self, worker: Worker, config: Config, specification: Specification, count: int) -> None:
        """Start them: they load their policies while rank 0 loads its own, see `meet`."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.worker, self.config, self.count = worker, config, count
        self._closing, self._broken = False, False
        self._processes: list[subprocess.Popen[bytes]] = []
        devices = rank_devices(worker.device or config.trainer.device, count)
        # The store listens here alone, as do the ranks' connections: no other host takes part.
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.device = torch_device(devices[0])
        worker.device = str(self.device)
        about = {
            "config": config.model_dump(mode="json"),
            "specification": specification_to_json(specification),
            "count": count,
            "port": port,
            "parent": os.getpid(),
        }
        for rank in range(1, count):
            self._start(rank, {**about, "rank": rank, "device": devices[rank]})

    def meet(self) -> Alone:
        """Once all have loaded; from here on no rank waits for another longer than the deadline."""
        for rank in range(1, self.count):
            while not self._store.check([f"{READY}/{rank}"]):
                time.sleep(POLL_S)
        self._store.set(MEET, "")
        with self.in_step():
            return _join(self._store, 0, self.count, self.device, self.config)

    def tell(self, do: str, **about: Any) -> None:
        """Have the others do something, in which rank 0 is to take part."""
        line = json.dumps({"do": do, **about}).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()

    def send(self, segments: Sequence[Segment]) -> None:
        """The first to rank 1, and so on."""
        from torch.distributed import isend

        under_way = []
        for rank, segment in enumerate(segments, 1):
            parts = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in take_apart(segment)]
            sizes = torch.tensor([len(part) for part in parts])
            sent = [torch.tensor([len(parts)]), sizes, *parts]
            under_way += [(isend(tensor, rank), tensor) for tensor in sent]
        for work, _ in under_way:
            if work is not None:
                work.wait()

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """What is done together. If it fails, nobody knows where the others are: the group is of no more use."""
        if self._broken:
            raise RunFailed("the ranks are no longer in step; all are started again")
        try:
            yield
        except Exception as exc:
            self._broken = True
            time.sleep(LAST_WORDS_S)
            if "timed out" in str(exc).lower():
                raise RunFailed(
                    f"a rank took longer than trainer.rank_deadline_s, {self.config.trainer.rank_deadline_s:g} s; "
                    "all are started again"
                ) from exc
            if isinstance(exc, BrokenPipeError):
                raise RunFailed("a rank has ended; all are started again") from exc
            raise

    def close(self) -> None:
        """End them."""
        self._closing = True
        fellows, self.worker.fellows = list(self.worker.fellows), {}
        with contextlib.suppress(*UNREACHABLE):
            for name in fellows:
                presence.release(self.worker.flow.scripts, self.worker.keys, name, self.worker.token)
        for process in self._processes:
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
        deadline_s = time.monotonic() + LEAVE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, rank: int, about: dict[str, Any]) -> None:
        role, _, number = self.worker.id.rpartition("-")
        name = f"{role}-{int(number) + rank}"
        logs = self.config.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        path = logs / f"{name}.log"
        with path.open("ab") as log:
            start = log.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", "workers.ranks"], stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        self._processes.append(process)
        assert process.stdin is not None
        process.stdin.write(json.dumps({**about, "name": name}).encode() + b"\n")
        process.stdin.flush()
        self.worker.fellows[name] = {"pid": process.pid, "device": about["device"]}
        # A thread, since rank 0 may wait for this very rank in a call of NCCL's that nothing interrupts.
        watch = threading.Thread(target=self._watch, args=(process, name, path, start), name=f"watch {name}")
        watch.daemon = True
        watch.start()

    def _watch(self, process: subprocess.Popen[bytes], name: str, log: Path, start: int) -> None:
        code = process.wait()
        if self._closing:
            return
        lines = log_tail(log, start)
        last = lines[-1] if lines else "its log is empty"
        cause = f"killed by {signal_name(-code)}" if code < 0 else last
        print(f"{self.worker.id}: rank {name} has ended, {cause}", file=sys.stderr, flush=True)
        os._exit(code if code in GIVES_UP else 1)


class Leader:
    """Rank 0's learner, as the trainer sees it: each call is made by all ranks."""

    def __init__(self, learner: Learner, group: Group) -> None:
        self._learner, self._group = learner, group
        self._waiting: list[Segment] = []
        self.rank_count = group.count

    @property
    def version(self) -> int:
        """See Learner."""
        return self._learner.version

    @version.setter
    def version(self, version: int) -> None:
        self._learner.version = version

    def add(self, segment: Segment) -> None:
        """See Learner; done once every rank has a segment."""
        self._waiting.append(segment)
        if len(self._waiting) == self._group.count:
            (own, *others), self._waiting = self._waiting, []
            with self._together("add", version=self.version):
                self._group.send(others)
                self._learner.add(own)

    def finish(self, version: int) -> UpdateResult:
        """See Learner."""
        with self._together("finish", version=version):
            return self._learner.finish(version)

    @property
    def devices(self) -> int:
        """See Learner."""
        return self._learner.devices

    @property
    def apart(self) -> bool:
        """See Learner."""
        return self._learner.apart

    def settle(self) -> None:
        """See Learner; of this rank's device: what is done together all wait for."""
        self._learner.settle()

    def discard(self) -> None:
        """See Learner."""
        self._waiting = []
        with self._together("discard"):
            self._learner.discard()

    def weights(self) -> dict[str, Tensor]:
        """See Learner."""
        with self._together("weights"):
            return self._learner.weights()

    def state(self) -> LearnerState:
        """See Learner."""
        with self._together("state"):
            return self._learner.state()

    def load_state(self, state: LearnerState) -> None:
        """See Learner."""
        with self._together("load_state"):
            self._learner.load_state(state)

    @contextlib.contextmanager
    def _together(self, do: str, **about: int) -> Iterator[None]:
        with self._group.in_step():
            self._group.tell(do, **about)
            yield


def count_of(config: Config, device: str) -> int:
    """How many ranks this trainer is to have. device: theirs, where they were given some. Raises InputError."""
    count = int(os.environ.get(COUNT_VARIABLE) or config.trainer.ranks)
    problems = configs.rank_problems(config, count, device)
    if problems:
        raise InputError(problems[0])
    return count


class Make(Protocol):
    """Makes a learner; meet: to be called for its ranks once it has all that these do not need."""

    def __call__(
        self,
        config: Config,
        specification: Specification,
        device: torch.device,
        tell: Callable[[str], None],
        meet: Callable[[], Alone] = Alone,
    ) -> Learner: ...


@contextlib.contextmanager
def learner(worker: Worker, config: Config, specification: Specification, make: Make) -> Iterator[Learner | Leader]:
    """A trainer's learner, of as many processes as it is to have. Raises InputError."""
    count = count_of(config, worker.device)

    def tell(text: str) -> None:
        worker.say("warm start", text)

    if count == 1:
        device = torch_device(worker.device or config.trainer.device)
        worker.device = str(device)
        yield make(config, specification, device, tell)
        return
    with contextlib.closing(Group(worker, config, specification, count)) as group:
        yield Leader(make(config, specification, group.device, tell, group.meet), group)


def rank_devices(device: str, count: int) -> list[str]:
    """Of each rank: those of a list in turn; of `cuda`, or `auto` where there is one, cuda:0, cuda:1, …; else all the
    same. Raises InputError where there are fewer."""
    listed = device.split(",")
    if len(listed) > 1:
        if len(listed) < count:
            raise InputError(f"trainers -n {count}: --device names {len(listed)} devices; name one for each")
        return listed[:count]
    if device not in ("auto", "cuda") or (device == "auto" and not torch.cuda.is_available()):
        return [device] * count
    if torch.cuda.device_count() < count:
        raise InputError(
            f"trainer.ranks is {count}, but this host has {torch.cuda.device_count()} CUDA devices; lower it, or set "
            "trainer.device to cpu"
        )
    return [f"cuda:{rank}" for rank in range(count)]


def take_apart(segment: Segment) -> list[bytes]:
    """A segment as packets: its arrays, its observations, those before resets."""
    arrays = {name: getattr(segment, name) for name in ARRAYS} | {"final_index": segment.final_index}
    arrays |= {f"extra.{name}": array for name, array in segment.extras.items()}
    final = [] if segment.final is None else [segment.final]
    seen = [pack_observations(each) for each in (*segment.observations, *final)]
    return [pack(arrays, {"ticket": segment.ticket}), *seen]


def put_together(packets: Sequence[bytes | memoryview]) -> Segment:
    """The inverse."""
    views, meta = unpack(packets[0])
    arrays = {name: array.copy() for name, array in views.items()}  # small, and torch wants to own what it wraps
    extras = {name.removeprefix("extra."): arrays.pop(name) for name in list(arrays) if name.startswith("extra.")}
    observations = [unpack_observations(packet) for packet in packets[1:]]
    final = observations.pop() if len(observations) > len(arrays["actions"]) + 1 else None
    return Segment(meta["ticket"], observations, final, extras=extras, **arrays)


def _join(store: Any, rank: int, count: int, device: torch.device, config: Config) -> Alone:
    from torch import distributed

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=config.trainer.rank_deadline_s),
    )
    return (Shards if config.trainer.parallel == "fsdp" else Replicas)(device)


# ---- the other ranks


def _receive() -> Segment:
    from torch.distributed import recv

    def received(length: int, dtype: torch.dtype) -> np.ndarray:
        tensor = torch.empty(length, dtype=dtype)
        recv(tensor, 0)
        array: np.ndarray = tensor.numpy()
        return array

    (count,) = received(1, torch.int64).tolist()
    sizes = received(count, torch.int64).tolist()
    return put_together([received(size, torch.uint8).data for size in sizes])


def _serve() -> None:
    """Until rank 0 closes the pipe."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    about = json.loads(sys.stdin.buffer.readline())
    die_with_parent(about["parent"])
    config = configs.validate(about["config"])
    torch.set_num_threads(config.trainer.threads)
    rank, device = about["rank"], torch_device(about["device"])
    specification = specification_from_json(about["specification"])
    store = TCPStore(
        LOOPBACK,
        about["port"],
        is_master=False,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=WAIT_FOR_RANK_0_S),
    )

    def meet() -> Alone:
        store.set(f"{READY}/{rank}", "")
        store.wait([MEET])
        return _join(store, rank, about["count"], device, config)

    learner = _learner(config, specification, device, meet)
    for line in sys.stdin.buffer:
        told = json.loads(line)
        match told["do"]:
            case "add":
                learner.version = told["version"]
                learner.add(_receive())
            case "finish":
                learner.finish(told["version"])
            case "discard":
                learner.discard()
            case "weights":
                learner.weights()
            case "state":
                learner.state()
            case "load_state":
                learner.load_state(None)


def _learner(config: Config, specification: Specification, device: torch.device, meet: Callable[[], Alone]) -> Learner:
    """Its weights, and those of the reference, come from rank 0."""
    policy = make_policy(config, specification, device)
    reference = make_policy(config, specification, device) if config.algorithm.reference_kl_coefficient > 0 else None
    demonstrations, _ = load_demonstrations(config, specification) if config.imitates else (None, None)
    return Learner(
        policy, config.algorithm, config.trainer, config.seed, device, reference, demonstrations, ranks=meet()
    )


def main() -> None:
    """`python -m workers.ranks`, which rank 0 starts: all else stands in the first line on stdin.

    Exit codes: 0 ended with rank 0, 2 bad input, 1 anything else."""
    code = 1
    try:
        _serve()
        code = 0
    except InputError as exc:
        print(exc, file=sys.stderr, flush=True)
        code = 2
    except VlaStreamError as exc:
        print(exc, file=sys.stderr, flush=True)
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # threads of NCCL's may be in the midst of something


if __name__ == "__main__":
    main()
