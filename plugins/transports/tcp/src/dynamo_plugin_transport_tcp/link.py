"""One connection, either end: frames out and in, back-pressure, heartbeats, and exactly one end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextvars import Context
from typing import Any, ClassVar, cast

import msgspec
from dynamo_core import CounterLike, DynamoError
from dynamo_core.errors import Disconnected, ResponseTimeout, from_wire, to_wire
from dynamo_wire import Action, Bye, Liveness, Ping, Pong, checksum, encode

from dynamo_plugin_transport_tcp.address import join_host_port
from dynamo_plugin_transport_tcp.config import TcpConfig
from dynamo_plugin_transport_tcp.frames import DamagedFrame, FrameError, FrameSplitter, checked_frame, frame
from dynamo_plugin_transport_tcp.messages import HANDSHAKE_LIMIT, read

log = logging.getLogger(__name__)

#: Seconds that a connection being closed may take to send what is left.
CLOSE_GRACE = 2.0

_PING = encode(Ping())
PONG = encode(Pong())

Handlers = dict[type, Callable[[Any], None]]


class Link(asyncio.Protocol):
    """The base of both ends of a connection.

    Everything sent in one turn of the loop leaves in one write. Subclasses set `handlers` to what may arrive in their
    present state, add the frames that wait in `collect`, and learn of the end in `over`, once.
    """

    #: Whether reading stops while the other end does not read; only one of the two ends may do so.
    STOPS_READING: ClassVar[bool] = False

    def __init__(self, config: TcpConfig, decoder: msgspec.msgpack.Decoder[Any], damaged: CounterLike) -> None:
        """`damaged` counts the frames that are not what was sent."""
        self.config = config
        #: The largest frame the other end takes; known after the handshake.
        self.peer_limit = HANDSHAKE_LIMIT
        self.peer = "an unknown peer"
        #: Whether nothing more will be sent.
        self.closing = False
        #: Whether the write buffer is full, so that senders have to wait.
        self.blocked = False
        self.writable = asyncio.Event()
        self.writable.set()
        #: Set when the socket is closed.
        self.gone = asyncio.Event()
        self.splitter = FrameSplitter(HANDSHAKE_LIMIT)
        #: What has been said so far, up to where both ends have said what they are.
        self._transcript: int | None = 0
        #: The checksum of that.
        self.transcript = b""
        self._checksums = False
        self.framed = frame
        self._damaged = damaged
        self.handlers: Handlers = {}
        self._decoder = decoder
        self._loop = asyncio.get_running_loop()
        #: Work for the whole connection belongs to no request, so it does not run in the context of the first one.
        self._context = Context()
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._scheduled = False
        self._told = False
        self.liveness = Liveness(config.callers_heartbeat, config.callers_silence, self._loop.time())
        self._ticker: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._abort: asyncio.TimerHandle | None = None
        self._written = 0
        self._drained = 0
        self._common: Handlers = {Ping: self._on_ping, Pong: self._on_pong, Bye: self._on_bye}

    # What subclasses fill in.

    def opened(self) -> None:
        """Record that the socket is connected."""

    def collect(self, out: list[bytes]) -> None:
        """Append the frames of everything that waits, after those given to `send`."""

    def update_liveness(self) -> bool:
        """Return whether it matters now if the other end lives.

        Set how often it is asked, and how long it may be silent.
        """
        return True

    def ticked(self, now: float) -> None:
        """Record that a heartbeat or less has passed."""

    def probe(self) -> None:
        """Ask the other end's process in another way, if there is one: pings stay without an answer."""

    def log_failure(self, error: DynamoError) -> None:
        """Log why the connection is closed."""
        log.warning("the connection with %s is closed: %s", self.peer, error)

    def over(self, error: DynamoError) -> None:
        """Record that nothing more will arrive, for this reason. Called once."""

    # Sending.

    @property
    def closed(self) -> bool:
        """Whether nothing more will be sent."""
        return self.closing

    def send(self, message: Any) -> None:
        """Send a message with the next write."""
        self.send_body(encode(message))

    def send_body(self, body: bytes) -> None:
        """Send an encoded message with the next write."""
        if self.closing:
            return
        if self._transcript is not None:
            self._transcript = checksum(body, self._transcript)
        self._out.append(self.framed(body))
        self.schedule()

    # The handshake.

    def negotiated(self, *, checksums: bool) -> None:
        """Record that both ends have sent their settings and agreed on checksums after the handshake."""
        if self._transcript is not None:
            self.transcript, self._transcript = self._transcript.to_bytes(8, "big"), None
        self._checksums = checksums

    def verify_transcript(self, transcript: bytes) -> None:
        """Compare the handshake as sent with what the other end received, if that reports it.

        Raises:
            DamagedFrame: something was changed on its way.
        """
        if transcript != self.transcript and (transcript or self._checksums):
            raise DamagedFrame("the handshake is not what was sent: its checksum differs")

    def handshake_received(self) -> None:
        """Allow larger frames once the whole handshake has arrived, with checksums if both ends want them."""
        self.splitter.limit = self.config.max_frame
        if self._checksums:
            self.splitter.check()

    def handshake_sent(self) -> None:
        """Use checksums from now on if both ends want them: the whole handshake has been sent."""
        if self._checksums:
            self.framed = checked_frame

    def schedule(self) -> None:
        """Write in the next turn of the loop."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush, context=self._context)

    def _flush(self) -> None:
        self._scheduled = False
        out, self._out = self._out, []
        self.collect(out)
        transport = self._transport
        if not out or transport is None or self.closing:
            return
        data = out[0] if len(out) == 1 else b"".join(out)
        self._written += len(data)
        try:
            transport.write(data)
        except RuntimeError:
            # uvloop closes at once what the other end has reset, and tells of it in a later turn.
            log.debug("the connection with %s broke before it was written to", self.peer)

    # Ending.

    def close(self, error: DynamoError) -> None:
        """Send what waits and the reason, then close. Whatever is still open here ends with `error`."""
        if self.closing:
            return
        # Calls that ended in this turn come before the `Bye`.
        self.collect(self._out)
        self._out.append(self.framed(encode(Bye(to_wire(error)))))
        self._flush()
        self.closing = True
        if self._transport is not None:
            self._transport.close()
            self._abort = self._loop.call_later(CLOSE_GRACE, self._transport.abort)
        self._finish(error)

    def abort(self, error: DynamoError) -> None:
        """Close at once; what waits is not sent."""
        self.closing = True
        if self._transport is not None:
            self._transport.abort()
        self._finish(error)

    def _finish(self, error: DynamoError) -> None:
        if self._told:
            return
        self._told = True
        for timer in (self._ticker, self._stall):
            if timer is not None:
                timer.cancel()
        self.blocked = False
        self.writable.set()
        self.over(error)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's, but look the same.
        self._transport = cast(asyncio.Transport, transport)
        if self.gone.is_set():
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=self.config.write_high_water)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.peer = join_host_port(name[0], name[1])
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._set_ticker()
        self.opened()

    def data_received(self, data: bytes) -> None:
        self.liveness.heard(self._loop.time())
        if self.closing:
            return
        try:
            self._read(data)
        except DynamoError as error:
            if isinstance(error, DamagedFrame):
                self._damaged.inc()
            self.log_failure(error)
            self.close(error)

    def _read(self, data: bytes) -> None:
        for body in self.splitter.feed(data):
            message = read(self._decoder, body)
            if self._transcript is not None:
                self._transcript = checksum(body, self._transcript)
            handler = self.handlers.get(type(message)) or self._common.get(type(message))
            if handler is None:
                raise FrameError(f"{type(message).__name__} was not expected now")
            handler(message)
            if self.closing:
                return

    def eof_received(self) -> None:
        """Let the event loop close the connection: there is no use for half of one."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        if self._abort is not None:
            self._abort.cancel()
        self._finish(Disconnected(f"the connection with {self.peer} broke", cause=exc))
        self._out.clear()
        self.gone.set()

    def pause_writing(self) -> None:
        self.blocked = True
        self.writable.clear()
        if self._transport is None or self.closing:
            return
        if self.STOPS_READING:
            # Or else a peer that sends and never reads would make answers pile up here.
            self._transport.pause_reading()
        self._drained = self._sent()
        self._stall = self._loop.call_later(self.config.write_stall, self._stalled)

    def resume_writing(self) -> None:
        self.blocked = False
        self.writable.set()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if self._transport is None or self.closing:
            return
        if self.STOPS_READING:
            self._transport.resume_reading()
        self.schedule()

    # Deadlines.

    def _sent(self) -> int:
        assert self._transport is not None  # noqa: S101 - only asked while connected
        return self._written - self._transport.get_write_buffer_size()

    def _stalled(self) -> None:
        drained = self._sent()
        if drained > self._drained:
            self._drained = drained
            self._stall = self._loop.call_later(self.config.write_stall, self._stalled)
            return
        self.abort(Disconnected(f"{self.peer} read nothing for {self.config.write_stall} s"))

    def _tick(self) -> None:
        now, liveness = self._loop.time(), self.liveness
        # Where reading has stopped, what the other end says is in the socket.
        action = liveness.check(now, used=self.update_liveness() and not (self.blocked and self.STOPS_READING))
        if action is Action.GIVE_UP:
            silent = ResponseTimeout(f"nothing came from {self.peer} for {liveness.silence:g} s")
            self.abort(Disconnected(silent.message, cause=silent))
            return
        if action is Action.PING:
            self.send_body(_PING)
        elif action is Action.PROBE:
            self.probe()
        self._set_ticker()
        self.ticked(now)

    def _set_ticker(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self._ticker = self._loop.call_at(self.liveness.due, self._tick, context=self._context)

    def _on_ping(self, _: Ping) -> None:
        self.send_body(PONG)

    def _on_pong(self, _: Pong) -> None:
        pass

    def _on_bye(self, bye: Bye) -> None:
        reason = from_wire(bye.error)
        self.closing = True
        if self._transport is not None:
            self._transport.close()
            self._abort = self._loop.call_later(CLOSE_GRACE, self._transport.abort)
        self._finish(Disconnected(f"{self.peer} closed the connection: {reason}", cause=reason))
