"""Evaluations beside a live run: each due checkpoint is played by a run of its own, `<run>.eval`, and the best one is
chosen by that. Nothing in the run waits for them; they yield to it where both want a core."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vla_stream.cli.folder import CONFIG_FILE, LOGS
from vla_stream.cli.helper import Helper
from vla_stream.config import CHECKPOINTS, Config
from vla_stream.learning import checkpoint
from workers.processes import RestartBudget
from workers.supervisor import EXIT_BAD_INPUT

NAME = "evaluation beside the run"
# Of an evaluation's result; evaluation.json beside the checkpoint has them.
NOT_FLAT = ("successes", "tasks", "instructions", "videos")
FIGURES = ("success", "low", "high", "success_at_end", "return", "steps", "episodes", "seed")


class Beside:
    """The evaluations beside one run. `look` is called about once a second; it never waits.

    tell: hears what people should know.
    """

    def __init__(self, config: Config, tell: Callable[[str], None]) -> None:
        self.config, self.tell = config, tell
        self.folder = config.run_dir / CHECKPOINTS
        self._helper: Helper | None = None
        self._asked: Path | None = None  # that it evaluates now
        self._answered: Path | None = None  # the last one, whatever the answer: it is not asked again
        self._read_bytes = 0
        self._budget = RestartBudget()
        self._refused = False
        self._not_before_s = 0.0

    def look(self) -> dict[str, float] | None:
        """Hand out the newest checkpoint if it is due and the last one is done; the figures of one that is done now."""
        ended = self._helper is not None and self._helper.process.poll() is not None
        found = self._result()
        if found is not None:
            return found
        if ended:  # before its output was read, so none of that is unread
            self._notice_an_end()
        if self._asked is None and not self._refused:
            self._ask()
        return None

    def close(self) -> None:
        """End it, in whatever it is."""
        helper, self._helper, self._asked = self._helper, None, None
        if helper is not None:
            helper.end()
        with contextlib.suppress(OSError):
            checkpoint.unmark(self.folder, checkpoint.EVALUATED)

    def _ask(self) -> None:
        places = checkpoint.places(self.folder)
        place = next((p for p in reversed(places) if int(p.name) % self.config.evaluation.every == 0), None)
        if place is None or place == self._answered or time.monotonic() < self._not_before_s:
            return
        if is_of(self.config, checkpoint.evaluation(place)):
            return
        if self._helper is None and not self._budget.take(time.monotonic()):
            self._refused = True
            return self.tell(f"{NAME}: it ended again and again, and is left out from now on")
        try:
            # Before it is read: the trainer removes old checkpoints, but none with such a mark.
            checkpoint.mark(self.folder, checkpoint.EVALUATED, int(place.name))
            if self._helper is None:
                logs = self.config.run_dir / LOGS
                arguments = ["eval", str(self.config.run_dir / CONFIG_FILE), "--checkpoint", "-", "--json", "--beside"]
                output, log = logs / "eval-beside.json", logs / "eval-beside.log"
                self._helper, self._read_bytes = Helper(NAME, arguments, output, log, follows=True), 0
            self._helper.feed(str(place))
        except OSError as exc:
            self._not_before_s = time.monotonic() + 10.0
            return self.tell(f"{NAME}: {exc.filename or 'its process'}: {exc.strerror or exc}; it is tried again")
        self._asked = place

    def _result(self) -> dict[str, float] | None:
        place, result = self._asked, self._answer()
        if place is None or result is None:
            return None
        self._answered, self._asked = place, None
        if "error" in result:
            self.tell(f"{NAME}: {result['error']}")
            return None
        keep(self.config, place, result, self.tell)
        return figures(place, result)

    def _answer(self) -> dict[str, Any] | None:
        """Of what was asked; other lines are whatever somebody's class printed, and are passed over."""
        if self._helper is None:
            return None
        with contextlib.suppress(OSError), self._helper.output.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # not whole yet
                self._read_bytes += len(line)
                with contextlib.suppress(ValueError, RecursionError):
                    result = json.loads(line)
                    if isinstance(result, dict) and result.get("checkpoint") == str(self._asked):
                        return result
        return None

    def _notice_an_end(self) -> None:
        helper = self._helper
        assert helper is not None
        last = helper.last_word().removeprefix("Error: ") or f"exit code {helper.process.returncode}"
        self._refused = helper.process.returncode == EXIT_BAD_INPUT
        then = "it is left out from now on" if self._refused else "it begins anew"
        self.tell(f"{NAME}: {last}; {then}; see {helper.log}")
        helper.kill()
        self._helper = self._asked = None


def is_of(config: Config, result: Mapping[str, Any] | None) -> bool:
    """Whether an evaluation is of the seeds that the config names."""
    wanted = {"episodes": config.evaluation.episodes, "seed": config.evaluation.seed, "sampled": False}
    return result is not None and all(result.get(name) == value for name, value in wanted.items())


def keep(config: Config, place: Path, result: Mapping[str, Any], tell: Callable[[str], None]) -> None:
    """Beside the checkpoint; which is the best one now, if evaluations choose it and none was better."""
    try:
        checkpoint.keep_evaluation(place, result)
        if config.evaluation.every:
            folder = config.run_dir / CHECKPOINTS
            best = checkpoint.marked(folder, checkpoint.BEST)
            before = None if best is None else checkpoint.evaluation(folder / best)
            if before is None or not is_of(config, before) or result["success"] >= before["success"]:
                checkpoint.mark(folder, checkpoint.BEST, int(place.name))
    except OSError as exc:
        tell(f"{place}: its evaluation is not kept ({exc.strerror or exc})")


def figures(place: Path, result: Mapping[str, Any]) -> dict[str, float]:
    """As one sample of the metrics."""
    by_task = {f"success.{task}": figures["success"] for task, figures in result.get("tasks", {}).items()}
    return {"update": int(place.name), **{name: result[name] for name in FIGURES}, **by_task}


def sentence(found: Mapping[str, float]) -> str:
    """`update 40: success 0.620 (0.48 to 0.74) on 50 held-out seeds`"""
    interval = f"({found['low']:.2f} to {found['high']:.2f})"
    seeds = f"{found['episodes']:.0f} held-out seeds"
    return f"update {found['update']:.0f}: success {found['success']:.3f} {interval} on {seeds}"
