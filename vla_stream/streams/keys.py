"""Every key of a run, with who writes it and how long it lives. Key names stand nowhere else.

The braces are a Redis Cluster hash tag: all keys of a run share a slot, so that scripts may touch several (F32).
"""

from __future__ import annotations

from dataclasses import dataclass

GENERATORS = "generators"  # consumer group of obs-requests
TRAINERS = "trainers"  # consumer group of trajectories


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of the run `run`."""

    run: str

    def _key(self, name: str) -> str:
        return f"vla:{{{self.run}}}:{name}"

    @property
    def obs_requests(self) -> str:
        """Stream, simulator → any generator; entries live until answered."""
        return self._key("obs-requests")

    def trial(self, entry: str) -> str:
        """String with a TTL of an hour, generator → any generator: this entry of obs-requests is being served alone."""
        return self._key(f"trial:{entry}")

    def actions(self, simulator: str) -> str:
        """Stream, generator → that simulator; entries live until read, the key as long as its simulator renews it."""
        return self._key(f"actions:{simulator}")

    @property
    def trajectories(self) -> str:
        """Stream, simulator → trainer; entries live until their update is committed."""
        return self._key("trajectories")

    @property
    def weights(self) -> str:
        """Stream, trainer → generators; the newest entry names the current weights."""
        return self._key("weights")

    def weight_chunk(self, version: int, epoch: int, index: int) -> str:
        """String, one chunk of one version; expires a minute after a newer base is committed."""
        return self._key(f"weights:{version}.{epoch}:{index}")

    def blob(self, segment: str) -> str:
        """Hash, observation bytes of one segment in the redis lane; TTL of at least an hour."""
        return self._key(f"blob:{segment}")

    @property
    def permits(self) -> str:
        """Zset `<ticket>.<attempt>` by lease expiry: segments in the making. Scripts only."""
        return self._key("permits")

    @property
    def published(self) -> str:
        """Zset `<ticket>.<attempt>` by ticket: segments waiting for their update. Scripts only."""
        return self._key("published")

    @property
    def kept(self) -> str:
        """Zset `<ticket>.<attempt>` by update: trained, and kept until a checkpoint holds it. Scripts only."""
        return self._key("published:kept")

    @property
    def entries(self) -> str:
        """Hash `<ticket>.<attempt>` → stream id of its entry in `trajectories`. Scripts only."""
        return self._key("published:entries")

    @property
    def refunded(self) -> str:
        """Zset `<ticket>.<attempt>` by ticket: numbers to give out again. Scripts only."""
        return self._key("refunded")

    @property
    def books(self) -> str:
        """Hash of counters: what became of every segment that was started. Scripts only."""
        return self._key("books")

    @property
    def flow(self) -> str:
        """Hash: desired state, lane, update, version, trainer epoch, generation, next ticket. Scripts only."""
        return self._key("flow")

    @property
    def control(self) -> str:
        """Stream, capped: announces a change of the desired state or the lane."""
        return self._key("control")

    @property
    def events(self) -> str:
        """Stream, capped: what happened, one plain sentence per entry."""
        return self._key("events")

    @property
    def metrics(self) -> str:
        """Stream, capped: one sample a second per worker."""
        return self._key("metrics")

    @property
    def trace(self) -> str:
        """Stream, capped: what each worker did when, one entry a second and worker; only while somebody wants it."""
        return self._key("trace")

    @property
    def dead_letters(self) -> str:
        """Stream, capped: entries that nobody could use, with the reason."""
        return self._key("dead-letters")

    def worker(self, worker_id: str) -> str:
        """Hash with TTL: one live worker; its absence means that the worker is gone."""
        return self._key(f"worker:{worker_id}")

    @property
    def workers_pattern(self) -> str:
        """SCAN pattern of all worker hashes."""
        return self._key("worker:*").replace("[", "\\[")

    @property
    def everything_pattern(self) -> str:
        """SCAN pattern of all keys of the run, for its end."""
        return self._key("*").replace("[", "\\[")

    @property
    def types(self) -> dict[str, str]:
        """Redis's type of each key that a run has once."""
        streams = (self.obs_requests, self.trajectories, self.weights, self.control, self.events, self.metrics)
        return {
            **dict.fromkeys((*streams, self.trace, self.dead_letters), "stream"),
            **dict.fromkeys((self.permits, self.published, self.kept, self.refunded), "zset"),
            **dict.fromkeys((self.entries, self.books, self.flow), "hash"),
            self.config: "string",
        }

    @property
    def config(self) -> str:
        """String: the resolved config as JSON, for workers that attach."""
        return self._key("config")
