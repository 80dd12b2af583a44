"""The Retry-After of a refusal: from the rate of ended requests and the number of refused ones."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

#: Seconds over which both are counted; what is older hardly counts.
WINDOW = 10.0
#: The bounds of the answer, in seconds, and the answer while nothing is known.
SHORTEST, LONGEST = 1.0, 60.0
UNKNOWN = 2.0


class _RefusalPeriod:
    """A time in which a model's requests are refused: how many ended and how many were refused, the last ones most.

    Only what ends in such a time tells how fast requests can end; before it too few may have been asked for.
    """

    __slots__ = ("_at", "_began", "ended", "refused")

    def __init__(self, now: float) -> None:
        self._began = self._at = now
        self.ended = 0.0
        self.refused = 0.0

    def advance(self, now: float) -> None:
        """Let what was counted grow old."""
        fading = math.exp((self._at - now) / WINDOW)
        self.ended *= fading
        self.refused *= fading
        self._at = now

    def span(self, now: float) -> float:
        """Return how many seconds the counts stand for."""
        return WINDOW * (1.0 - math.exp((self._began - now) / WINDOW))


class RetryAfterEstimator:
    """Estimates `Retry-After`: the time in which as many requests end as were refused.

    Some clients get less and some more, so that they return about as fast as there is room for them.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, seed: int | None = None) -> None:
        self._clock = clock
        self._random = random.Random(seed)  # noqa: S311 - spreads retries, guards nothing
        self._periods: dict[str, _RefusalPeriod] = {}
        self._last: dict[str, float] = {}

    def ended(self, model: str) -> None:
        """Record that a request has left its worker, however it ended."""
        period = self._periods.get(model)
        if period is not None:
            period.advance(self._clock())
            period.ended += 1

    def refused(self, model: str) -> None:
        """Record that a request was refused for load."""
        now = self._clock()
        period = self._periods.get(model)
        if period is None or now - self._last[model] > WINDOW:
            period = self._periods[model] = _RefusalPeriod(now)
        self._last[model] = now
        period.advance(now)
        period.refused += 1

    def retry_after(self, model: str) -> float:
        """Return whole seconds, 1 to 60, varied from call to call."""
        seconds = min(max(self._seconds(model), SHORTEST), LONGEST)
        # Up or down to a whole number with the chance that keeps the mean.
        whole = math.floor(seconds * (0.5 + self._random.random()) + self._random.random())
        return min(max(float(whole), SHORTEST), LONGEST)

    def _seconds(self, model: str) -> float:
        now = self._clock()
        period = self._periods.get(model)
        if period is None or now - self._last[model] > WINDOW:
            return UNKNOWN
        period.advance(now)
        if period.ended < 0.5:
            # Hardly anything has ended: it will take as long as that again, at least.
            return max(UNKNOWN, period.span(now))
        return period.refused * period.span(now) / period.ended
