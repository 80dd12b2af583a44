"""Pauses between attempts, varied so that the processes of a system do not act all at once. In seconds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

#: How long `Backoff` pauses at first and at most.
FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0


def jitter(seconds: float, least: float = 0.5, most: float = 1.5) -> float:
    """Return a random time between two multiples of `seconds`."""
    # No cryptography: it only spreads the processes over the time.
    return seconds * (least + (most - least) * random.random())  # noqa: S311


def pauses(first: float, last: float, *, least: float = 0.5, most: float = 1.5) -> Iterator[float]:
    """Yield the pauses before each further attempt: doubled each time, up to `last`, and jittered as `jitter` does."""
    while True:
        yield jitter(min(first, last), least, most)
        first = min(2 * first, last)


class Backoff:
    """Pauses between the tries of one request: doubled each time, up to a total in seconds.

    The time counts from the making, or, if not `started`, from the first pause.
    """

    __slots__ = ("_pause", "_seconds", "_until")

    def __init__(self, seconds: float, *, started: bool = True) -> None:
        self._seconds = seconds
        self._until = asyncio.get_running_loop().time() + seconds if started else None
        self._pause = FIRST_PAUSE

    async def pause(self) -> bool:
        """Wait before the next try; False at once if that would take too long."""
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + self._seconds
        if now + self._pause > self._until:
            return False
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, LAST_PAUSE)
        return True
