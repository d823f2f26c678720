"""The one reader of Redis behind all browsers: it looks once a second while somebody watches, and rests otherwise."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any

from vla_stream.broker.connection import Backoff
from vla_stream.cli.dashboard.watch import Watch
from vla_stream.cli.options import Target, connected
from vla_stream.errors import VlaStreamError
from vla_stream.streams.notices import one_line

PERIOD_S = 1.0
REST_AFTER_S = 5.0  # without a request
FIRST_WAIT_S = 3.0  # a request after a rest waits for so long for a new look
MOST_WANTED = 16  # slots whose cameras are watched at the same time


class Poller:
    """A thread with a connection of its own. `find` says where the run is: anew after each loss, since an embedded
    server that starts again has another address."""

    def __init__(self, find: Callable[[], Target]) -> None:
        self._find = find
        self._news = threading.Condition()
        self._asked_s = float("-inf")  # when somebody last looked
        self._wanted: dict[str, float] = {}  # slots by when they were last asked for
        self._closing = False
        self._seen: bytes = b"null"
        self._seen_s: float | None = None
        self._problem = ""
        self._curves: dict[str, Any] = {}
        self._cameras: dict[str, Any] = {"slots": [], "pictures": {}, "problem": ""}
        self.looks = 0  # that succeeded so far
        self._turns = 0  # that also failed
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._thread.join(timeout=15)

    # ---- for requests, from any thread

    def snapshot(self) -> bytes:
        """JSON: `snapshot` is the newest (null: none yet), `age_s` how old it is, `problem` why there is no newer."""
        self._ask()
        with self._news:
            age_s = None if self._seen_s is None else round(time.monotonic() - self._seen_s, 2)
            dead = "the dashboard's own reader failed; its terminal says why, start it again"
            head = json.dumps({"age_s": age_s, "problem": self._problem if self._thread.is_alive() else dead})
            return head[:-1].encode() + b', "snapshot": ' + self._seen + b"}"

    def curves(self) -> bytes:
        """JSON: see `Watch.curves`."""
        self._ask()
        with self._news:
            return json.dumps(self._curves).encode()

    def cameras(self, slots: Collection[str]) -> bytes:
        """JSON: all `slots`, the `pictures` of those asked for (null: none yet), and a `problem`."""
        self._ask()
        now_s = time.monotonic()
        with self._news:
            known = [slot for slot in slots if slot in self._cameras["slots"]]
            self._wanted |= dict.fromkeys(known, now_s)
            newest = sorted(self._wanted.items(), key=lambda item: item[1])[-MOST_WANTED:]
            self._wanted = {slot: asked_s for slot, asked_s in newest if asked_s > now_s - REST_AFTER_S}
            pictures = {slot: self._cameras["pictures"].get(slot) for slot in known}
            return json.dumps({**self._cameras, "pictures": pictures}).encode()

    def _ask(self) -> None:
        """Note that somebody looks. The first one after a rest waits for news."""
        with self._news:
            rested, turns = not self._watched, self._turns
            self._asked_s = time.monotonic()
            if rested:
                self._news.notify_all()
                self._news.wait_for(lambda: self._turns > turns, FIRST_WAIT_S)

    # ---- the thread

    @property
    def _watched(self) -> bool:
        return time.monotonic() < self._asked_s + REST_AFTER_S

    def _run(self) -> None:
        backoff = Backoff()
        while not self._closing:
            with self._news:
                self._news.wait_for(lambda: self._watched or self._closing)
            try:
                self._session(backoff)
            except Exception as exc:  # whatever it is, the page says so, and the next look comes
                if not isinstance(exc, VlaStreamError):
                    traceback.print_exc()
                with self._news:
                    self._problem = one_line(str(exc) or type(exc).__name__)
                    self._turns += 1
                    self._news.notify_all()
                    self._news.wait_for(lambda: self._closing, max(PERIOD_S, backoff.next_s()))

    def _session(self, backoff: Backoff) -> None:
        """Look once a second, until nobody watches. Raises VlaStreamError."""
        target = self._find()
        with connected(target.url, name="vla-stream-dashboard", block_s=PERIOD_S) as client:
            watch = Watch(client, target)
            while self._watched and not self._closing:
                began_s = time.monotonic()
                self._show(watch)
                backoff.failures = 0
                with self._news:
                    wanted = [slot for slot, asked_s in self._wanted.items() if asked_s > began_s - REST_AFTER_S]
                watch.cameras.follow(wanted, began_s + PERIOD_S - time.monotonic())
                with self._news:
                    self._cameras = watch.seen_by_cameras()
                    left_s = began_s + PERIOD_S - time.monotonic()
                    self._news.wait_for(lambda: self._closing, max(0.0, left_s))

    def _show(self, watch: Watch) -> None:
        seen = json.dumps(watch.look()).encode()
        curves = watch.curves()
        with self._news:
            self._seen, self._seen_s, self._problem, self._curves = seen, time.monotonic(), "", curves
            self.looks += 1
            self._turns += 1
            self._news.notify_all()
