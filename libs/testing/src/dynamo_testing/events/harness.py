"""The harness of the event checks: publishers, and subscriptions that record."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from dynamo_core.contracts.discovery import Discovery, Lease, WatchKind
from dynamo_core.contracts.transports.events import EventPlane, Publisher
from dynamo_core.protocol.records import EVENT_SOURCES, EventSource
from dynamo_core.tasks import TaskSet

from dynamo_testing.router.doubles import EmptyDirectory
from dynamo_testing.waiting import News

PROBE = b"probe"


@dataclass(frozen=True, slots=True)
class EventPlanes:
    """The sending and the receiving event plane, and the directory in which the two meet.

    `close_sender` and `close_receiver` close the transports of the planes, if that is more than doing nothing.
    """

    sender: EventPlane
    receiver: EventPlane
    directory: Discovery
    close_sender: Callable[[], Awaitable[None]] | None = None
    close_receiver: Callable[[], Awaitable[None]] | None = None


class LoneDirectory(EmptyDirectory):
    """A directory for planes whose publishers need no record: it gives leases, and shows nothing."""

    async def lease(self, ttl: float | None = None) -> Lease:
        return LoneLease()


class LoneLease(Lease):
    """The lease of one publisher."""

    def __init__(self) -> None:
        self._id = secrets.randbits(62) + 1
        self._lost = asyncio.Event()

    @property
    def id(self) -> int:
        return self._id

    @property
    def lost(self) -> asyncio.Event:
        return self._lost

    async def put(self, key: str, value: bytes) -> None:
        raise NotImplementedError(f"{key} is put: PEER_TO_PEER, which says so, needs a real directory")

    async def remove(self, key: str) -> None:
        """Remove nothing: there is no record."""

    async def aclose(self) -> None:
        """Do nothing: nothing is held."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A subject that is used as it is, and not made one of the check's own."""

    text: str


class Listener:
    """A subscription, and all that came over it."""

    def __init__(self, subscription: AsyncGenerator[tuple[int, int, bytes], None], tasks: TaskSet, wait: float) -> None:
        self._subscription = subscription
        self._wait = wait
        self._news = News(wait)
        self.log: list[tuple[int, int, bytes]] = []
        self._reading = tasks.spawn(self._read(), name="listen")

    async def _read(self) -> None:
        async with aclosing(self._subscription) as events:
            async for event in events:
                self.log.append(event)
                self._news.tell()

    def of(self, source: int) -> list[tuple[int, bytes]]:
        """Return numbers and payloads of one source, probes included."""
        return [(number, payload) for who, number, payload in self.log if who == source]

    def payloads(self, source: int) -> list[bytes]:
        """Return the payloads of one source, without probes."""
        return [payload for _, payload in self.of(source) if payload != PROBE]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Return once the condition holds; it is looked at whenever something arrives."""
        await self._news.until(condition, what, lambda: f"{len(self.log)} events came")

    async def has(self, source: int, payload: bytes) -> None:
        """Return once the payload has come from the source."""
        await self.until(lambda: payload in self.payloads(source), f"an event {payload[:40]!r} expected")

    async def ends(self) -> None:
        """Return once the subscription has ended by itself."""
        done, _ = await asyncio.wait([self._reading], timeout=self._wait)
        assert done, f"the subscription did not end within {self._wait} s"

    async def close(self) -> None:
        """Unsubscribe."""
        self._reading.cancel()
        await asyncio.wait([self._reading])


@dataclass(frozen=True, slots=True)
class Sender:
    """A publisher and the lease it was made with."""

    publisher: Publisher
    lease: Lease

    @property
    def source(self) -> int:
        """Its source id."""
        return self.lease.id

    def send(self, *payloads: bytes) -> list[bool]:
        """Send one event after the other."""
        return [self.publisher.send(payload) for payload in payloads]


async def heard(
    events: AsyncGenerator[tuple[int, int, bytes], None], publisher: Publisher, payload: bytes
) -> tuple[int, int, bytes]:
    """Return the first event that gets through; the same payload is sent until then."""

    async def repeat() -> None:
        while True:
            publisher.send(payload)
            await asyncio.sleep(0.005)

    tasks = TaskSet()
    tasks.spawn(repeat(), name="repeat the event")
    try:
        async with asyncio.timeout(10):
            return await anext(events)
    finally:
        await tasks.aclose()


class Market:
    """Makes publishers and subscribers over the planes under test; all subjects are this check's own."""

    def __init__(self, planes: EventPlanes, wait: float) -> None:
        self.planes = planes
        self.wait = wait
        self._tasks = TaskSet()
        self._senders: list[Sender] = []
        self._prefix = secrets.token_hex(6)

    async def sender(self, subject: str | Subject = "loads", *, lease: Lease | None = None) -> Sender:
        """Return a new publisher, with a lease of its own if none is given."""
        lease = lease or await self.planes.directory.lease()
        publisher = await self.planes.sender.publisher(self.subject(subject), lease)
        self._senders.append(made := Sender(publisher, lease))
        return made

    def listener(self, subject: str | Subject = "loads") -> Listener:
        """Return a new subscription; see `settle`."""
        subscription = self.planes.receiver.subscribe(self.subject(subject), self.planes.directory)
        return Listener(subscription, self._tasks, self.wait)

    async def settle(self, senders: Sequence[Sender], listeners: Sequence[Listener]) -> None:
        """Send probes until every listener hears every sender: a subscription may take a while to reach them."""

        def deaf() -> list[Listener]:
            return [listener for listener in listeners if any(not listener.of(sender.source) for sender in senders)]

        try:
            async with asyncio.timeout(self.wait):
                while deaf():
                    for sender in senders:
                        sender.send(PROBE)
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"{len(deaf())} subscriptions heard nothing within {self.wait} s") from None

    def subject(self, name: str | Subject) -> str:
        """Return a subject of this check, unless it is one already."""
        return name.text if isinstance(name, Subject) else f"{self._prefix}-{name}"

    async def sources(self, subject: str = "loads") -> set[int]:
        """Return the sources on a subject that have a record in the directory now."""
        found: set[int] = set()
        async with aclosing(self.planes.directory.watch(EVENT_SOURCES)) as events:
            async for event in events:
                if event.kind is WatchKind.SYNCED:
                    break
                record = msgspec.json.decode(event.value, type=EventSource)
                if record.subject == self.subject(subject):
                    found.add(record.source)
        return found

    async def aclose(self) -> None:
        """Unsubscribe and stop publishing."""
        await self._tasks.aclose()
        for sender in self._senders:
            await sender.publisher.aclose()
            await sender.lease.aclose()
