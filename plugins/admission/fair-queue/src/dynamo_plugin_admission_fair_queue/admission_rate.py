"""The rate of admissions, which tells whether waiting is worthwhile."""

from __future__ import annotations

import math

#: The window of the average in seconds; what is older hardly counts.
WINDOW = 10.0
#: Fewer admissions give no estimate.
ENOUGH = 4.0


class Throughput:
    """Counts the requests that leave the queue; begins anew each time that the queue was empty."""

    __slots__ = ("_at", "_began", "_count")

    def __init__(self) -> None:
        self._began: float | None = None
        self._at = 0.0
        self._count = 0.0

    def begin(self, now: float) -> None:
        """Begin the measurement when a request begins to wait. Do nothing if others wait already."""
        if self._began is None:
            self._began = self._at = now
            self._count = 0.0

    def end(self) -> None:
        """End the measurement: the queue is empty."""
        self._began = None

    def let_in(self, now: float) -> None:
        """Record that a waiting request is admitted."""
        self._fade(now)
        self._count += 1

    def per_second(self, now: float) -> float | None:
        """Return admissions per second; None while there have been too few."""
        if self._began is None:
            return None
        self._fade(now)
        span = WINDOW * (1.0 - math.exp((self._began - now) / WINDOW))
        return self._count / span if self._count >= ENOUGH and span > 0 else None

    def _fade(self, now: float) -> None:
        self._count *= math.exp((self._at - now) / WINDOW)
        self._at = now
