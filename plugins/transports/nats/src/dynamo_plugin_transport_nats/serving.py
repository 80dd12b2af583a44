"""The serving end: handlers run as calls, and what they yield leaves as rows, many streams in one message."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from dynamo_core.contracts.call import Endpoint, Handler, ServedContext
from dynamo_core.contracts.serving import ServedCall
from dynamo_core.contracts.transport import Served
from dynamo_core.errors import (
    CannotConnect,
    Disconnected,
    DynamoError,
    EngineShutdown,
    InvalidArgument,
    Unknown,
    WorkerOverloaded,
    to_wire,
)
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_core.tasks import TaskSet
from nats.aio.msg import Msg

from dynamo_plugin_transport_nats.broker import Broker, Subscription
from dynamo_plugin_transport_nats.config import NatsConfig
from dynamo_plugin_transport_nats.link import Link, nobody_there
from dynamo_plugin_transport_nats.messages import (
    ACCEPTED_PROTOS,
    PIECE_OVERHEAD,
    ROWS_TAG,
    UNKNOWN_LINK,
    UNKNOWN_PIECE,
    UNREADABLE,
    Accepted,
    Ended,
    Hello,
    LinkError,
    Open,
    Pause,
    Refused,
    Resume,
    Stop,
    Taken,
    Welcome,
    encode,
    proto_mismatch,
    read_piece,
    worker_decoder,
)
from dynamo_plugin_transport_nats.subjects import NONCE_BYTES, Subjects

log = logging.getLogger(__name__)

#: Items of one stream that may wait for the end of the loop's turn: a handler that never waits is made to. Items that
#: cannot be merged may be large, so fewer of them.
PENDING = 64
PENDING_UNMERGED = 4

#: Portions of rows that may be under way. Until the caller has taken them, rows that can be merged wait for each other,
#: as bytes do with Nagle's algorithm; the first row of a stream never waits.
WINDOW = 1


@dataclass(slots=True)
class Registry:
    """What this process offers."""

    config: NatsConfig
    broker: Broker
    subjects: Subjects
    #: Tells this run of this process from every other that had the same instance id.
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    doors: dict[int, Door] = field(default_factory=dict)

    def lost(self, error: DynamoError) -> None:
        """The connection with the servers has broken: callers have lost what was sent."""
        for door in self.doors.values():
            door.finish(error)


class Door:
    """Where the calls of one instance come in, and the links over which they do, as long as the process runs."""

    def __init__(self, registry: Registry, instance_id: int) -> None:
        self.registry = registry
        self.instance_id = instance_id
        self.address = registry.subjects.worker(instance_id, registry.nonce)
        self.served: dict[str, NatsServed] = {}
        self.links: dict[str, WorkerLink] = {}
        self._subscription: Subscription | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        """Lets callers in; when this returns, the server knows. Safe twice."""
        async with self._opening:
            if self._subscription is None:
                self._subscription = await self.registry.broker.subscribe(f"{self.address}.*.*", self._receive)

    def _receive(self, message: Msg) -> None:
        name = self.registry.subjects.link(message.subject)
        if name is None:
            return
        link = self.links.get(name)
        if link is None:
            link = self._met(name, message)
        if link is not None:
            link.receive(message)

    def _met(self, name: str, message: Msg) -> WorkerLink | None:
        """A new link for its first piece; whoever sends others is told that they are in vain."""
        if nobody_there(message):
            return None
        try:
            number = read_piece(message.data).number
        except LinkError as error:
            log.warning("a message of a stranger is dropped: %s", error)
            return None
        if number == UNKNOWN_LINK:
            return None
        if number != 0:
            self.registry.broker.publish(self.registry.subjects.caller(name), UNKNOWN_PIECE)
            return None
        link = WorkerLink(self, name)
        if len(self.links) >= self.registry.config.max_callers:
            link.close(WorkerOverloaded(f"{len(self.links)} processes call this worker, no more are let in"))
            return None
        self.links[name] = link
        return link

    def finish(self, error: DynamoError) -> None:
        """Ends all links; their callers are not told."""
        for link in list(self.links.values()):
            link.finish(error)

    def close(self) -> None:
        """Lets nobody in any more, and ends all links."""
        if self._subscription is not None:
            self.registry.broker.unsubscribe(self._subscription)
        for link in list(self.links.values()):
            link.close(EngineShutdown("the worker is stopping"))


class NatsServed(Served):
    """An endpoint of one worker, with the calls that run on it."""

    def __init__(self, door: Door, endpoint: Endpoint, handler: Handler) -> None:
        self._door = door
        self.endpoint = endpoint
        self.handler = handler
        self.decode = msgspec.msgpack.Decoder(endpoint.request_type).decode
        self.calls = TaskSet()
        self.draining = False

    @property
    def address(self) -> dict[str, str]:
        return {"nats": self._door.address}

    async def drain(self, timeout: float) -> bool:
        self.draining = True
        return await self.calls.join(timeout)

    async def aclose(self) -> None:
        self.draining = True
        # The door stays, and tells callers that are late.
        if self._door.served.get(self.endpoint.name) is self:
            del self._door.served[self.endpoint.name]
        await self.calls.aclose()


class WorkerLink(Link):
    """The serving end of one link."""

    def __init__(self, door: Door, name: str) -> None:
        registry = door.registry
        here = f"{door.address}.{name}"
        super().__init__(registry.broker, registry.config, registry.subjects.caller(name), here, worker_decoder)
        self._door = door
        self._name = name
        self._calls: dict[int, _Outlet] = {}
        self._dirty: list[_Outlet] = []
        #: Calls whose rows are wanted as they come, and can be merged.
        self._hurried = 0
        #: Portions of rows that the caller has not taken yet, of those it was asked to tell about.
        self._under_way = 0
        #: Awaited by handlers whose items wait for the next piece; None while nobody does.
        self._collected: asyncio.Future[None] | None = None
        self._tail: list[bytes] = []
        self.handlers = {Hello: self._on_hello}

    @property
    def used(self) -> bool:
        return bool(self._calls)

    def unused(self, seconds: float) -> None:
        # Callers forget first, and say so, unless they are gone.
        if seconds >= 2 * self.config.idle_timeout:
            self.close(Disconnected("the link was idle"))

    def _on_hello(self, hello: Hello) -> None:
        if hello.proto not in ACCEPTED_PROTOS:
            raise CannotConnect(proto_mismatch(hello.proto))
        self.peer_limit = min(hello.max_message, self.config.max_message)
        self.handlers = {
            Open: self._on_open,
            Stop: self._on_stop,
            Pause: self._on_pause,
            Resume: self._on_resume,
            Taken: self._on_taken,
        }
        self.send(Welcome(min(hello.proto, ACCEPTED_PROTOS[0]), self.config.max_message))

    # Calls.

    def _on_open(self, opening: Open) -> None:
        sid = opening.sid
        if sid in self._calls:
            raise LinkError(f"stream {sid} is open already")
        try:
            served, request = self._accept(opening)
        except DynamoError as error:
            self.send(Refused(sid, to_wire(error)))
            return
        ctx = ServedContext(opening.request_id, attempt_id=opening.attempt_id, metadata=opening.metadata)
        outlet = self._calls[sid] = _Outlet(self, sid, served.endpoint, opening.gather)
        self._hurried += outlet.hurried
        outlet.call = ServedCall(served.handler, request, ctx, outlet)
        outlet.call.start(served.calls)

    def _accept(self, opening: Open) -> tuple[NatsServed, Any]:
        door = self._door
        served = door.served.get(opening.endpoint)
        if served is None or opening.instance_id != door.instance_id:
            raise CannotConnect(f"instance {opening.instance_id:x} does not serve {opening.endpoint!r} here")
        if served.draining:
            raise EngineShutdown(f"endpoint {opening.endpoint!r} is being stopped")
        if len(self._calls) >= self.config.max_streams:
            raise WorkerOverloaded(f"{len(self._calls)} calls of this process run here, no more are accepted")
        try:
            return served, served.decode(opening.request)
        except UNREADABLE as error:
            raise InvalidArgument(f"the request for {opening.endpoint!r} cannot be understood: {error}") from None

    def _on_stop(self, stop: Stop) -> None:
        outlet = self._calls.get(stop.sid)
        if outlet is not None:
            outlet.resume()
            outlet.call.stop(kill=stop.kill)

    def _on_pause(self, pause: Pause) -> None:
        outlet = self._calls.get(pause.sid)
        if outlet is not None:
            outlet.pause()

    def _on_resume(self, resume: Resume) -> None:
        outlet = self._calls.get(resume.sid)
        if outlet is not None:
            outlet.resume()

    def _on_taken(self, taken: Taken) -> None:
        if taken.portions > self._under_way:
            raise LinkError("more portions were taken than sent")
        self._under_way -= taken.portions
        if self._dirty:
            self.schedule()

    def dirty(self, outlet: _Outlet) -> None:
        """The outlet has something; it is asked for it at the end of this turn, or when the caller has taken more."""
        self._dirty.append(outlet)
        self.schedule()

    async def collected(self) -> None:
        """Returns when what waits has been collected, or never will be."""
        if self._collected is None:
            self._collected = self._loop.create_future()
        await asyncio.shield(self._collected)

    def ended(self, sid: int, error: DynamoError | None, *, told: bool) -> None:
        """A call has run to its end; after its rows the caller learns of it, unless it was `told`."""
        outlet = self._calls.pop(sid, None)
        if outlet is not None:
            self._hurried -= outlet.hurried
        if not told and not self.closed:
            self._tail.append(encode(Ended(sid, None if error is None else to_wire(error))))
            self.schedule()

    def cut(self, sid: int, error: DynamoError) -> None:
        """The caller learns that the stream is over, though the handler may still run."""
        self._tail.append(encode(Ended(sid, to_wire(error))))
        self.schedule()

    # Both.

    def gather(self, out: list[bytes]) -> None:
        dirty, self._dirty = self._dirty, []
        if self.closed:
            for outlet in dirty:
                outlet.drop()
            return
        if dirty and self._under_way >= WINDOW:
            # The caller is busy with what it has: what may be merged waits, and grows, until it asks for more.
            self._dirty = [outlet for outlet in dirty if not outlet.urgent]
            dirty = [outlet for outlet in dirty if outlet.urgent]
        if dirty:
            rows: list[tuple[Any, ...]] = []
            for outlet in dirty:
                outlet.collect(rows)
            self._pack_rows(rows, out)
            collected, self._collected = self._collected, None
            if collected is not None and not collected.done():
                collected.set_result(None)
        if self._tail:
            out += self._tail
            self._tail = []

    def _pack_rows(self, rows: list[tuple[Any, ...]], out: list[bytes]) -> None:
        """All rows in one message; in several if they are too large, or if one of them cannot be sent at all."""
        if not rows:
            return
        ask = self._hurried > 0 and self._under_way < WINDOW
        limit = self.peer_limit - PIECE_OVERHEAD
        try:
            message = encode((ROWS_TAG, rows, ask))
        except Exception as error:  # whatever an engine put into an item that cannot travel
            message, problem = b"", str(error)
        else:
            if len(message) <= limit:
                out.append(message)
                self._under_way += ask
                return
            problem = f"it has {len(message)} bytes, more than the {limit} that may be sent"
        if len(rows) == 1:
            outlet = self._calls.get(rows[0][0])
            if outlet is not None:
                outlet.fail(Unknown(f"an item could not be sent: {problem}"))
            return
        half = len(rows) // 2
        self._pack_rows(rows[:half], out)
        self._pack_rows([row for row in rows[half:] if not self._failed(row[0])], out)

    def _failed(self, sid: int) -> bool:
        outlet = self._calls.get(sid)
        return outlet is not None and outlet.failed

    def over(self, error: DynamoError) -> None:
        self._door.links.pop(self._name, None)
        for outlet in list(self._calls.values()):
            outlet.drop()
            outlet.call.lost()
        if self._collected is not None and not self._collected.done():
            self._collected.set_result(None)


class _Outlet:
    """Where one call puts what its handler yields; see `dynamo_core.contracts.serving.Outlet`."""

    __slots__ = (
        "_compact",
        "_gather",
        "_later",
        "_limit",
        "_link",
        "_merge",
        "_number",
        "_over",
        "_pending",
        "_queued",
        "_resumed",
        "_sid",
        "call",
        "failed",
        "hurried",
    )

    def __init__(self, link: WorkerLink, sid: int, endpoint: Endpoint, gather: int) -> None:
        self._link = link
        self._sid = sid
        self._merge = endpoint.merge
        self._compact = endpoint.item_type is LLMEngineOutput
        self._limit = PENDING if endpoint.merge is not None else PENDING_UNMERGED
        #: Items after which the link is told. The first goes at once, and so does what cannot be merged.
        self._gather = 1
        self._later = 1 if endpoint.merge is None else max(1, min(gather, PENDING))
        self.hurried = endpoint.merge is not None and gather == 1
        self._pending: list[Any] = []
        #: Whether the link was told.
        self._queued = False
        self._number = 0
        #: Whether the handler has run to its end.
        self._over = False
        #: Set while the caller wants rows; None stands for an event that is set.
        self._resumed: asyncio.Event | None = None
        self.failed = False
        self.call: ServedCall

    # What the call does.

    def accepted(self) -> None:
        self._link.send(Accepted(self._sid))

    def refused(self, error: DynamoError) -> None:
        self.failed = True
        self._link.send(Refused(self._sid, to_wire(error)))

    def data(self, item: Any) -> None:
        pending = self._pending
        pending.append(item)
        if len(pending) >= self._gather and not self._queued:
            self._queued = True
            self._link.dirty(self)

    def event(self, item: Annotated[Any]) -> None:
        self._pending.append(item)
        # The end of the handler is told in the next turn, and takes this flag along.
        if not self._queued and not item.is_complete_final():
            self._queued = True
            self._link.dirty(self)

    def room(self) -> Awaitable[None] | None:
        if self._resumed is None and len(self._pending) < self._limit and not self._link.broker.blocked:
            return None
        return self._wait()

    def ended(self, error: DynamoError | None) -> None:
        self._over = True
        if self._pending and not self._queued:
            self._queued = True
            self._link.dirty(self)
        self._link.ended(self._sid, error, told=self.failed)

    async def _wait(self) -> None:
        while True:
            if self._resumed is not None:
                await self._resumed.wait()
            elif self._link.broker.blocked:
                await self._link.broker.writable.wait()
            elif len(self._pending) >= self._limit:
                await self._link.collected()
            else:
                return

    # What the link does.

    @property
    def urgent(self) -> bool:
        """Whether what waits should not wait for the caller: it is the first or last of its stream, or cannot be
        merged."""
        return not self._number or self._over or self._merge is None

    def pause(self) -> None:
        """The caller wants no more for now."""
        if self._resumed is None:
            self._resumed = asyncio.Event()

    def resume(self) -> None:
        """The caller wants more."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            resumed.set()

    def drop(self) -> None:
        """Forgets what waits: nobody is there to take it."""
        self._pending.clear()

    def fail(self, error: DynamoError) -> None:
        """Ends the stream at once, and then the handler."""
        self.failed = True
        self._link.cut(self._sid, error)
        self.resume()
        self.call.stop(kill=True)

    def collect(self, rows: list[tuple[Any, ...]]) -> None:
        """Appends what waits, merged and then numbered, as rows."""
        items, self._pending = self._pending, []
        self._queued = False
        self._gather = self._later
        if self.failed:
            return
        if len(items) > 1 and self._merge is not None:
            try:
                items = self._merged(items)
            except Exception as error:  # items of an engine that are not what the endpoint says
                self.fail(Unknown(f"items could not be merged: {error}"))
                return
        sid, number, compact = self._sid, self._number, self._compact
        for item in items:
            kind = type(item)
            if kind is Annotated:
                rows.append((sid, number, item))
            # Comparing with an item that has tokens only is as cheap as looking at each field, and forgets none.
            elif compact and kind is LLMEngineOutput and item == LLMEngineOutput(item.token_ids):
                rows.append((sid, number, item.token_ids))
            else:
                rows.append((sid, number, None, item))
            number += 1
        self._number = number

    def _merged(self, items: list[Any]) -> list[Any]:
        merge = self._merge
        assert merge is not None  # noqa: S101 - only called with one
        merged: list[Any] = []
        run: list[Any] = []
        for item in items:
            if type(item) is Annotated:
                if run:
                    merged += merge(run)
                    run = []
                merged.append(item)
            else:
                run.append(item)
        if run:
            merged += merge(run)
        return merged
