"""The capacity gate: at most N requests in the engine and Q waiting before it; one more is refused."""

from __future__ import annotations

import asyncio
from collections import deque

from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.errors import WorkerOverloaded


class CapacityGate:
    """A gate that hands out places in the engine in order of arrival. Without a limit all go straight in."""

    def __init__(self, metrics: MetricsScope, *, limit: int | None, queue: int) -> None:
        self._limit = limit
        self._queue_limit = queue
        self._active = 0
        self._queue: deque[Ticket] = deque()
        self._active_gauge = metrics.gauge("dynamo_engine_request", "Requests that the engine has now.").labels()
        self._queue_gauge = metrics.gauge("dynamo_request_queue", "Requests that wait for the engine now.").labels()
        self._rejections = metrics.counter(
            "dynamo_rejection_request_total", "Requests refused because the engine and the queue before it were full."
        ).labels()

    @property
    def active(self) -> int:
        """Requests in the engine."""
        return self._active

    @property
    def queued(self) -> int:
        """Requests waiting."""
        return len(self._queue)

    def enter(self) -> Ticket:
        """Return a place in the engine or in the queue.

        Raises:
            WorkerOverloaded: both are full.
        """
        ticket = Ticket(self)
        if self._limit is None or self._active < self._limit:
            self._grant(ticket)
        elif len(self._queue) < self._queue_limit:
            self._queue.append(ticket)
            self._queue_gauge.set(len(self._queue))
        else:
            self._rejections.inc()
            raise WorkerOverloaded("Server overloaded: worker at capacity")
        return ticket

    def _grant(self, ticket: Ticket) -> None:
        self._active += 1
        self._active_gauge.set(self._active)
        ticket._granted()

    def _leave(self, ticket: Ticket, granted: bool) -> None:
        if not granted:
            self._queue.remove(ticket)
            self._queue_gauge.set(len(self._queue))
            return
        self._active -= 1
        self._active_gauge.set(self._active)
        if self._queue and (self._limit is None or self._active < self._limit):
            following = self._queue.popleft()
            self._queue_gauge.set(len(self._queue))
            self._grant(following)


class Ticket:
    """One request's place; it is released exactly once, by `leave`."""

    __slots__ = ("_gate", "_in_engine", "_left", "_waiter", "_woken")

    def __init__(self, gate: CapacityGate) -> None:
        self._gate = gate
        self._in_engine = False
        self._left = False
        self._woken = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def in_engine(self) -> bool:
        """Whether the engine may be called now."""
        return self._in_engine

    async def ready(self) -> None:
        """Return when the engine may be called, or when the request was woken for another reason."""
        if not self._in_engine and not self._woken:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def wake(self) -> None:
        """End the wait without granting: the request is to be given up."""
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def leave(self) -> None:
        """Give the place back. Safe twice."""
        if not self._left:
            self._left = True
            self._gate._leave(self, self._in_engine)

    def _granted(self) -> None:
        self._in_engine = True
        self.wake()
