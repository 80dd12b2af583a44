"""The event plane: each publisher serves its own subscribers, who find it through its record in discovery."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import msgspec
from dynamo_core import (
    CounterLike,
    Discovery,
    DynamoError,
    EventPlane,
    Lease,
    MetricsScope,
    Publisher,
    TaskSet,
    WatchEvent,
    WatchKind,
    pauses,
)
from dynamo_core.protocol import EVENT_SOURCES, EventSource, Unreadable, UnreadableWarner, read

from dynamo_plugin_transport_tcp.address import Address
from dynamo_plugin_transport_tcp.calling import Peers
from dynamo_plugin_transport_tcp.serving import ListenerLink, Registry

log = logging.getLogger(__name__)

#: Seconds before a lost source is tried again: the first time, and at most. Each time they are varied by half.
RETRY_FIRST = 0.2
RETRY_MOST = 5.0

_record = msgspec.json.Decoder(EventSource)

Event = tuple[int, int, bytes]


class TcpEvents(EventPlane):
    """Events between processes, without a broker."""

    def __init__(
        self, registry: Registry, listen: Callable[[], Awaitable[Address]], peers: Peers, metrics: MetricsScope
    ) -> None:
        self._registry = registry
        self._listen = listen
        self._peers = peers
        self._dropped = metrics.counter(
            "dynamo_event_plane_dropped_total",
            "Events that were dropped: a publisher or a subscriber was behind, or not connected.",
            ("subject",),
        )
        self._subscribers: set[_Subscriber] = set()

    async def publisher(self, subject: str, lease: Lease) -> Publisher:
        """See `EventPlane.publisher`.

        Raises:
            ValueError: the lease publishes on this subject already; numbers would be given twice.
            ConfigError: the address of the listener cannot be used.
        """
        if (subject, lease.id) in self._registry.sources:
            raise ValueError(f"lease {lease.id:016x} publishes on {subject!r} already")
        publisher = TcpPublisher(self._registry, subject, lease, self._dropped.labels(subject))
        self._registry.sources[subject, lease.id] = publisher
        try:
            await publisher.announce(await self._listen())
        except BaseException:
            await publisher.aclose()
            raise
        return publisher

    async def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
        backlog = self._registry.config.event_backlog
        subscriber = _Subscriber(subject, self._peers, backlog, self._dropped.labels(subject))
        self._subscribers.add(subscriber)
        try:
            subscriber.start(directory)
            while (event := await subscriber.get()) is not None:
                yield event
        finally:
            self._subscribers.discard(subscriber)
            await subscriber.aclose()

    def close(self) -> None:
        """End all subscriptions."""
        for subscriber in self._subscribers:
            subscriber.end()


class TcpPublisher(Publisher):
    """A publisher that gives every event to each subscription, whose connection drops what it cannot hold."""

    def __init__(self, registry: Registry, subject: str, lease: Lease, dropped: CounterLike) -> None:
        self._registry = registry
        self._subject = subject
        self._lease = lease
        self._key = f"{EVENT_SOURCES}{subject}/{lease.id:x}"
        self._dropped = dropped
        self._subscriptions: set[tuple[ListenerLink, int]] = set()
        self._number = 0
        self._closed = False

    async def announce(self, address: Address) -> None:
        """Put the record by which subscribers find this publisher."""
        record = EventSource(subject=self._subject, source=self._lease.id, address={"tcp": str(address)})
        await self._lease.put(self._key, msgspec.json.encode(record))

    def send(self, payload: bytes) -> bool:
        if self._closed:
            return False
        number = self._number
        self._number = number + 1
        delivered = True
        for link, sid in self._subscriptions:
            if not link.offer(sid, number, payload):
                self._dropped.inc()
                delivered = False
        return delivered

    def join(self, link: ListenerLink, sid: int) -> None:
        """See `dynamo_plugin_transport_tcp.serving.Source`."""
        self._subscriptions.add((link, sid))

    def leave(self, link: ListenerLink, sid: int) -> None:
        """See `dynamo_plugin_transport_tcp.serving.Source`."""
        self._subscriptions.discard((link, sid))

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._registry.sources.pop((self._subject, self._lease.id), None)
        subscriptions, self._subscriptions = self._subscriptions, set()
        for link, sid in subscriptions:
            link.unsubscribed(sid)
        await self._lease.remove(self._key)


class _Subscriber:
    """One subscription of a subject: a watch, a task per source, and a bounded queue with one reader."""

    def __init__(self, subject: str, peers: Peers, backlog: int, dropped: CounterLike) -> None:
        self._subject = subject
        self._peers = peers
        self._backlog = backlog
        self._dropped = dropped
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._tasks = TaskSet()
        self._unreadable = UnreadableWarner(log, "record")
        #: The task that follows each source, and the record it was started for, by key.
        self._sources: dict[str, tuple[bytes, asyncio.Task[None]]] = {}

    def start(self, directory: Discovery) -> None:
        self._tasks.spawn(self._watch(directory), name=f"events-{self._subject}")

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

    async def aclose(self) -> None:
        await self._tasks.aclose()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _watch(self, directory: Discovery) -> None:
        retries = pauses(RETRY_FIRST, RETRY_MOST)
        while True:
            try:
                async with aclosing(directory.watch(f"{EVENT_SOURCES}{self._subject}/")) as changes:
                    snapshot: set[str] = set()
                    async for change in changes:
                        retries = pauses(RETRY_FIRST, RETRY_MOST)
                        snapshot.add(change.key)
                        if change.kind is WatchKind.SYNCED:
                            # Records that were deleted while no watch was open.
                            for key in self._sources.keys() - snapshot:
                                self._drop(key)
                        else:
                            self._changed(change)
            except DynamoError as error:
                log.warning("sources of events on %r cannot be watched: %s", self._subject, error)
            await asyncio.sleep(next(retries))

    def _changed(self, change: WatchEvent) -> None:
        if change.kind is WatchKind.DELETE:
            self._unreadable.readable(change.key)
            self._drop(change.key)
        elif change.kind is WatchKind.PUT:
            known = self._sources.get(change.key)
            if known is not None and known[0] == change.value:
                return
            self._drop(change.key)
            try:
                record = read(_record, change.value)
            except Unreadable as error:
                self._unreadable.warn(change.key, error)
                return
            self._unreadable.readable(change.key)
            if record.subject == self._subject:
                task = self._tasks.spawn(self._follow(record), name=f"events-{change.key}")
                self._sources[change.key] = (change.value, task)

    def _drop(self, key: str) -> None:
        _, task = self._sources.pop(key, (b"", None))
        if task is not None:
            task.cancel()

    async def _follow(self, record: EventSource) -> None:
        """Stay subscribed to one source until cancelled."""
        source = record.source
        address = record.address.get("tcp")
        if address is None:
            log.warning("source %016x of %r has no address for tcp", source, self._subject)
            return

        def put(number: int, payload: bytes) -> None:
            if len(self._events) >= self._backlog:
                self._dropped.inc()
                return
            self._events.append((source, number, payload))
            self._wake()

        retries = pauses(RETRY_FIRST, RETRY_MOST)
        while True:
            try:
                subscription = (await self._peers.get(address)).subscribe(self._subject, source, put)
            except DynamoError as error:
                log.debug("source %016x of %r: %s", source, self._subject, error)
            else:
                retries = pauses(RETRY_FIRST, RETRY_MOST)
                try:
                    await subscription.over.wait()
                finally:
                    subscription.close()
            await asyncio.sleep(next(retries))
