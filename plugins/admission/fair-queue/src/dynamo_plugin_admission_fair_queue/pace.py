"""How fast those who wait are let in, to tell whether waiting makes sense."""

from __future__ import annotations

import math

#: Seconds over which is counted; what is older hardly counts.
WINDOW = 10.0
#: Fewer say nothing.
ENOUGH = 4.0


class Pace:
    """Counts those let in while somebody waits; begins anew with each such time."""

    __slots__ = ("_at", "_began", "_count")

    def __init__(self) -> None:
        self._began: float | None = None
        self._at = 0.0
        self._count = 0.0

    def begin(self, now: float) -> None:
        """Somebody begins to wait. Does nothing if others do already."""
        if self._began is None:
            self._began = self._at = now
            self._count = 0.0

    def end(self) -> None:
        """Nobody waits any more."""
        self._began = None

    def let_in(self, now: float) -> None:
        """One who waited does not any more."""
        self._fade(now)
        self._count += 1

    def per_second(self, now: float) -> float | None:
        """How many are let in each second; None while too few have been."""
        if self._began is None:
            return None
        self._fade(now)
        span = WINDOW * (1.0 - math.exp((self._began - now) / WINDOW))
        return self._count / span if self._count >= ENOUGH and span > 0 else None

    def _fade(self, now: float) -> None:
        self._count *= math.exp((self._at - now) / WINDOW)
        self._at = now
