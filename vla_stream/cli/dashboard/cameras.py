"""What the robots of chosen slots see now: the newest observations that can be opened, as small JPEGs.

Requests are watched as they come, in the poller's spare time. Looking takes nothing from the workers: the bytes stay
where they are until their segment ends.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Collection
from typing import Any

import numpy as np
from PIL import Image

from vla_stream.broker.lanes import PayloadReader
from vla_stream.broker.queue import Entry
from vla_stream.broker.tail import Tail
from vla_stream.environments.protocol import Observations
from vla_stream.errors import BadMessage, PayloadElsewhere, PayloadUnreachable
from vla_stream.streams.notices import one_line
from vla_stream.streams.obs_requests import ObsRequest, RequestId
from vla_stream.streams.observations import unpack_observations

READ_AT_ONCE = 20
READS = 25  # in one `follow`: a busy run has thousands of requests a second
LOOK_AROUND_S = 0.2  # for slots, while nobody has chosen one
MOST_SLOTS = 1000
MOST_FIRST = 16  # pictures that nobody has asked for
MOST_ROWS, MOST_CAMERAS = 8, 4
LARGEST_SIDE = 256  # pixels

Picture = dict[str, Any]


class Cameras:
    """slots: names `<simulator>/<batch>.<slot>` seen so far. pictures: the newest of each that was wanted, as the page
    gets it. problem: why there is none, in one line, or empty."""

    def __init__(self, tail: Tail, reader: PayloadReader) -> None:
        self.slots: set[str] = set()
        self.pictures: dict[str, Picture] = {}
        self.problem = ""
        self._tail, self._reader = tail, reader

    def follow(self, wanted: Collection[str], seconds: float) -> None:
        """Watch until each wanted slot has a new picture, or for `seconds`. Raises what UNREACHABLE lists."""
        missing = set(wanted)
        end_s = time.monotonic() + (seconds if missing else min(seconds, LOOK_AROUND_S))
        for _ in range(READS):
            left_ms = int(1000 * (end_s - time.monotonic()))
            if left_ms <= 0:
                return
            newest: dict[str, Entry] = {}
            for entry in self._tail.read(READ_AT_ONCE, left_ms):
                name = slot_of(entry)
                if name:
                    newest[name] = entry
            if len(self.slots) < MOST_SLOTS:
                self.slots |= newest.keys()
            for name, entry in newest.items():
                # A first one of others too: whoever chooses them, also in a paused run, sees something at once.
                first = name not in self.pictures and len(self.pictures) < MOST_FIRST
                if (name in missing or first) and self._take(name, entry):
                    missing.discard(name)
            if not missing and newest:
                return

    def forget_others(self, simulators: Collection[str]) -> None:
        """Drop the slots of simulators that are gone."""
        self.slots = {name for name in self.slots if name.partition("/")[0] in simulators}
        self.pictures = {name: picture for name, picture in self.pictures.items() if name in self.slots}

    def _take(self, name: str, entry: Entry) -> bool:
        try:
            request = ObsRequest.from_fields(entry.fields)
            payload = self._reader.read(request.ref) if request.payload is None else request.payload
            self.pictures[name] = picture(entry, request, unpack_observations(payload, request.n))
        except PayloadElsewhere:
            self.problem = (
                "camera images of this run travel through another host's /dev/shm; "
                "start the dashboard there, or send them through Redis: vla-stream lane redis"
            )
            return False
        except (BadMessage, PayloadUnreachable) as exc:
            self.problem = one_line(str(exc))
            return False
        self.problem = ""
        return True


def slot_of(entry: Entry) -> str:
    """`simulator-0/0.1`, or empty for what is no request."""
    try:
        identity = RequestId.parse(entry.fields.get(b"id", b"").decode(errors="replace"))
    except BadMessage:
        return ""
    return f"{identity.simulator}/{identity.batch}.{identity.slot}"


def picture(entry: Entry, request: ObsRequest, observations: Observations) -> Picture:
    """JSON for the page: who asked when, and per row its instruction and its cameras as data: URLs."""
    cameras = list(observations.images.items())[:MOST_CAMERAS]
    rows = [
        {
            "told": one_line(observations.instruction[row])[:200],
            "cameras": [{"name": one_line(name)[:60], "src": data_url(image[row])} for name, image in cameras],
        }
        for row in range(min(request.n, MOST_ROWS))
    ]
    return {
        "id": entry.id,
        "time": entry.born_ms / 1000,
        "ticket": request.id.ticket,
        "step": request.id.step,
        "min_version": request.min_version,
        "rows_in_all": request.n,
        "rows": rows,
    }


def data_url(image: np.ndarray) -> str:
    """u8[h, w, 3] as a JPEG of at most 256 pixels per side."""
    if not image.size:
        raise BadMessage("a camera image has no pixels")
    small = Image.fromarray(np.ascontiguousarray(image))
    small.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    data = io.BytesIO()
    small.save(data, "JPEG", quality=88, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()
