"""Which way observation bytes go from this process."""

from __future__ import annotations

from urllib.parse import urlsplit

from vla_stream.broker.lanes import Lane, RedisLane, ShmLane, shm_usable
from vla_stream.config import Config
from vla_stream.errors import InputError
from workers.worker import Worker

BLOB_LIFETIME_S = 3600.0


def choose_lane(config: Config, worker: Worker) -> Lane | None:
    """The lane for observations too large to go inline; None keeps everything inline. Raises InputError."""
    wanted = config.broker.lane
    redis_lane = lane_through_redis(worker)
    if wanted == "inline":
        return None
    if wanted == "redis":
        return redis_lane
    reason = shm_usable()
    if wanted == "auto" and reason is None and not is_local(worker.url):
        reason = "the server may be on another host"
    if reason is None:
        return ShmLane(worker.flow.shm_folder())
    if wanted == "shm":
        raise InputError(f"broker.lane is shm, but {reason}; use redis")
    worker.say("lane", f"observations travel through Redis: {reason}")
    return redis_lane


def lane_through_redis(worker: Worker) -> RedisLane:
    """The lane that works wherever Redis does."""
    return RedisLane(worker.client, worker.keys.blob, BLOB_LIFETIME_S)


def is_local(url: str) -> bool:
    """Whether a server URL names this host for certain."""
    parts = urlsplit(url)
    return parts.scheme == "unix" or parts.hostname in ("127.0.0.1", "localhost", "::1")
