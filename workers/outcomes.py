"""Success of finished episodes, by the weights they started with.

Grouping by the end would flatter: after every start the quick successes are over first, the failures later.
"""

from __future__ import annotations

from collections.abc import Iterable

from vla_stream.streams.trajectories import Episode

SETTLED_LAG = 3  # versions: episodes that started this long ago have all ended, the slow failures too
WINDOW = 5  # versions that are pooled


class EpisodeOutcomes:
    """Counts per start version; bounded, since old versions are forgotten."""

    def __init__(self) -> None:
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
        newest = version - SETTLED_LAG
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
