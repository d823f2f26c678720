"""Success of finished episodes, by the weights they started with.

Grouping by the end would flatter: after every start the quick successes are over first, the failures later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

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
