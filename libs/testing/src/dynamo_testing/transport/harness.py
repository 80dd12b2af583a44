"""The harness of the transport checks: the pair under test, a handler to look into, and a recording sink."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import msgspec
from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.transports.call import Endpoint, ServedContext, Source
from dynamo_core.contracts.transports.transport import Served, Transport
from dynamo_core.errors import DynamoError, StreamIncomplete
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.records import Instance

from dynamo_testing.optional_packages import pytest
from dynamo_testing.waiting import News

INSTANCE = 0x5EED


class Ask(msgspec.Struct):
    """The count to reach (0: until stopped), and the stream."""

    limit: int = 0
    stream: int = 0
    pad: bytes = b""


class Tick(msgspec.Struct):
    """One item of a counted stream."""

    number: int
    stream: int = 0
    pad: bytes = b""


#: Without a `merge`: what goes in comes out item by item.
COUNT = Endpoint("count", Ask, Tick)

#: Yields the items of a call.
Body: TypeAlias = Callable[[Any, ServedContext], AsyncGenerator[Any, None]]
#: Awaited before a call is accepted; raising refuses it.
Door: TypeAlias = Callable[[Any, ServedContext], Awaitable[None]]


def record(instance_id: int, served: Served) -> Instance:
    """Return the record that a worker would publish for what it serves."""
    return Instance(instance_id=instance_id, address=served.address)


@dataclass(frozen=True, slots=True)
class Planes:
    """A serving and a calling transport, both started; one and the same object if it reaches one process only.

    `instance` makes the record that callers find a worker by, from its id and what it serves.
    """

    server: Transport
    client: Transport
    instance: Callable[[int, Served], Instance] = record


async def count(ask: Ask, ctx: ServedContext) -> AsyncGenerator[Tick, None]:
    """Count up to the limit, or until it is stopped."""
    number = 0
    while not ctx.is_stopped() and (not ask.limit or number < ask.limit):
        yield Tick(number, ask.stream)
        number += 1
        await asyncio.sleep(0)


@dataclass(slots=True)
class Visit:
    """One call as its handler saw it."""

    request: Any
    ctx: ServedContext
    stops: int = 0
    yielded: int = 0
    deferred: int = 0
    #: The generator has run to its end, every ``finally`` included.
    left: asyncio.Event = field(default_factory=asyncio.Event)
    #: What was deferred to the end of the call has run.
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def stopped(self) -> None:
        """Record that the context was stopped."""
        self.stops += 1

    def ended(self) -> None:
        """Record that the call has ended."""
        self.deferred += 1
        self.over.set()


class Recorder:
    """A sink that records its calls in order."""

    def __init__(self, wait: float = 10.0) -> None:
        self._news = News(wait)
        #: ("data", item), ("event", annotated) or ("closed", error).
        self.log: list[tuple[str, Any]] = []

    def data(self, item: Any) -> None:
        """Note an item of data."""
        self._note("data", item)

    def event(self, item: Annotated[Any]) -> None:
        """Note an event."""
        self._note("event", item)

    def closed(self, error: DynamoError | None) -> None:
        """Note the end."""
        self._note("closed", error)

    def _note(self, kind: str, what: Any) -> None:
        self.log.append((kind, what))
        self._news.tell()

    @property
    def items(self) -> list[Any]:
        """The items of data."""
        return [what for kind, what in self.log if kind == "data"]

    @property
    def events(self) -> list[Annotated[Any]]:
        """The events."""
        return [what for kind, what in self.log if kind == "event"]

    @property
    def ends(self) -> list[DynamoError | None]:
        """The reasons that `closed` was told."""
        return [what for kind, what in self.log if kind == "closed"]

    @property
    def flags(self) -> int:
        """The number of completing flags that came."""
        return sum(event.is_complete_final() for event in self.events)

    @property
    def complete(self) -> bool:
        """Whether the completing flag came."""
        return self.flags > 0

    def outcome(self) -> DynamoError | None:
        """Return how the stream ended for its reader; None only for a complete stream without an error."""
        for kind, what in self.log:
            if kind == "closed":
                return what or StreamIncomplete("the stream ended before it was complete")
            if kind == "event" and what.is_error():
                error: DynamoError = what.to_error()
                return error
            if kind == "event" and what.is_complete_final():
                return None
        raise AssertionError("the stream has not ended")

    def error(self) -> DynamoError | None:
        """Return the first error that a reader is told of; None also for a stream that lacks its flag."""
        for kind, what in self.log:
            if kind == "event" and what.is_error():
                error: DynamoError = what.to_error()
                return error
            if kind == "event" and what.is_complete_final():
                return None
            if kind == "closed" and what is not None:
                told: DynamoError = what
                return told
        return None

    async def until(self, condition: Callable[[], object], what: str = "a condition expected") -> None:
        """Return once the condition holds; it is checked whenever something arrives."""
        await self._news.until(condition, what, lambda: f"so far: {_brief(self.log)}")

    async def arrived(self, number: int = 1) -> None:
        """Return once `number` items of data are there."""
        await self.until(lambda: len(self.log) >= number and len(self.items) >= number, f"{number} items expected")

    async def begun(self) -> None:
        """Return once there is an item or the end."""
        await self.until(lambda: self.items or self.ends, "an item or the end of the stream expected")

    async def end(self) -> DynamoError | None:
        """Return what `closed` was told, once it has been called."""
        await self.until(lambda: any(kind == "closed" for kind, _ in self.log[-2:]), "the end of the stream expected")
        return self.ends[0]


@dataclass(frozen=True, slots=True)
class Call:
    """An accepted call, seen from the calling side."""

    source: Source
    sink: Recorder
    ctx: EngineContext


class Stage:
    """Serves handlers over the pair under test, and calls them."""

    def __init__(self, planes: Planes, wait: float, lease_ttl: float | None = None) -> None:
        """`lease_ttl` is what the records of workers say, in seconds."""
        self.planes = planes
        self._lease_ttl = lease_ttl
        self.wait = wait
        self.visits: list[Visit] = []
        self.served: dict[tuple[int, str], Served] = {}
        self._instances: dict[int, Instance] = {}
        self._news = asyncio.Event()
        self._calls = 0

    async def serve(
        self,
        body: Body = count,
        *,
        door: Door | None = None,
        endpoint: Endpoint = COUNT,
        instance_id: int = INSTANCE,
    ) -> Served:
        """Serve a handler that notes its visits."""

        async def handler(request: Any, ctx: ServedContext) -> AsyncGenerator[Any, None]:
            visit = Visit(request, ctx)
            ctx.on_stop(visit.stopped)
            ctx.defer(visit.ended)
            self.visits.append(visit)
            self._news.set()
            if door is not None:
                await door(request, ctx)
            return _traced(body(request, ctx), visit)

        async with self.deadline("serving"):
            served = await self.planes.server.serve(instance_id, endpoint, handler)
        self.served[instance_id, endpoint.name] = served
        fresh = msgspec.structs.replace(self.planes.instance(instance_id, served), lease_ttl=self._lease_ttl)
        known = self._instances.get(instance_id)
        # As a worker does: one record with the addresses of all that it serves.
        self._instances[instance_id] = (
            msgspec.structs.replace(fresh, address=known.address | fresh.address) if known else fresh
        )
        return served

    def instance(self, instance_id: int = INSTANCE) -> Instance:
        """Return the record of a worker that serves something."""
        return self._instances[instance_id]

    def context(self, **about: Any) -> EngineContext:
        """Return a context with ids of its own."""
        self._calls += 1
        return EngineContext(f"request-{self._calls}", **about)

    async def call(
        self,
        request: Any = None,
        *,
        endpoint: Endpoint = COUNT,
        instance: Instance | None = None,
        ctx: EngineContext | None = None,
        sink: Recorder | None = None,
    ) -> Call:
        """Call and return once accepted; without a request it counts until it is stopped."""
        ctx = ctx or self.context()
        sink = sink or Recorder(self.wait)
        target = instance or self.instance()
        async with self.deadline("the answer to a call"):
            source = await self.planes.client.call(target, endpoint, Ask() if request is None else request, ctx, sink)
        return Call(source, sink, ctx)

    async def running(self, body: Body = count) -> Call:
        """Serve the handler and call it; return with its first item."""
        await self.serve(body)
        call = await self.call()
        await call.sink.arrived()
        return call

    async def collect(self, request: Any, *, endpoint: Endpoint = COUNT, instance: Instance | None = None) -> Recorder:
        """Return a call from its beginning to its end."""
        call = await self.call(request, endpoint=endpoint, instance=instance)
        await call.sink.end()
        await self.close(call.source)
        return call.sink

    async def close(self, source: Source) -> None:
        """Close a source."""
        async with self.deadline("Source.aclose"):
            await source.aclose()

    async def visit(self, number: int = 0) -> Visit:
        """Return the visit with this number, as soon as there is one."""
        async with self.deadline("a visit of the handler"):
            while len(self.visits) <= number:
                self._news.clear()
                await self._news.wait()
        return self.visits[number]

    async def happens(self, event: asyncio.Event, what: str) -> None:
        """Return once the event is set."""
        async with self.deadline(what):
            await event.wait()

    def deadline(self, what: str) -> Deadline:
        """Fail the check, saying what did not happen in time."""
        return Deadline(self.wait, what)


class Deadline:
    """A limit on a wait, whose failure names the awaited condition."""

    def __init__(self, wait: float, what: str) -> None:
        self._what = f"{what} did not happen within {wait} s"
        self._timeout = asyncio.timeout(wait)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *exc: Any) -> None:
        try:
            await self._timeout.__aexit__(*exc)
        except TimeoutError:
            if self._timeout.expired():
                raise AssertionError(self._what) from None
            raise


@pytest.mark.asyncio
class TransportHarness:
    """The author's part of a transport kit: the fixture `planes`, and optional abilities."""

    #: Seconds that anything may take before a check fails.
    WAIT: ClassVar[float] = 5.0
    #: The largest item or request in bytes that a stream carries; None for no limit.
    ITEM_LIMIT: ClassVar[int | None] = None
    #: Whether `break_connection` can be called.
    CAN_BREAK_CONNECTION: ClassVar[bool] = False
    #: Whether `lose_an_item` can be called.
    CAN_LOSE_AN_ITEM: ClassVar[bool] = False
    #: Whether `go_deaf` can be called.
    CAN_GO_DEAF: ClassVar[bool] = False
    #: Whether `serves_elsewhere` can be called. Then give both transports of `planes` deadlines for connecting and
    #: accepting that are longer than `WAIT`, and a heartbeat of some 0.2 s: the checks are of workers that hang.
    CAN_SERVE_ELSEWHERE: ClassVar[bool] = False

    @pytest.fixture
    def planes(self) -> Planes:
        """Return the pair under test, started; the fixture closes it. Every author writes this one."""
        raise NotImplementedError("write a fixture `planes` that yields Planes(server=…, client=…)")

    async def break_connection(self, planes: Planes) -> None:
        """Cut the connection between the two, as if a cable were pulled; the next call may connect again."""
        raise NotImplementedError

    async def lose_an_item(self, planes: Planes) -> None:
        """Make one item that the server sends from now on vanish on its way, with those after it arriving."""
        raise NotImplementedError

    async def go_deaf(self, planes: Planes) -> None:
        """Drop what comes back to the client over its connections with the server, and tell neither."""
        raise NotImplementedError

    def serves_elsewhere(self, planes: Planes) -> tuple[type[Transport], dict[str, Any]]:
        """Return the transport, and its settings as JSON, with which another process serves the client."""
        raise NotImplementedError

    @pytest.fixture
    def stage(self, planes: Planes) -> Stage:
        """Return the pair with handlers to look into."""
        return Stage(planes, self.WAIT)


async def _traced(body: AsyncGenerator[Any, None], visit: Visit) -> AsyncGenerator[Any, None]:
    try:
        async with aclosing(body) as items:
            async for item in items:
                visit.yielded += 1
                yield item
    finally:
        visit.left.set()


def _brief(log: list[tuple[str, Any]]) -> str:
    tail = ", ".join(f"{kind} {str(what)[:80]}" for kind, what in log[-5:])
    return f"{len(log)} entries, the last: {tail}" if log else "nothing"
