"""Waits of checks: for a turn of the event loop, and for a change of what they record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def turns(number: int = 20) -> None:
    """Let the event loop go round, so that what should not happen has its chance to."""
    for _ in range(number):
        await asyncio.sleep(0)


class News:
    """A notification that wakes waiting conditions after each change."""

    def __init__(self, wait: float) -> None:
        """`wait` is how many seconds a condition has."""
        self._wait = wait
        self._changed = asyncio.Event()

    def tell(self) -> None:
        """Record that something has changed."""
        self._changed.set()

    async def until(self, condition: Callable[[], object], what: str, so_far: Callable[[], str]) -> None:
        """Return once the condition holds. Raise AssertionError with `what` was expected and what came `so_far`."""
        try:
            async with asyncio.timeout(self._wait):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{what} within {self._wait} s; {so_far()}") from None
