"""The event plane within one process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from dynamo_core import CounterLike, Discovery, EventPlane, Lease, MetricsScope, Publisher

#: Events that may wait for one subscriber; more are dropped and seen as a gap.
BACKLOG = 10_000


class InprocEvents(EventPlane):
    """An event plane within one process; a subscriber that falls behind loses the newest events."""

    def __init__(self, metrics: MetricsScope, backlog: int = BACKLOG) -> None:
        self._subjects: dict[str, set[_Mailbox]] = {}
        self._backlog = backlog
        dropped = metrics.counter(
            "dynamo_event_plane_dropped_total",
            "Events that were dropped: a publisher or a subscriber was behind, or not connected.",
            ("subject",),
        )
        self._dropped = dropped
        self._closed = False

    async def publisher(self, subject: str, lease: Lease) -> Publisher:
        mailboxes = self._subjects.setdefault(subject, set())
        return _InprocPublisher(mailboxes, lease.id, self._dropped.labels(subject))

    async def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[tuple[int, int, bytes], None]:
        mailboxes = self._subjects.setdefault(subject, set())
        mailbox = _Mailbox(self._backlog)
        mailboxes.add(mailbox)
        try:
            while not self._closed:
                yield await mailbox.get()
        finally:
            mailboxes.discard(mailbox)

    def close(self) -> None:
        """Let go of all subscribers; those that wait are cancelled by their owners."""
        self._closed = True
        self._subjects.clear()


class _InprocPublisher(Publisher):
    __slots__ = ("_closed", "_dropped", "_mailboxes", "_number", "_source")

    def __init__(self, mailboxes: set[_Mailbox], source: int, dropped: CounterLike) -> None:
        self._mailboxes = mailboxes
        self._source = source
        self._dropped = dropped
        self._number = 0
        self._closed = False

    def send(self, payload: bytes) -> bool:
        if self._closed:
            return False
        event = (self._source, self._number, payload)
        self._number += 1
        delivered = True
        for mailbox in self._mailboxes:
            if not mailbox.put(event):
                self._dropped.inc()
                delivered = False
        return delivered

    async def aclose(self) -> None:
        self._closed = True


class _Mailbox:
    """A bounded queue with one reader."""

    __slots__ = ("_events", "_limit", "_waiter")

    def __init__(self, limit: int) -> None:
        self._events: deque[tuple[int, int, bytes]] = deque()
        self._limit = limit
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: tuple[int, int, bytes]) -> bool:
        if len(self._events) >= self._limit:
            return False
        self._events.append(event)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        return True

    async def get(self) -> tuple[int, int, bytes]:
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.popleft()
