"""The queue of requests that wait until a worker has little enough to prefill."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from dynamo_core.errors import ServiceOverloaded

#: Seconds between two checks while requests wait: not every change that makes room is notified.
POLL_INTERVAL = 0.1


class _Waiter:
    """A request that waits; lower `order` goes first."""

    __slots__ = ("future", "number", "order", "ready")

    def __init__(self, order: tuple[float, float], number: int, ready: Callable[[], bool]) -> None:
        self.order = order
        self.number = number
        self.ready = ready
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __lt__(self, other: _Waiter) -> bool:
        return (self.order, self.number) < (other.order, other.number)


class RouteQueue:
    """Lets requests go one by one, in order, each when there is room for it.

    The next is let go when the one before has been placed, so that each sees the load of those before it.
    """

    def __init__(self, timeout: float, limit: int) -> None:
        self._timeout = timeout
        self._limit = limit
        self._heap: list[_Waiter] = []
        self._numbers = count()
        self._going: _Waiter | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = 0

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return self._waiting

    async def wait(self, ready: Callable[[], bool], order: tuple[float, float]) -> None:
        """Return when `ready` says so and no other request goes first; a lower `order` goes first.

        The next request sees the effect of what the caller does then without waiting.

        Raises:
            ServiceOverloaded: too many wait, or it took too long.
        """
        if not self._waiting and ready():
            return
        if self._waiting >= self._limit:
            raise ServiceOverloaded()
        waiter = _Waiter(order, next(self._numbers), ready)
        heapq.heappush(self._heap, waiter)
        with self._counted(waiter):
            self.notify()
            self._set_timer()
            try:
                async with asyncio.timeout(self._timeout):
                    await waiter.future
            except TimeoutError as error:
                raise ServiceOverloaded() from error

    def notify(self) -> None:
        """Release the first request if it is ready now."""
        if self._going is not None:
            return
        while self._heap:
            first = self._heap[0]
            if first.future.done():
                heapq.heappop(self._heap)
                continue
            if not first.ready():
                return
            heapq.heappop(self._heap)
            self._going = first
            first.future.set_result(None)
            return

    def close(self) -> None:
        """Stop the checks and refuse all waiting requests."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        heap, self._heap = self._heap, []
        for waiter in heap:
            if not waiter.future.done():
                waiter.future.set_exception(ServiceOverloaded())

    @contextmanager
    def _counted(self, waiter: _Waiter) -> Iterator[None]:
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            # A request that gives up stays in the heap until it comes up, or until there are too many of them.
            waiter.future.cancel()
            if len(self._heap) > 2 * self._waiting + 16:
                self._heap = [one for one in self._heap if not one.future.done()]
                heapq.heapify(self._heap)
            if self._going is waiter:
                # Once the caller has been placed, or has failed to be.
                asyncio.get_running_loop().call_soon(self._discard, waiter)

    def _discard(self, waiter: _Waiter) -> None:
        if self._going is waiter:
            self._going = None
            self.notify()

    def _set_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL_INTERVAL, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._waiting:
            self.notify()
            self._set_timer()
