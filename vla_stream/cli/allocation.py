"""How many simulators and generators a run should have, by where its time goes. Pure: time comes with the records.

The rule: the role that the other one waits for gets as many more workers as the others could keep up with. What a
change brought is measured; one that brought nothing is undone, and not tried again for a while. So a wrong guess (no
more processors, a device that two workers share) costs one change and back, and nothing swings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from vla_stream.cli.pulse import LIMITS, Pulse, Shares
from vla_stream.config import Allocation

WINDOW_S = 5.0  # at least, and at least as long as two updates
ROOM = 0.9  # of the time that a role shall be at work once the others have grown
HELD = 0.5  # simulators that are held back for longer than this are too many
PRESSED = 0.5  # more of a role are of use only if those there do not wait for longer than this for the other one
IDLE = 0.4  # a role that would be at work for less than this, with one worker less, has one too many
GAIN = 0.02  # of the environment steps per second: less is not a gain, for a change that was to bring one
LOSS = 0.05  # more is one, for a change that was to save a worker
AGAIN_S = 300.0  # before what brought nothing is tried again
OTHER = {"simulator": "generator", "generator": "simulator"}


@dataclass(frozen=True, slots=True)
class Move:
    """From now on so many workers of each role; `why` is for people."""

    counts: Mapping[str, int]
    why: str


@dataclass(slots=True)
class _Trial:
    """A change whose effect is not known yet."""

    before: Mapping[str, int]
    tried: tuple[str, int]
    rate: float
    saves: bool


class Allocator:
    """Decides, one change at a time. Workers that attached from elsewhere count as what they do, and stay."""

    def __init__(self, limits: Allocation) -> None:
        self.limits = limits
        self.pulse = Pulse(WINDOW_S)
        self._most = {"simulator": limits.most_simulators, "generator": limits.most_generators}
        self._least = {"simulator": limits.least_simulators, "generator": limits.least_generators}
        self._trial: _Trial | None = None
        self._in_vain: dict[tuple[str, int], float] = {}  # role, and 1 for more or -1 for fewer -> not before
        self._settled_s: float | None = None

    def decide(self, counts: Mapping[str, int], running: bool) -> Move | None:
        """What to do now, if anything.

        counts: workers of each role that this launcher has, and may change; running: whether all workers of the run
        have begun their work. The records are in `pulse`, whose time is the present.
        """
        now_s = self.pulse.now_s
        updates_per_s = self.pulse.updates_per_s()
        self.pulse.window_s = max(WINDOW_S, 2 / updates_per_s) if updates_per_s else WINDOW_S
        if not (running and all(counts.values())):
            self._settled_s = None
            return None
        if self._settled_s is None:
            self._settled_s = now_s
        shares = self.pulse.role_shares()
        if now_s - self._settled_s < self.pulse.window_s or len(shares) < 3:
            return None
        move = self._verdict(counts, now_s) or self._change(counts, shares, now_s)
        if move is not None:
            self._settled_s = None
        return move

    def forget(self) -> None:
        """Somebody else changed the numbers: what was tried cannot be judged any more."""
        self._trial = self._settled_s = None

    def _rate(self) -> float:
        return self.pulse.rate("simulator", "env_steps")

    def _verdict(self, counts: Mapping[str, int], now_s: float) -> Move | None:
        """On the last change: back, if it was in vain."""
        trial, self._trial = self._trial, None
        if trial is None:
            return None
        rate = self._rate()
        if rate >= trial.rate * (1 - LOSS if trial.saves else 1 + GAIN):
            return None
        self._in_vain[trial.tried] = now_s + AGAIN_S
        return Move(
            trial.before,
            f"back to {_words(trial.before)}: with {_words(counts)} it was {rate:,.0f} environment steps per second, "
            f"before {trial.rate:,.0f}",
        )

    def _change(self, counts: Mapping[str, int], shares: Mapping[str, Shares], now_s: float) -> Move | None:
        # Not the time at work: on busy processors a worker that always has something to do is slow at everything else.
        pressed = {role: 1 - share.input for role, share in shares.items()}
        if pressed["trainer"] >= LIMITS or shares["simulator"].output >= HELD:
            return self._save(counts, shares, now_s)
        for role in sorted(OTHER, key=lambda role: pressed[role], reverse=True):
            other = OTHER[role]
            if pressed[role] < PRESSED or now_s < self._in_vain.get((role, 1), 0.0):
                continue
            factor = ROOM / max(pressed["trainer"], pressed[other] * counts[other] / self._most[other], 0.01)
            wanted = min(self._most[role], math.ceil(counts[role] * factor))
            after = {**counts, role: max(counts[role], wanted)}
            if self.limits.together is not None:
                after = self._share_out(after, role, counts[role], shares[other])
            if after[role] > counts[role]:
                waits = f"{100 * shares[role].input:.0f} %", f"{100 * shares[other].input:.0f} %"
                why = f"{role}s wait for {other}s {waits[0]} of the time, the other way {waits[1]}"
                return self._try(counts, after, (role, 1), why, saves=False)
        return None

    def _share_out(self, after: dict[str, int], role: str, before: int, other: Shares) -> dict[str, int]:
        """Within `together`: what one role gets, the other gives, as long as it can serve so many more."""
        giving = OTHER[role]
        has = after[giving]
        free = (self.limits.together or 0) - has
        for gives in range(max(0, after[role] - free), -1, -1):
            served = has * other.work * (free + gives) / before
            if has - gives >= max(self._least[giving], served):
                return {role: min(after[role], free + gives), giving: has - gives}
        return {role: before, giving: has}

    def _save(self, counts: Mapping[str, int], shares: Mapping[str, Shares], now_s: float) -> Move | None:
        """The trainer, or staleness, is the limit: whoever idles gives a worker back."""
        simulator, generator = shares["simulator"], shares["generator"]
        too_many = {
            "simulator": simulator.output >= HELD,
            "generator": generator.work * counts["generator"] / max(1, counts["generator"] - 1) < IDLE,
        }
        for role, surplus in too_many.items():
            if surplus and counts[role] > self._least[role] and now_s >= self._in_vain.get((role, -1), 0.0):
                why = (
                    f"simulators are held back {100 * simulator.output:.0f} % of the time"
                    if role == "simulator"
                    else f"generators are at work {100 * generator.work:.0f} % of the time"
                )
                return self._try(counts, {**counts, role: counts[role] - 1}, (role, -1), why, saves=True)
        return None

    def _try(
        self, before: Mapping[str, int], after: Mapping[str, int], tried: tuple[str, int], why: str, *, saves: bool
    ) -> Move:
        self._trial = _Trial(dict(before), tried, self._rate(), saves)
        return Move(after, f"{_words(after)} instead of {_words(before)}: {why}")


def _words(counts: Mapping[str, int]) -> str:
    return " and ".join(f"{number} {role}{'' if number == 1 else 's'}" for role, number in sorted(counts.items()))
