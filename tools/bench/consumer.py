"""The trainer's place in a run that is to be measured without one: permits and versions flow, nothing is learned."""

from __future__ import annotations

import torch

from vla_stream.broker.connection import connect
from vla_stream.broker.lanes import PayloadReader
from vla_stream.broker.queue import WorkQueue
from vla_stream.cli.launch import Launch
from vla_stream.environments.protocol import Specification
from vla_stream.errors import RunFailed
from vla_stream.flow import Consumed, Flow
from vla_stream.streams.keys import TRAINERS
from vla_stream.streams.trajectories import Trajectory
from workers.models import make_policy
from workers.weights import WeightsWriter, to_bytes

SEGMENTS_AT_ONCE = 64
EPOCH = 1


class Consumer:
    """Publishes the first weights, takes segments, and commits updates that skip them.

    published: of each segment taken, when it came (server ms), its slot, its chunk steps."""

    def __init__(self, launch: Launch) -> None:
        self.config, keys = launch.config, launch.keys
        self.client = connect(launch.url, name="consumer", block_s=1.0)
        self.flow, lease_s = Flow(self.client, keys), self.config.flow.lease_s
        self.queue = WorkQueue(self.client, self.flow.scripts, keys.trajectories, TRAINERS, "consumer", lease_s)
        self.reader = PayloadReader(self.client, keys.blob, self.flow.shm_folder())
        self.writer = WeightsWriter(self.client, self.flow.scripts, keys, self.config.trainer.weights_base_every)
        self.published: list[tuple[int, str, int]] = []
        self._taken: list[tuple[Consumed, list[str]]] = []  # with the references into its payload
        self._update, self._data = 0, b""

    def begin(self, specification: Specification) -> None:
        """Take the run over, with weights of the config's policy as version 1."""
        self._data = to_bytes(make_policy(self.config, specification, torch.device("cpu")).state_dict())
        upload = self.writer.describe(1, 0, EPOCH, self._data)
        self.writer.upload(upload)
        self.flow.resume(EPOCH - 1, 0, 1, 0, 0, upload.manifest.to_fields())
        self.writer.keep(upload)
        self.queue.ensure_group()

    def consume(self, block_ms: int) -> None:
        """What has arrived; then an update, if there is enough for one."""
        count = self.config.trainer.segments_per_update
        for entry in self.queue.read(min(SEGMENTS_AT_ONCE, count - len(self._taken)), block_ms):
            trajectory = Trajectory.from_fields(entry.fields)
            simulator, _, slot, _ = trajectory.id.split("/")
            self.published.append((entry.born_ms, f"{simulator}/{slot}", trajectory.segment.steps))
            self._taken.append((Consumed(entry.id, trajectory.member), trajectory.references()))
        if len(self._taken) == count:
            self._commit()

    def close(self) -> None:
        self.client.close()

    def _commit(self) -> None:
        # The same weights under the next number, as after any update that was skipped.
        update = self._update + 1
        upload = self.writer.describe(update + 1, update, EPOCH, self._data)
        self.writer.upload(upload)
        consumed, fields = [consumed for consumed, _ in self._taken], upload.manifest.to_fields()
        answer = self.flow.commit(EPOCH, self._update, update + 1, consumed, fields, skipped=True)
        if answer != "committed":
            raise RunFailed(f"bench: update {update} was answered {answer!r}, expected 'committed'")
        self.writer.keep(upload)
        for _, references in self._taken:
            if references:
                self.reader.remove(references[0])
        self._taken.clear()
        self._update = update
