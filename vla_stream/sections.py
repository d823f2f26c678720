"""What sections of the config are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _without_nul(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("a path without NUL bytes")
    return path


# Upper bounds far above any use, and far below what timers, Lua's numbers and memory can take.
Count = Annotated[int, Field(le=10**9)]
Seconds = Annotated[float, Field(le=10**6)]
Milliseconds = Annotated[float, Field(le=10**6)]
PlainPath = Annotated[Path, AfterValidator(_without_nul)]


class Section(BaseModel):
    """Base of all sections: unknown keys refused, values frozen. `parse` converts nothing (no "3" or yes for 3)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Decay(Section):
    """A value that falls linearly, update by update."""

    to: float = Field(ge=0, le=1, description="Part of the value that is left at the end.")
    at_update: Count = Field(ge=1, description="The first update with that part.")

    def factor(self, update: int) -> float:
        """What the value is multiplied by in the given update, counted from 0."""
        return 1 - (1 - self.to) * min(update / self.at_update, 1.0)
