"""The mocker's clock: the loop's own, or a virtual one for tests."""

from __future__ import annotations

import asyncio
from bisect import insort
from typing import Protocol


class Clock(Protocol):
    """A clock that can be slept on. Times are in seconds from an arbitrary start and never go back."""

    def time(self) -> float:
        """Return the current time."""

    async def sleep_until(self, deadline: float) -> None:
        """Return at the deadline. Every call gives other tasks their turn, a deadline in the past too."""


class MonotonicClock:
    """The clock of the running event loop."""

    __slots__ = ()

    def time(self) -> float:
        """Return the time of the running loop."""
        return asyncio.get_running_loop().time()

    async def sleep_until(self, deadline: float) -> None:
        """Sleep on a timer of the loop."""
        await asyncio.sleep(max(0.0, deadline - self.time()))


class VirtualClock:
    """Time that passes only when a task sleeps, and then at once, so that tests see exact times and never wait.

    Tasks that were woken before the sleep began run first and still see the old time. Of several sleepers the one with
    the earliest deadline wakes first. `pause` holds all sleepers until `resume`. `deadlines` are all that were slept
    on.
    """

    __slots__ = ("_now", "_running", "_sleepers", "deadlines")

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._running = asyncio.Event()
        self._running.set()
        self._sleepers: list[tuple[float, int]] = []
        self.deadlines: list[float] = []

    def time(self) -> float:
        """Return the current time."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass without waking a task, as if the process had been busy."""
        self._now += seconds

    def pause(self) -> None:
        """Hold all sleepers until `resume`."""
        self._running.clear()

    def resume(self) -> None:
        """End a pause."""
        self._running.set()

    async def sleep_until(self, deadline: float) -> None:
        """Let all other tasks have a turn, then jump to the deadline."""
        self.deadlines.append(deadline)
        sleeper = (deadline, len(self.deadlines))
        insort(self._sleepers, sleeper)
        try:
            await asyncio.sleep(0)
            await self._running.wait()
            while self._sleepers[0] != sleeper:
                await asyncio.sleep(0)
                await self._running.wait()
            self._now = max(self._now, deadline)
        finally:
            self._sleepers.remove(sleeper)
