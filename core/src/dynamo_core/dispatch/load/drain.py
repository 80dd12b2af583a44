"""When somebody who was refused may come back: from how fast requests end, and how many others were refused."""

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


class _Spell:
    """A time in which a model's requests are refused: how many ended and how many were refused, the last ones most.

    Only what ends in such a time tells how fast requests can end; before it too few may have been asked for.
    """

    __slots__ = ("_at", "_began", "ended", "refused")

    def __init__(self, now: float) -> None:
        self._began = self._at = now
        self.ended = 0.0
        self.refused = 0.0

    def advance(self, now: float) -> None:
        """Lets what was counted grow old."""
        fading = math.exp((self._at - now) / WINDOW)
        self.ended *= fading
        self.refused *= fading
        self._at = now

    def span(self, now: float) -> float:
        """How many seconds the counts stand for."""
        return WINDOW * (1.0 - math.exp((self._began - now) / WINDOW))


class DrainRates:
    """Tells those who are refused when to come back: in the time in which as many requests end as were refused.

    Some sooner and some later, so that they return about as fast as there is room for them.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, seed: int | None = None) -> None:
        self._clock = clock
        self._random = random.Random(seed)  # noqa: S311 - spreads retries, guards nothing
        self._spells: dict[str, _Spell] = {}
        self._last: dict[str, float] = {}

    def ended(self, model: str) -> None:
        """A request has left its worker, however it ended."""
        spell = self._spells.get(model)
        if spell is not None:
            spell.advance(self._clock())
            spell.ended += 1

    def refused(self, model: str) -> None:
        """A request was refused for load."""
        now = self._clock()
        spell = self._spells.get(model)
        if spell is None or now - self._last[model] > WINDOW:
            spell = self._spells[model] = _Spell(now)
        self._last[model] = now
        spell.advance(now)
        spell.refused += 1

    def retry_after(self, model: str) -> float:
        """Whole seconds, 1 to 60, another number for each who asks."""
        seconds = min(max(self._seconds(model), SHORTEST), LONGEST)
        # Up or down to a whole number with the chance that keeps the mean.
        whole = math.floor(seconds * (0.5 + self._random.random()) + self._random.random())
        return min(max(float(whole), SHORTEST), LONGEST)

    def _seconds(self, model: str) -> float:
        now = self._clock()
        spell = self._spells.get(model)
        if spell is None or now - self._last[model] > WINDOW:
            return UNKNOWN
        spell.advance(now)
        if spell.ended < 0.5:
            # Hardly anything has ended: it will take as long as that again, at least.
            return max(UNKNOWN, spell.span(now))
        return spell.refused * spell.span(now) / spell.ended
