"""Success of finished episodes, by the weights they started with.

Grouping by the end would flatter: after every start the quick successes are over first, the failures later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from vla_stream import tasks
from vla_stream.config import Config
from vla_stream.streams.trajectories import Episode

WINDOW = 5  # versions that are pooled


def settled_lag(config: Config) -> int:
    """Episodes that started so many versions ago have all been trained on, the slow failures too: (1 + η) versions for
    each segment that an episode can reach into."""
    kind, segments = config.simulators.segment, 1
    if kind != "episode":
        segments += math.ceil(config.environment.max_steps / (config.policy.chunk * kind.steps))
    return segments * (1 + config.flow.max_staleness)


class EpisodeOutcomes:
    """Counts per start version; bounded, since old versions are forgotten."""

    def __init__(self, lag: int) -> None:
        """lag: versions after which a version's episodes have settled, see `settled_lag`."""
        self._lag = lag
        self._by_version: dict[int, tuple[int, int, float, int]] = {}

    def add(self, episodes: Iterable[Episode]) -> None:
        for episode in episodes:
            number, successes, reward, steps = self._by_version.get(episode.version, (0, 0, 0.0, 0))
            self._by_version[episode.version] = (
                number + 1,
                successes + episode.success,
                reward + episode.reward,
                steps + episode.steps,
            )

    def summary(self, version: int) -> dict[str, float]:
        """`success`, `return`, `episode_steps` and `episodes`, over those that started with settled versions; empty
        while there are none."""
        newest = version - self._lag
        chosen = [counts for start, counts in self._by_version.items() if newest - WINDOW < start <= newest]
        self._by_version = {start: c for start, c in self._by_version.items() if start > newest - 2 * WINDOW}
        number = sum(counts[0] for counts in chosen)
        if number == 0:
            return {}
        return {
            "success": sum(counts[1] for counts in chosen) / number,
            "return": sum(counts[2] for counts in chosen) / number,
            "episode_steps": sum(counts[3] for counts in chosen) / number,
            "episodes": number,
        }


class TaskOutcomes:
    """The outcomes of a run. With several tasks each one's figures are `<figure>.<task>`, and those of the whole are
    their means by weight, so that the task with the shortest episodes counts no more than its due."""

    def __init__(self, config: Config) -> None:
        self._environment, lag = config.environment, settled_lag(config)
        self._shares = tasks.shares(config.environment)
        self._outcomes = {name: EpisodeOutcomes(lag) for name in self._shares}
        self._segments = dict.fromkeys(self._shares, 0)

    def add(self, ticket: int, episodes: Iterable[Episode]) -> None:
        """A segment was trained, and these episodes ended in it."""
        name = tasks.task_of(self._environment, ticket)
        self._outcomes[name].add(episodes)
        self._segments[name] += 1

    def summary(self, version: int) -> dict[str, float]:
        """See EpisodeOutcomes.summary. With several tasks also `segments`, those trained since the last summary, and
        the whole's figures only once there are all tasks'."""
        found = {name: outcomes.summary(version) for name, outcomes in self._outcomes.items()}
        segments, self._segments = self._segments, dict.fromkeys(self._segments, 0)
        if len(found) == 1:
            return next(iter(found.values()))
        whole: dict[str, float] = {}
        if all(found.values()):
            for figure in next(iter(found.values())):
                whole[figure] = sum(self._shares[name] * figures[figure] for name, figures in found.items())
            whole["episodes"] = sum(figures["episodes"] for figures in found.values())
        for name, figures in found.items():
            whole |= {f"{figure}.{name}": value for figure, value in figures.items()}
            whole[f"segments.{name}"] = segments[name]
        return whole
