"""The event plane over a broker: an address per subject, and sequence numbers that show gaps."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator

import msgspec
from dynamo_core import CounterLike, Discovery, EventPlane, Lease, MetricsScope, Publisher
from dynamo_core.protocol import Unreadable, UnreadableWarner, read

from dynamo_wire.brokered.addresses import Addresses
from dynamo_wire.brokered.broker import Broker
from dynamo_wire.messages import encode

log = logging.getLogger(__name__)

#: Bytes of events in one message, so that they never stand in the way of rows for long; and bytes that may wait.
EVENT_MESSAGE = 64 * 1024
EVENT_BACKLOG_BYTES = 8 * 1024 * 1024
#: More than what an event takes beside its payload.
EVENT_OVERHEAD = 64

Event = tuple[int, int, bytes]

#: A message: the source, and its events as (number, payload).
_events = msgspec.msgpack.Decoder(tuple[int, list[tuple[int, bytes]]])


class BrokeredEvents(EventPlane):
    """Events over a broker, without discovery: a subscription receives all sources of its subject."""

    def __init__(self, backlog: int, broker: Broker, addresses: Addresses, metrics: MetricsScope) -> None:
        """`backlog` is how many events may wait for one publisher or subscriber."""
        self._backlog = backlog
        self._broker = broker
        self._addresses = addresses
        self._dropped = metrics.counter(
            "dynamo_event_plane_dropped_total",
            "Events that were dropped: a publisher or a subscriber was behind, or not connected.",
            ("subject",),
        )
        self._publishers: dict[tuple[str, int], BrokeredPublisher] = {}
        self._subscribers: set[_Subscriber] = set()

    async def publisher(self, subject: str, lease: Lease) -> Publisher:
        """See `EventPlane.publisher`.

        Raises:
            ValueError: the lease publishes on this subject already; numbers would be given twice.
        """
        key = (subject, lease.id)
        if key in self._publishers:
            raise ValueError(f"lease {lease.id:016x} publishes on {subject!r} already")
        made = BrokeredPublisher(
            self._publishers,
            key,
            self._broker,
            self._addresses.events(subject),
            lease,
            self._backlog,
            self._dropped.labels(subject),
        )
        self._publishers[key] = made
        return made

    async def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
        subscriber = _Subscriber(subject, self._backlog, self._dropped.labels(subject))
        self._subscribers.add(subscriber)
        listening = await self._broker.listen(self._addresses.events(subject), subscriber, linked=False)
        try:
            while (event := await subscriber.get()) is not None:
                yield event
        finally:
            self._broker.ignore(listening)
            self._subscribers.discard(subscriber)

    def writable(self) -> None:
        """Record that the broker has room in its buffer again."""
        for publisher in self._publishers.values():
            publisher.schedule()

    def close(self) -> None:
        """Send what waits, and end all subscriptions."""
        for publisher in self._publishers.values():
            publisher.flush()
        for subscriber in self._subscribers:
            subscriber.end()


class BrokeredPublisher(Publisher):
    """A publisher that sends one message per turn of the loop. Events that cannot wait are dropped and counted."""

    def __init__(
        self,
        publishers: dict[tuple[str, int], BrokeredPublisher],
        key: tuple[str, int],
        broker: Broker,
        address: str,
        lease: Lease,
        backlog: int,
        dropped: CounterLike,
    ) -> None:
        self._publishers = publishers
        self._key = key
        self._broker = broker
        self._address = address
        self._lease = lease
        self._backlog = backlog
        self._dropped = dropped
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._number = 0
        self._scheduled = False
        self._closed = False

    def send(self, payload: bytes) -> bool:
        if self._closed or self._lease.lost.is_set():
            return False
        number = self._number
        self._number = number + 1
        size = len(payload) + EVENT_OVERHEAD
        full = len(self._waiting) >= self._backlog or self._bytes + size > EVENT_BACKLOG_BYTES
        if full or size > self._broker.max_message or not self._broker.connected:
            self._dropped.inc()
            return False
        self._waiting.append((number, payload))
        self._bytes += size
        self.schedule()
        return True

    def schedule(self) -> None:
        """Send what waits in the next turn of the loop."""
        if self._waiting and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send what waits, as far as the connection takes it."""
        self._scheduled = False
        while self._waiting and not self._broker.blocked:
            batch: list[tuple[int, bytes]] = []
            size = 0
            most = min(EVENT_MESSAGE, self._broker.max_message)
            while self._waiting and (not batch or size + len(self._waiting[0][1]) + EVENT_OVERHEAD <= most):
                event = self._waiting.popleft()
                size += len(event[1]) + EVENT_OVERHEAD
                batch.append(event)
            self._bytes -= size
            self._broker.publish(self._address, encode((self._lease.id, batch)))

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._publishers.pop(self._key, None)
        self.flush()
        self._waiting.clear()


class _Subscriber:
    """One subscription of a subject: a bounded queue with one reader."""

    def __init__(self, subject: str, backlog: int, dropped: CounterLike) -> None:
        self._subject = subject
        self._unreadable = UnreadableWarner(log, "a message of events on")
        self._backlog = backlog
        self._dropped = dropped
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    def receive(self, link: str, data: bytes, reply: str) -> None:
        """Take a message of some source; see `Listener`."""
        try:
            source, events = read(_events, data)
        except Unreadable as error:
            self._unreadable.warn(self._subject, error)
            return
        self._unreadable.readable(self._subject)
        for number, payload in events:
            if len(self._events) >= self._backlog:
                self._dropped.inc()
            else:
                self._events.append((source, number, payload))
        self._wake()

    def absent(self, link: str) -> None:
        """Ignore it, since subscribers send nothing; see `Listener`."""

    async def get(self) -> Event | None:
        """Return the next event; None when there will be none."""
        while not self._events:
            if self._ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.popleft()

    def end(self) -> None:
        """End the events; those that wait are still given out."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
