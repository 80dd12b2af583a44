"""Scheduling of long work in short slices, so that the event loop runs other tasks between them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter

#: Seconds of a loop turn that pieces of work may take together.
TURN = 0.002


class LoopScheduler:
    """Runs pieces of work, of all requests in turn, for some time of each turn of the loop.

    A piece is far shorter than `TURN`. One for which there is time runs at once.
    """

    def __init__(self) -> None:
        self._left = TURN
        self._queue: deque[Callable[[], None]] = deque()
        self._armed = False

    def submit(self, work: Callable[[], None]) -> None:
        """Run a piece: now, or as soon as those before it have had their turn."""
        if self._queue or self._left <= 0:
            self._queue.append(work)
        else:
            self._run(work)
        self._arm()

    def resubmit(self, work: Callable[[], None]) -> None:
        """Run a piece in another turn, behind those that wait."""
        self._queue.append(work)
        self._arm()

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._armed = False
        self._left = TURN
        queue = self._queue
        while queue and self._left > 0:
            self._run(queue.popleft())
        if queue:
            self._arm()

    def _run(self, work: Callable[[], None]) -> None:
        begun = perf_counter()
        try:
            work()
        finally:
            self._left -= perf_counter() - begun
