"""The serving end: endpoints, and connections of callers with the calls that run over them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec
from dynamo_core import CounterLike, DynamoError, Endpoint, GaugeLike, Handler, Served, TaskSet
from dynamo_core.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    EngineShutdown,
    InvalidArgument,
    WorkerOverloaded,
    to_wire,
)
from dynamo_wire import (
    ACCEPTED_PROTOS,
    UNREADABLE,
    Ack,
    Open,
    Pause,
    Refused,
    Resume,
    ServerStreams,
    Stop,
    encode,
    proto_mismatch,
)

from dynamo_plugin_transport_tcp.address import NONCE_BYTES, Address
from dynamo_plugin_transport_tcp.config import TcpConfig
from dynamo_plugin_transport_tcp.connection_limiter import ConnectionLimiter, PendingConnection
from dynamo_plugin_transport_tcp.frames import FrameError
from dynamo_plugin_transport_tcp.link import PONG, Handlers, Link
from dynamo_plugin_transport_tcp.messages import (
    EVENTS_TAG,
    MAGIC,
    Challenge,
    Hello,
    Proof,
    Ready,
    Subscribe,
    Unsubscribe,
    Unsubscribed,
    listener_decoder,
)
from dynamo_plugin_transport_tcp.security import CALLER, CHALLENGE_BYTES, LISTENER, proof, proven
from dynamo_plugin_transport_tcp.unfinished_frames import LARGE, UnfinishedFrames

log = logging.getLogger(__name__)

#: Largest frames that callers together may have begun and not finished.
UNFINISHED = 4

#: Bytes of events in one frame, so that they never stand in the way of rows for long; and bytes that may wait.
EVENT_FRAME = 64 * 1024
EVENT_BACKLOG_BYTES = 8 * 1024 * 1024
#: Seconds between two words to the sender of a large frame that it is being read.
PROGRESS_INTERVAL = 0.5

#: More than what an event takes beside its payload.
EVENT_OVERHEAD = 64


class Source(Protocol):
    """The source of a subscriber's events."""

    def join(self, link: ListenerLink, sid: int) -> None:
        """Send events to this subscription too from now on."""

    def leave(self, link: ListenerLink, sid: int) -> None:
        """Send no more events to this subscription."""


@dataclass(slots=True)
class Registry:
    """The endpoints that this process offers, and its connections."""

    config: TcpConfig
    connections: GaugeLike
    #: Frames that are not what was sent.
    damaged: CounterLike
    limiter: ConnectionLimiter
    #: Tells this run of this process from whatever else may listen on the same port, before or after.
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    served: dict[tuple[int, str], TcpServed] = field(default_factory=dict)
    sources: dict[tuple[str, int], Source] = field(default_factory=dict)
    links: set[ListenerLink] = field(default_factory=set)
    #: Connections whose callers have done the handshake, in the order in which they came.
    callers: dict[ListenerLink, None] = field(default_factory=dict)
    unfinished: UnfinishedFrames = field(init=False)

    def __post_init__(self) -> None:
        self.unfinished = UnfinishedFrames(UNFINISHED * self.config.max_frame)

    def make_room(self) -> bool:
        """Return whether there is room for another caller.

        One that has no calls makes room: it connects again when needed.
        """
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

    def __init__(self, registry: Registry, pending: PendingConnection | None = None) -> None:
        """`pending` is its entry in the limiter, until the caller has done the handshake."""
        super().__init__(registry.config, listener_decoder, registry.damaged)
        self._registry = registry
        self._pending = pending
        self._streams = ServerStreams(self)
        self._subscriptions: dict[int, Source] = {}
        #: Since when the caller should have said that it has taken some; None while it need not.
        self._overdue: float | None = None
        #: When it was last told that a large frame is being read.
        self._progress_sent = 0.0
        self._events: list[tuple[int, int, bytes]] = []
        self._event_bytes = 0
        self._challenges = b"", secrets.token_bytes(CHALLENGE_BYTES)
        self._deadline: asyncio.TimerHandle | None = None
        #: Whether nothing is read, as other callers' frames take the memory.
        self._held_back = False
        self.handlers = {Hello: self._on_hello}

    # The handshake.

    def opened(self) -> None:
        registry, loop = self._registry, self._loop
        if self._pending is not None:
            made_room = Disconnected("the connection said nothing and had to make room for others")
            self._pending.close = lambda: loop.call_soon_threadsafe(self.abort, made_room)
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
        self._challenges = hello.challenge, self._challenges[1]
        self.peer_limit = hello.max_frame
        self.handlers = {Proof: self._on_proof}
        config = self.config
        proto = min(hello.proto, ACCEPTED_PROTOS[0])
        checksums = hello.checksums and config.checksums
        self.send(Challenge(proto, self._challenges[1], config.max_frame, config.secret is not None, True, checksums))
        self.negotiated(checksums=checksums)

    def _on_proof(self, given: Proof) -> None:
        secret, nonce = self.config.secret_bytes, self._registry.nonce
        if not proven(proof(secret, CALLER, nonce, *self._challenges), given.proof if secret else b""):
            raise CannotConnect("the secrets of the two processes differ")
        self.verify_transcript(given.transcript)
        registry = self._registry
        if self._pending is not None:
            registry.limiter.verified(self._pending)
        if not registry.make_room():
            raise CannotConnect(f"{len(registry.callers)} connections are open, no more are accepted")
        registry.callers[self] = None
        if self._deadline is not None:
            self._deadline.cancel()
        self.handlers = self._serving()
        self.send(Ready(proof(secret, LISTENER, nonce, *self._challenges), self.transcript))
        self.handshake_received()
        self.handshake_sent()

    def _serving(self) -> Handlers:
        return {
            Open: self._on_open,
            Stop: self._streams.on_stop,
            Pause: self._streams.on_pause,
            Resume: self._streams.on_resume,
            Ack: self._on_ack,
            Subscribe: self._on_subscribe,
            Unsubscribe: self._on_unsubscribe,
        }

    @property
    def idle(self) -> bool:
        """Whether nothing would be lost with it."""
        return not self._streams and not self._subscriptions

    # Calls.

    def _on_open(self, opening: Open) -> None:
        if opening.sid in self._streams:
            raise FrameError(f"stream {opening.sid} is open already")
        try:
            served, request = self._accept(opening)
        except DynamoError as error:
            self.send(Refused(opening.sid, to_wire(error)))
            return
        self._streams.open(opening, served.endpoint, served.handler, request, served.calls)

    def _accept(self, opening: Open) -> tuple[TcpServed, Any]:
        served = self._registry.served.get((opening.instance_id, opening.endpoint))
        if served is None:
            raise CannotConnect(f"instance {opening.instance_id:016x} does not serve {opening.endpoint!r} here")
        if served.draining:
            raise EngineShutdown(f"endpoint {opening.endpoint!r} is being stopped")
        if len(self._streams) >= self.config.max_streams:
            raise WorkerOverloaded(f"{len(self._streams)} calls run on this connection, no more are accepted")
        try:
            return served, served.decode(opening.request)
        except UNREADABLE as error:
            raise InvalidArgument(f"the request for {opening.endpoint!r} cannot be understood: {error}") from None

    def _on_ack(self, ack: Ack) -> None:
        self._overdue = None
        self._streams.on_ack(ack)

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
        """Queue an event for a subscription; False if a bound is reached."""
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
        """End a subscription whose source is gone. Waiting events are still sent."""
        self._subscriptions.pop(sid, None)
        self.send(Unsubscribed(sid))

    # Both.

    def log_failure(self, error: DynamoError) -> None:
        if self._pending is None or self in self._registry.callers:
            super().log_failure(error)
        else:
            text = "the connection with %s is closed: %s"
            self._registry.limiter.warn(self._pending.host, text, self.peer, error)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self in self._registry.callers:
            self._registry.unfinished.update(self, self.splitter.held)
        if self.splitter.held > LARGE:
            # The caller's pings wait behind what it sends: it would take a long request for silence.
            now = self._loop.time()
            if now - self._progress_sent >= PROGRESS_INTERVAL:
                self._progress_sent = now
                self.send_body(PONG)

    @property
    def host(self) -> str:
        """See `Reader`."""
        return "" if self._pending is None else self._pending.host

    def hold_reading(self) -> None:
        """See `Reader`."""
        self._held_back = True
        if self._transport is not None and not self.closing:
            self._transport.pause_reading()

    def go_on_reading(self) -> None:
        """See `Reader`."""
        self._held_back = False
        # Its silence was this end's doing.
        self.liveness.heard(self._loop.time())
        if self._transport is not None and not self.closing and not self.blocked:
            self._transport.resume_reading()

    def cut_reading(self) -> None:
        """See `Reader`."""
        self.close(Disconnected("a frame was begun and does not grow, while others wait for the memory that it takes"))

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._held_back:
            self.hold_reading()

    def ticked(self, now: float) -> None:
        if self._held_back:
            self.liveness.heard(now)
        if not self._streams.in_flight or self.blocked:
            self._overdue = None
            return
        # A caller that lives tells what it takes. If it does not, a frame was lost, and rows would wait for each other
        # for ever. One that does not live is not heard at all, and given up for that.
        silence = self.config.callers_silence
        if self._overdue is None:
            self._overdue = now
        elif now - self._overdue >= silence and self.liveness.silent(now) < self.liveness.heartbeat:
            self.close(Disconnected(f"{self.peer} did not tell for {silence:g} s what it has taken"))

    async def sent(self) -> None:
        """Return when what was given to `send` is in the socket: it is written at the end of this turn."""
        await asyncio.sleep(0)

    def collect(self, out: list[bytes]) -> None:
        messages: list[bytes] = []
        self._streams.collect(messages, self.peer_limit)
        out += map(self.framed, messages)
        if self._events and not self.blocked and not self.closing:
            out.append(self._pack_events())

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
        if self._pending is not None:
            registry.limiter.remove(self._pending)
        registry.callers.pop(self, None)
        registry.unfinished.remove(self)
        if self in registry.links:
            registry.links.discard(self)
            registry.connections.dec()
        self._streams.lost()
        for sid, source in self._subscriptions.items():
            source.leave(self, sid)
        self._subscriptions.clear()
        self._events.clear()
