"""The serving end: handlers run as calls, and what they yield leaves as rows, many streams in one frame."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec
from dynamo_core.contracts.call import Endpoint, Handler, ServedContext
from dynamo_core.contracts.metrics import CounterLike, GaugeLike
from dynamo_core.contracts.serving import ServedCall
from dynamo_core.contracts.transport import Served
from dynamo_core.errors import (
    CannotConnect,
    ConnectionTimeout,
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

from dynamo_plugin_transport_tcp.address import NONCE_BYTES, Address
from dynamo_plugin_transport_tcp.config import TcpConfig
from dynamo_plugin_transport_tcp.frames import FrameError
from dynamo_plugin_transport_tcp.link import PONG, Handlers, Link
from dynamo_plugin_transport_tcp.messages import (
    ACCEPTED_PROTOS,
    EVENTS_TAG,
    MAGIC,
    ROWS_TAG,
    UNREADABLE,
    Accepted,
    Challenge,
    Ended,
    Hello,
    Open,
    Pause,
    Proof,
    Ready,
    Refused,
    Resume,
    Stop,
    Subscribe,
    Taken,
    Unsubscribe,
    Unsubscribed,
    encode,
    listener_decoder,
    proto_mismatch,
)
from dynamo_plugin_transport_tcp.security import CALLER, CHALLENGE_BYTES, LISTENER, proof, proven
from dynamo_plugin_transport_tcp.strangers import Stranger, Strangers

log = logging.getLogger(__name__)

#: Items of one stream that may wait for the end of the loop's turn: a handler that never waits is made to. Items that
#: cannot be merged may be large, so fewer of them.
PENDING = 64
PENDING_UNMERGED = 4

#: Frames of rows that may be under way. Until the caller has taken them, rows that can be merged wait for each other,
#: as bytes do with Nagle's algorithm; the first row of a stream never waits.
WINDOW = 1

#: Bytes of events in one frame, so that they never stand in the way of rows for long; and bytes that may wait.
EVENT_FRAME = 64 * 1024
EVENT_BACKLOG_BYTES = 8 * 1024 * 1024
#: Bytes of a frame that is being read from which on its sender is told so, and seconds between two such words.
LARGE = 64 * 1024
REASSURE = 0.5

#: More than what an event takes beside its payload.
EVENT_OVERHEAD = 64


class Source(Protocol):
    """What a subscriber can be given events of."""

    def join(self, link: ListenerLink, sid: int) -> None:
        """From now on events go to this subscription too."""

    def leave(self, link: ListenerLink, sid: int) -> None:
        """No more events to this subscription."""


@dataclass(slots=True)
class Registry:
    """What this process offers, and who is connected."""

    config: TcpConfig
    connections: GaugeLike
    #: Frames that are not what was sent.
    damaged: CounterLike
    strangers: Strangers
    #: Tells this run of this process from whatever else may listen on the same port, before or after.
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    served: dict[tuple[int, str], TcpServed] = field(default_factory=dict)
    sources: dict[tuple[str, int], Source] = field(default_factory=dict)
    links: set[ListenerLink] = field(default_factory=set)
    #: Connections whose callers have shown the nonce, in the order in which they came.
    callers: dict[ListenerLink, None] = field(default_factory=dict)

    def make_room(self) -> bool:
        """Whether there is room for another caller. One that has no calls makes room: it connects again when needed."""
        if len(self.callers) < self.config.max_connections:
            return True
        idle = next((link for link in self.callers if link.idle), None)
        if idle is not None:
            idle.close(Disconnected("the worker needs room for another caller"))
        return idle is not None


class TcpServed(Served):
    """An endpoint of one worker, with the calls that run on it."""

    def __init__(
        self, registry: Registry, instance_id: int, endpoint: Endpoint, handler: Handler, address: Address
    ) -> None:
        self._registry = registry
        self._key = (instance_id, endpoint.name)
        self._address = address
        self.endpoint = endpoint
        self.handler = handler
        self.decode = msgspec.msgpack.Decoder(endpoint.request_type).decode
        self.calls = TaskSet()
        self.draining = False

    @property
    def address(self) -> dict[str, str]:
        return {"tcp": str(self._address)}

    async def drain(self, timeout: float) -> bool:
        self.draining = True
        return await self.calls.join(timeout)

    async def aclose(self) -> None:
        self.draining = True
        self._registry.served.pop(self._key, None)
        await self.calls.aclose()


class ListenerLink(Link):
    """The listening end of one connection."""

    STOPS_READING: ClassVar[bool] = True

    def __init__(self, registry: Registry, stranger: Stranger | None = None) -> None:
        """`stranger` is its place among those that have not shown the nonce yet."""
        super().__init__(registry.config, listener_decoder, registry.damaged)
        self._registry = registry
        self._stranger = stranger
        self._calls: dict[int, _Outlet] = {}
        self._subscriptions: dict[int, Source] = {}
        self._dirty: list[_Outlet] = []
        #: Calls whose rows are wanted as they come, and can be merged.
        self._hurried = 0
        #: Frames of rows that the caller has not taken yet, of those it was asked to tell about.
        self._under_way = 0
        #: Since when the caller should have said that it has taken some; None while it need not.
        self._overdue: float | None = None
        #: When it was last told that a large frame is being read.
        self._reassured = 0.0
        #: Awaited by handlers whose items wait for the next frame; None while nobody does.
        self._collected: asyncio.Future[None] | None = None
        self._tail: list[bytes] = []
        self._events: list[tuple[int, int, bytes]] = []
        self._event_bytes = 0
        self._challenges = b"", secrets.token_bytes(CHALLENGE_BYTES)
        self._deadline: asyncio.TimerHandle | None = None
        self.handlers = {Hello: self._on_hello}

    # The handshake.

    def opened(self) -> None:
        registry, loop = self._registry, self._loop
        if self._stranger is not None:
            made_room = Disconnected("the connection said nothing and had to make room for others")
            self._stranger.close = lambda: loop.call_soon_threadsafe(self.abort, made_room)
        registry.links.add(self)
        registry.connections.inc()
        self._deadline = self._loop.call_later(self.config.connect_timeout, self._too_slow)

    def _too_slow(self) -> None:
        self.close(ConnectionTimeout(f"the handshake took longer than {self.config.connect_timeout} s"))

    def _on_hello(self, hello: Hello) -> None:
        if hello.magic != MAGIC:
            raise FrameError("this is another protocol")
        if hello.proto not in ACCEPTED_PROTOS:
            raise CannotConnect(proto_mismatch(hello.proto))
        if hello.wanted != self._registry.nonce:
            raise CannotConnect("not me: the process that published this address is gone")
        registry = self._registry
        if self._stranger is not None:
            registry.strangers.known(self._stranger)
        if not registry.make_room():
            raise CannotConnect(f"{len(registry.callers)} connections are open, no more are accepted")
        registry.callers[self] = None
        self._challenges = hello.challenge, self._challenges[1]
        self.peer_limit = hello.max_frame
        self.handlers = {Proof: self._on_proof}
        config = self.config
        proto = min(hello.proto, ACCEPTED_PROTOS[0])
        checksums = hello.checksums and config.checksums
        self.send(Challenge(proto, self._challenges[1], config.max_frame, config.secret is not None, True, checksums))
        self.introduced(checksums=checksums)

    def _on_proof(self, given: Proof) -> None:
        secret, nonce = self.config.secret_bytes, self._registry.nonce
        if not proven(proof(secret, CALLER, nonce, *self._challenges), given.proof if secret else b""):
            raise CannotConnect("the secrets of the two processes differ")
        self.agree(given.transcript)
        if self._deadline is not None:
            self._deadline.cancel()
        self.handlers = self._serving()
        self.send(Ready(proof(secret, LISTENER, nonce, *self._challenges), self.transcript))
        self.shaken()
        self.checking()

    def _serving(self) -> Handlers:
        return {
            Open: self._on_open,
            Stop: self._on_stop,
            Pause: self._on_pause,
            Resume: self._on_resume,
            Taken: self._on_taken,
            Subscribe: self._on_subscribe,
            Unsubscribe: self._on_unsubscribe,
        }

    @property
    def idle(self) -> bool:
        """Whether nothing would be lost with it."""
        return Hello not in self.handlers and Proof not in self.handlers and not self._calls and not self._subscriptions

    # Calls.

    def _on_open(self, opening: Open) -> None:
        sid = opening.sid
        if sid in self._calls:
            raise FrameError(f"stream {sid} is open already")
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

    def _accept(self, opening: Open) -> tuple[TcpServed, Any]:
        served = self._registry.served.get((opening.instance_id, opening.endpoint))
        if served is None:
            raise CannotConnect(f"instance {opening.instance_id:016x} does not serve {opening.endpoint!r} here")
        if served.draining:
            raise EngineShutdown(f"endpoint {opening.endpoint!r} is being stopped")
        if len(self._calls) >= self.config.max_streams:
            raise WorkerOverloaded(f"{len(self._calls)} calls run on this connection, no more are accepted")
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
        if taken.frames > self._under_way:
            raise FrameError("more frames were taken than sent")
        self._under_way -= taken.frames
        self._overdue = None
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
        if not told and not self.closing:
            self._tail.append(self.framed(encode(Ended(sid, None if error is None else to_wire(error)))))
            self.schedule()

    def cut(self, sid: int, error: DynamoError) -> None:
        """The caller learns that the stream is over, though the handler may still run."""
        self._tail.append(self.framed(encode(Ended(sid, to_wire(error)))))
        self.schedule()

    # Events.

    def _on_subscribe(self, wish: Subscribe) -> None:
        if wish.sid in self._subscriptions:
            raise FrameError(f"subscription {wish.sid} is there already")
        if len(self._subscriptions) >= self.config.max_streams:
            raise FrameError(f"{len(self._subscriptions)} subscriptions are open, no more are accepted")
        source = self._registry.sources.get((wish.subject, wish.source))
        if source is None:
            self.send(Unsubscribed(wish.sid))
            return
        self._subscriptions[wish.sid] = source
        source.join(self, wish.sid)

    def _on_unsubscribe(self, wish: Unsubscribe) -> None:
        source = self._subscriptions.pop(wish.sid, None)
        if source is not None:
            source.leave(self, wish.sid)

    def offer(self, sid: int, number: int, payload: bytes) -> bool:
        """Queues an event for a subscription; False if a bound is reached."""
        size = len(payload) + EVENT_OVERHEAD
        waiting = self._event_bytes + size
        if waiting > EVENT_BACKLOG_BYTES or size > self.peer_limit or len(self._events) >= self.config.event_backlog:
            return False
        self._events.append((sid, number, payload))
        self._event_bytes = waiting
        if not self.blocked:
            self.schedule()
        return True

    def unsubscribed(self, sid: int) -> None:
        """The source of a subscription is gone. What waits is still sent."""
        self._subscriptions.pop(sid, None)
        self._tail.append(self.framed(encode(Unsubscribed(sid))))
        self.schedule()

    # Both.

    def complain(self, error: DynamoError) -> None:
        if self._stranger is None or self in self._registry.callers:
            super().complain(error)
        else:
            text = "the connection with %s is closed: %s"
            self._registry.strangers.warn(self._stranger.host, text, self.peer, error)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.splitter.held > LARGE:
            # The caller's pings wait behind what it sends: it would take a long request for silence.
            now = self._loop.time()
            if now - self._reassured >= REASSURE:
                self._reassured = now
                self.send_body(PONG)

    def ticked(self, now: float) -> None:
        if not self._under_way or self.blocked:
            self._overdue = None
            return
        # A caller that lives tells what it takes. If it does not, a frame was lost, and rows would wait for each other
        # for ever. One that does not live is not heard at all, and given up for that.
        silence = self.config.callers_silence
        if self._overdue is None:
            self._overdue = now
        elif now - self._overdue >= silence and self.liveness.silent(now) < self.liveness.heartbeat:
            self.close(Disconnected(f"{self.peer} did not tell for {silence:g} s what it has taken"))

    def gather(self, out: list[bytes]) -> None:
        dirty, self._dirty = self._dirty, []
        if self.closing:
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
        if self._events and not self.blocked:
            out.append(self._pack_events())

    def _pack_rows(self, rows: list[tuple[Any, ...]], out: list[bytes]) -> None:
        """All rows in one frame; in several if they are too large, or if one of them cannot be sent at all."""
        if not rows:
            return
        ask = self._hurried > 0 and self._under_way < WINDOW
        try:
            body = encode((ROWS_TAG, rows, ask))
        except Exception as error:  # whatever an engine put into an item that cannot travel
            body, problem = b"", str(error)
        else:
            if len(body) <= self.peer_limit:
                out.append(self.framed(body))
                self._under_way += ask
                return
            problem = f"it has {len(body)} bytes, more than the {self.peer_limit} of a frame"
        if len(rows) == 1:
            sid = rows[0][0]
            outlet = self._calls.get(sid)
            if outlet is not None:
                outlet.fail(Unknown(f"an item could not be sent: {problem}"))
            return
        half = len(rows) // 2
        self._pack_rows(rows[:half], out)
        self._pack_rows([row for row in rows[half:] if not self._failed(row[0])], out)

    def _failed(self, sid: int) -> bool:
        outlet = self._calls.get(sid)
        return outlet is not None and outlet.failed

    def _pack_events(self) -> bytes:
        size, count = 0, 0
        for _, _, payload in self._events:
            size += len(payload) + EVENT_OVERHEAD
            if count and size > min(EVENT_FRAME, self.peer_limit):
                size -= len(payload) + EVENT_OVERHEAD
                break
            count += 1
        batch, self._events = self._events[:count], self._events[count:]
        self._event_bytes -= size
        if self._events:
            self.schedule()
        return self.framed(encode((EVENTS_TAG, batch)))

    def over(self, error: DynamoError) -> None:
        registry = self._registry
        if self._deadline is not None:
            self._deadline.cancel()
        if self._stranger is not None:
            registry.strangers.gone(self._stranger)
        registry.callers.pop(self, None)
        if self in registry.links:
            registry.links.discard(self)
            registry.connections.dec()
        for outlet in list(self._calls.values()):
            outlet.drop()
            outlet.call.lost()
        if self._collected is not None and not self._collected.done():
            self._collected.set_result(None)
        for sid, source in self._subscriptions.items():
            source.leave(self, sid)
        self._subscriptions.clear()
        self._events.clear()


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

    def __init__(self, link: ListenerLink, sid: int, endpoint: Endpoint, gather: int) -> None:
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

    async def accepted(self) -> None:
        self._link.send(Accepted(self._sid))
        # Written at the end of this turn, and in the socket with that.
        await asyncio.sleep(0)

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
        if self._resumed is None and len(self._pending) < self._limit and not self._link.blocked:
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
            elif self._link.blocked:
                await self._link.writable.wait()
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
