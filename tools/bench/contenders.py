"""Ways of one observation there and its action back, for the broker benchmark: both ends of each.

A contender's client lives in the benchmark, its server in a process of its own, started as this file. Both ends do what
a real run does with the bytes: the client has an image in an array, the server copies it into a batch and answers with
actions; the first byte of the image comes back in them, so that nothing can be fast by leaving bytes behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vla_stream.broker.connection import Client, connect
from vla_stream.broker.lanes import Lane, PayloadReader, RedisLane, ShmLane, segment_name
from vla_stream.broker.queue import WorkQueue
from vla_stream.broker.scripts import Scripts
from vla_stream.environments.protocol import Observations
from vla_stream.errors import RunFailed
from vla_stream.policies.protocol import Act
from vla_stream.streams.actions import ActionReply
from vla_stream.streams.keys import GENERATORS, Keys
from vla_stream.streams.obs_requests import ObsRequest, RequestId
from vla_stream.streams.observations import observation_pieces
from workers.lifeline import die_with_parent
from workers.replies import Replies
from workers.tray import Tray

IMAGE = (224, 224, 3)  # 150,528 bytes
IMAGE_BYTES = int(np.prod(IMAGE))
ACTIONS = (1, 8, 7)
SEGMENT_STEPS = 8  # requests of a slot that share a segment, as in a rollout; then its bytes are removed
AT_ONCE = 16  # fewer than are on their way: while the server answers some, the client takes the answers to others
BLOCK_MS = 1000
SIMULATOR, INCARNATION = "bench", "0badcafe"
LANES = ("inline", "shm", "redis")
REFERENCE_BYTES = 96  # about as long as one in a stream


class Contender(Protocol):
    """The client's end. Slots are numbers; each has at most one observation on its way."""

    def send(self, slots: Sequence[int]) -> None:
        """An observation of each of these slots."""

    def receive(self) -> list[int]:
        """Wait for actions; the slots whose they are. Raises RunFailed when they are not those of what was sent."""

    def close(self) -> None:
        """End the server's process."""


class _Marks:
    """The image that a slot shows, and whether its answer is one to it."""

    def __init__(self, depth: int) -> None:
        self.image = np.random.default_rng(0).integers(0, 256, (1, *IMAGE), dtype=np.uint8)
        self._sent, self._count = [0] * depth, 0

    def next(self, slot: int) -> np.ndarray:
        self._count += 1
        self._sent[slot] = self.image[0, 0, 0, 0] = self._count % 251
        return self.image

    def check(self, slot: int, mark: float) -> None:
        if mark != self._sent[slot]:
            raise RunFailed(f"broker: the answer for slot {slot} is to image {mark:g}, expected {self._sent[slot]}")


class Library:
    """vla-stream's own messages, queue and one of its lanes."""

    def __init__(self, lane: str, url: str, run: str, folder: Path, depth: int) -> None:
        self.keys, self.client = Keys(run), connect(url, name=f"bench-{lane}", block_s=BLOCK_MS / 1000)
        self._lane = lane_named(lane, self.client, self.keys, folder)
        self._marks, self._state = _Marks(depth), np.zeros((1, 8), dtype=np.float32)
        self._segments, self._steps = [""] * depth, [0] * depth
        self._replies = Replies(self.client, self.keys.actions(SIMULATOR))
        self._replies.open()
        WorkQueue(self.client, Scripts(self.client), self.keys.obs_requests, GENERATORS, "-", 60.0).ensure_group()
        self._server = start_server("library", [url, run, str(folder)])

    def send(self, slots: Sequence[int]) -> None:
        with self.client.pipeline(transaction=False) as pipe:
            for slot in slots:
                pipe.xadd(self.keys.obs_requests, self._request(slot).to_fields())  # type: ignore[arg-type]
            pipe.execute()

    def _request(self, slot: int) -> ObsRequest:
        step = self._steps[slot] % SEGMENT_STEPS
        if step == 0:
            self._forget(slot)
            self._segments[slot] = segment_name(slot, 1)
        self._steps[slot] += 1
        data = observation_pieces(Observations({"front": self._marks.next(slot)}, self._state, ["touch the red cube"]))
        identity = RequestId(SIMULATOR, INCARNATION, 0, slot, slot, 1, step)
        if self._lane is None:
            return ObsRequest(identity, 1, 0, "sample", b"".join(data), "")
        return ObsRequest(identity, 1, 0, "sample", None, self._lane.write(self._segments[slot], step, *data))

    def receive(self) -> list[int]:
        found = []
        for entry in self._replies.read(BLOCK_MS):
            reply = ActionReply.from_fields(entry.fields)
            if reply.act is None:
                raise RunFailed(f"broker: {reply.error}")
            self._marks.check(reply.id.slot, float(reply.act.actions[0, 0, 0]))
            found.append(reply.id.slot)
        return found

    def _forget(self, slot: int) -> None:
        if self._lane is not None and self._segments[slot]:
            self._lane.remove(self._segments[slot])

    def close(self) -> None:
        stop_server(self._server)
        for slot in range(len(self._segments)):
            self._forget(slot)
        self.client.unlink(self.keys.obs_requests, self.keys.actions(SIMULATOR))
        self.client.close()


def lane_named(name: str, client: Client, keys: Keys, folder: Path) -> Lane | None:
    """None: inline."""
    if name == "shm":
        return ShmLane(folder)
    return RedisLane(client, keys.blob, 600.0) if name == "redis" else None


def serve_library(url: str, run: str, folder: str) -> None:
    """What a generator does, without inference."""
    keys, client = Keys(run), connect(url, name="bench-server", block_s=BLOCK_MS / 1000)
    queue = WorkQueue(client, Scripts(client), keys.obs_requests, GENERATORS, "bench", 60.0)
    reader, tray = PayloadReader(client, keys.blob, Path(folder)), Tray(AT_ONCE)
    actions = np.zeros((1, *ACTIONS[1:]), dtype=np.float32)
    while True:
        entries = queue.read(AT_ONCE, BLOCK_MS)
        if not entries:
            continue
        requests = [ObsRequest.from_fields(entry.fields) for entry in entries]
        batch = tray.joined([tray.read(reader, request) for request in requests], len(entries)).images["front"]
        tray = tray.another()
        with client.pipeline(transaction=True) as pipe:
            for place, request in enumerate(requests):
                answer = actions.copy()
                answer[0, 0, 0] = batch[place, 0, 0, 0]
                reply = ActionReply(request.id, 1, "0" * 16, Act(answer, answer, answer[:, 0, 0], {}))
                pipe.xadd(keys.actions(request.id.simulator), reply.to_fields(), nomkstream=True)  # type: ignore[arg-type]
            queue.queue_done(pipe, [entry.id for entry in entries])
            pipe.execute()


class Pickle:
    """A stream of pickles, one XADD per message, read one entry at a time: the least that does it."""

    def __init__(self, url: str, run: str, depth: int) -> None:
        self.client = connect(url, name="bench-pickle", block_s=BLOCK_MS / 1000)
        self._requests, self._answers = pickle_streams(run)
        self._marks, self._last, self._kept = _Marks(depth), "0", 4 * depth
        self._server = start_server("pickle", [url, run])

    def send(self, slots: Sequence[int]) -> None:
        for slot in slots:
            message = {"slot": slot, "image": self._marks.next(slot), "state": np.zeros(8, dtype=np.float32)}
            self.client.xadd(self._requests, {"data": pickle.dumps(message)}, maxlen=self._kept)

    def receive(self) -> list[int]:
        reply: Any = self.client.xread({self._answers: self._last}, count=1, block=BLOCK_MS)
        if not reply:
            return []
        (self._last, fields) = reply[0][1][0]
        answer = pickle.loads(fields[b"data"])
        self._marks.check(answer["slot"], float(answer["actions"][0, 0, 0]))
        return [answer["slot"]]

    def close(self) -> None:
        stop_server(self._server)
        self.client.unlink(self._requests, self._answers)
        self.client.close()


def pickle_streams(run: str) -> tuple[str, str]:
    return f"bench-pickle:{run}:requests", f"bench-pickle:{run}:answers"


def serve_pickle(url: str, run: str) -> None:
    client = connect(url, name="bench-server", block_s=BLOCK_MS / 1000)
    requests, answers = pickle_streams(run)
    batch, last = np.zeros(IMAGE, dtype=np.uint8), "0"
    while True:
        reply: Any = client.xread({requests: last}, count=1, block=BLOCK_MS)
        if not reply:
            continue
        (last, fields) = reply[0][1][0]
        message = pickle.loads(fields[b"data"])
        batch[:] = message["image"][0]
        actions = np.zeros(ACTIONS, dtype=np.float32)
        actions[0, 0, 0] = batch[0, 0, 0]
        client.xadd(answers, {"data": pickle.dumps({"slot": message["slot"], "actions": actions})}, maxlen=1000)


class Raw:
    """The limit: a copy into shared memory, a reference over a socket, a copy out of it, and a reference back."""

    def __init__(self, folder: Path, depth: int) -> None:
        self._marks, self._file = _Marks(depth), folder / "raw"
        self._file.write_bytes(b"\0" * (IMAGE_BYTES * depth))
        with self._file.open("r+b") as file:
            self._memory = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8).reshape(depth, IMAGE_BYTES)
        self._socket, theirs = socket.socketpair()
        self._server = start_server("raw", [str(self._file), str(theirs.fileno())], [theirs.fileno()])
        theirs.close()
        self._rest = b""

    def send(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._memory[slot] = self._marks.next(slot).reshape(-1)
        self._socket.sendall(b"".join(b"%d" % slot + b" " * (REFERENCE_BYTES - len(b"%d" % slot)) for slot in slots))

    def receive(self) -> list[int]:
        received = self._socket.recv(1 << 16)
        if not received:
            raise RunFailed("broker: the server of the raw limit has ended")
        data = self._rest + received
        whole = len(data) // REFERENCE_BYTES * REFERENCE_BYTES
        self._rest = data[whole:]
        found = []
        for start in range(0, whole, REFERENCE_BYTES):
            slot, mark = map(int, data[start : start + REFERENCE_BYTES].split())
            self._marks.check(slot, mark)
            found.append(slot)
        return found

    def close(self) -> None:
        self._socket.close()
        stop_server(self._server)
        self._file.unlink()


def serve_raw(file: str, descriptor: str) -> None:
    with open(file, "r+b") as opened:
        memory = np.frombuffer(mmap.mmap(opened.fileno(), 0), dtype=np.uint8).reshape(-1, IMAGE_BYTES)
    batch, pipe = np.zeros(IMAGE_BYTES, dtype=np.uint8), socket.socket(fileno=int(descriptor))
    rest = b""
    while received := pipe.recv(1 << 16):
        data = rest + received
        whole = len(data) // REFERENCE_BYTES * REFERENCE_BYTES
        rest, answers = data[whole:], []
        for start in range(0, whole, REFERENCE_BYTES):
            slot = int(data[start : start + REFERENCE_BYTES])
            batch[:] = memory[slot]
            answers.append(b"%d %d" % (slot, batch[0]))
        pipe.sendall(b"".join(answer.ljust(REFERENCE_BYTES) for answer in answers))


class Ray:
    """Calls of one actor, `depth` of them on their way."""

    def __init__(self, depth: int) -> None:
        import ray

        self._ray, self._marks = ray, _Marks(depth)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)

        @ray.remote
        class Actor:
            def __init__(self) -> None:
                self.batch = np.zeros(IMAGE, dtype=np.uint8)

            def act(self, image: np.ndarray) -> np.ndarray:
                self.batch[:] = image[0]
                actions = np.zeros(ACTIONS, dtype=np.float32)
                actions[0, 0, 0] = self.batch[0, 0, 0]
                return actions

        self._actor: Any = Actor.remote()
        self._calls: dict[Any, int] = {}

    def send(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._calls[self._actor.act.remote(self._marks.next(slot))] = slot

    def receive(self) -> list[int]:
        ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=BLOCK_MS / 1000)
        found = []
        for call in ready:
            found.append(self._calls.pop(call))
            self._marks.check(found[-1], float(self._ray.get(call)[0, 0, 0]))
        return found

    def close(self) -> None:
        self._ray.shutdown()


def why_no_ray() -> str | None:
    return None if find_spec("ray") is not None else "ray is not installed: pip install 'vla-stream[bench]'"


def start_server(name: str, arguments: Sequence[str], descriptors: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """The other end of a contender. It dies with this process, however that ends."""
    return subprocess.Popen(
        [sys.executable, __file__, str(os.getpid()), name, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=list(descriptors),
        env={"OMP_NUM_THREADS": "1", **os.environ},
        start_new_session=True,
    )


def stop_server(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait()


SERVERS: dict[str, Callable[..., None]] = {"library": serve_library, "pickle": serve_pickle, "raw": serve_raw}


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    with contextlib.suppress(KeyboardInterrupt):
        SERVERS[sys.argv[2]](*sys.argv[3:])
