"""Films of episodes, for people: a few successes and a few failures of an evaluation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from vla_stream.cli.inspect import contact_sheet
from vla_stream.environments.protocol import Observations
from vla_stream.errors import InputError
from vla_stream.evaluation import Outcomes

OF_EACH = 4  # successes, and failures
MOST_BYTES = 400_000_000  # of frames at once: all rows are filmed, since which succeed is known at their end only
FRAME_MS, LAST_FRAME_MS = 80, 1000


class Films:
    """A Watcher that leaves `success-<seed>.gif` and `failure-<seed>.gif` in a folder: all cameras side by side, one
    frame per environment step. What an earlier evaluation left there under these names is replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.saved = folder, list[Path]()
        self._number: Counter[str] = Counter()
        self._frames: dict[int, list[Observations]] = {}
        self._bytes, self._rows = 0, 1_000_000  # the first so many rows, once all take too much memory
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise InputError(f"--video {folder}: cannot be made ({exc.strerror}), expected a folder of yours") from exc

    def see(self, observations: Observations, running: np.ndarray) -> None:
        if min(self._number["success"], self._number["failure"]) >= OF_EACH:
            return
        for row in np.flatnonzero(running[: self._rows]).tolist():
            frame = observations.take([row])
            self._frames.setdefault(row, []).append(frame)
            self._bytes += sum(image.nbytes for image in frame.images.values())
        while self._bytes > MOST_BYTES and len(self._frames) > 1:
            self._rows = max(self._frames)
            dropped = self._frames.pop(self._rows)
            self._bytes -= sum(image.nbytes for frame in dropped for image in frame.images.values())

    def end(self, seeds: np.ndarray, outcomes: Outcomes) -> None:
        for row, frames in self._frames.items():
            kind = "success" if outcomes.success[row] else "failure"
            if row < len(seeds) and self._number[kind] < OF_EACH:
                self._number[kind] += 1
                self._save(self.folder / f"{kind}-{seeds[row]}.gif", frames, kind, float(outcomes.returns[row]))
        self._frames, self._bytes = {}, 0

    def _save(self, file: Path, frames: list[Observations], kind: str, score: float) -> None:
        label = f"{frames[0].instruction[0]}: {kind}, return {score:.2f}"
        first, *others = (contact_sheet([frame], [label]) for frame in frames)
        durations = [FRAME_MS] * len(others) + [LAST_FRAME_MS]
        first.save(file, save_all=True, append_images=others, duration=durations, loop=0)
        self.saved.append(file)
