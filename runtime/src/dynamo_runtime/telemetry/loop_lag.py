"""The lag of the event loop, which every request feels when something blocks it."""

from __future__ import annotations

import asyncio
import time

from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.resources import AsyncResource

#: Seconds between two looks.
INTERVAL = 0.25
#: A delay from which on it counts as a stall, in seconds.
STALL = 0.1

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class LoopLag(AsyncResource):
    """Sets a timer again and again, and measures how late it fires."""

    def __init__(
        self,
        metrics: MetricsScope,
        *,
        prefix: str = "dynamo_frontend",
        interval: float = INTERVAL,
        stall: float = STALL,
    ) -> None:
        self._interval = interval
        self._stall = stall
        self._delay = metrics.histogram(
            f"{prefix}_event_loop_delay_seconds",
            "Seconds by which a timer of the event loop was late: how long requests waited for what held the loop.",
            buckets=_BUCKETS,
        ).labels()
        self._stalls = metrics.counter(
            f"{prefix}_event_loop_stall_total", f"Stalls of the event loop: timers that were at least {stall:g} s late."
        ).labels()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self) -> None:
        """Begin to measure, in the running event loop. Safe twice."""
        if self._timer is None:
            self._arm()

    async def aclose(self) -> None:
        """End. Safe twice, and without `start`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._due = time.monotonic() + self._interval
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._fired)

    def _fired(self) -> None:
        delay = max(0.0, time.monotonic() - self._due)
        self._delay.observe(delay)
        if delay >= self._stall:
            self._stalls.inc()
        self._arm()
