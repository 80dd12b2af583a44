"""The event plane: a subject per source, numbers that show what is missing."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator

import msgspec
from dynamo_core.contracts.discovery import Discovery, Lease
from dynamo_core.contracts.events import EventPlane, Publisher
from dynamo_core.contracts.metrics import CounterLike, MetricsScope
from nats.aio.msg import Msg

from dynamo_plugin_transport_nats.broker import Broker
from dynamo_plugin_transport_nats.config import NatsConfig
from dynamo_plugin_transport_nats.messages import UNREADABLE, encode
from dynamo_plugin_transport_nats.subjects import Subjects

log = logging.getLogger(__name__)

#: Bytes of events in one message, so that they never stand in the way of rows for long; and bytes that may wait.
EVENT_MESSAGE = 64 * 1024
EVENT_BACKLOG_BYTES = 8 * 1024 * 1024
#: More than what an event takes beside its payload.
EVENT_OVERHEAD = 64

Event = tuple[int, int, bytes]

_events = msgspec.msgpack.Decoder(list[tuple[int, bytes]])


class NatsEvents(EventPlane):
    """Events over NATS. Nobody has to be found: a subscription hears all sources of its subject."""

    def __init__(self, config: NatsConfig, broker: Broker, subjects: Subjects, metrics: MetricsScope) -> None:
        self._config = config
        self._broker = broker
        self._subjects = subjects
        self._dropped = metrics.counter(
            "dynamo_event_plane_dropped_total", "Events dropped because a subscriber was behind.", ("subject",)
        )
        self._publishers: dict[tuple[str, int], NatsPublisher] = {}
        self._subscribers: set[_Subscriber] = set()

    async def publisher(self, subject: str, lease: Lease) -> Publisher:
        """See `EventPlane.publisher`.

        Raises:
            ValueError: the lease publishes on this subject already; numbers would be given twice.
        """
        key = (subject, lease.id)
        if key in self._publishers:
            raise ValueError(f"lease {lease.id:x} publishes on {subject!r} already")
        target = self._subjects.events(subject, lease.id)
        made = NatsPublisher(self._publishers, key, self._broker, target, lease, self._config.event_backlog)
        made.dropped = self._dropped.labels(subject)
        self._publishers[key] = made
        return made

    async def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
        subscriber = _Subscriber(self._subjects, self._config.event_backlog, self._dropped.labels(subject))
        self._subscribers.add(subscriber)
        subscription = await self._broker.subscribe(self._subjects.events(subject), subscriber.receive)
        try:
            while (event := await subscriber.get()) is not None:
                yield event
        finally:
            self._broker.unsubscribe(subscription)
            self._subscribers.discard(subscriber)

    def writable(self) -> None:
        """The servers take more again."""
        for publisher in self._publishers.values():
            publisher.schedule()

    def close(self) -> None:
        """Sends what waits, and ends all subscriptions."""
        for publisher in self._publishers.values():
            publisher.flush()
        for subscriber in self._subscribers:
            subscriber.end()


class NatsPublisher(Publisher):
    """Sends what was given to it in one turn of the loop as one message. What cannot wait is dropped and counted."""

    dropped: CounterLike

    def __init__(
        self,
        publishers: dict[tuple[str, int], NatsPublisher],
        key: tuple[str, int],
        broker: Broker,
        target: str,
        lease: Lease,
        backlog: int,
    ) -> None:
        self._publishers = publishers
        self._key = key
        self._broker = broker
        self._target = target
        self._lease = lease
        self._backlog = backlog
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
        if full or size > self._broker.max_payload or not self._broker.connected:
            self.dropped.inc()
            return False
        self._waiting.append((number, payload))
        self._bytes += size
        self.schedule()
        return True

    def schedule(self) -> None:
        """Sends what waits in the next turn of the loop."""
        if self._waiting and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Sends what waits, as far as the connection takes it."""
        self._scheduled = False
        while self._waiting and not self._broker.blocked:
            batch: list[tuple[int, bytes]] = []
            size = 0
            most = min(EVENT_MESSAGE, self._broker.max_payload)
            while self._waiting and (not batch or size + len(self._waiting[0][1]) + EVENT_OVERHEAD <= most):
                event = self._waiting.popleft()
                size += len(event[1]) + EVENT_OVERHEAD
                batch.append(event)
            self._bytes -= size
            self._broker.publish(self._target, encode(batch))

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._publishers.pop(self._key, None)
        self.flush()
        self._waiting.clear()


class _Subscriber:
    """One subscription of a subject: a bounded queue with one reader."""

    def __init__(self, subjects: Subjects, backlog: int, dropped: CounterLike) -> None:
        self._subjects = subjects
        self._backlog = backlog
        self._dropped = dropped
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    def receive(self, message: Msg) -> None:
        """Takes a message of some source."""
        source = self._subjects.source(message.subject)
        try:
            events = _events.decode(message.data)
        except UNREADABLE as error:
            log.warning("events on %s cannot be understood: %s", message.subject, error)
            return
        if source is None:
            return
        for number, payload in events:
            if len(self._events) >= self._backlog:
                self._dropped.inc()
            else:
                self._events.append((source, number, payload))
        self._wake()

    async def get(self) -> Event | None:
        """The next event; None when there will be none."""
        while not self._events:
            if self._ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.popleft()

    def end(self) -> None:
        """No more events will come; those that wait are still given out."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
