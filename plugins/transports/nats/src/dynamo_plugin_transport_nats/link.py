"""One link, either end: numbered pieces out and in, parts put together, heartbeats, and exactly one end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
from dynamo_core.errors import (
    CannotConnect,
    Disconnected,
    DynamoError,
    ResponseTimeout,
    StreamIncomplete,
    from_wire,
    to_wire,
)
from nats.aio.msg import Msg

from dynamo_plugin_transport_nats.broker import Broker
from dynamo_plugin_transport_nats.config import NatsConfig
from dynamo_plugin_transport_nats.messages import (
    PIECE_OVERHEAD,
    UNKNOWN_LINK,
    Bye,
    LinkError,
    Ping,
    Pong,
    bundle,
    encode,
    read_bundle,
    read_piece,
)

log = logging.getLogger(__name__)

#: What a server answers in the name of a subject that nobody listens to.
STATUS = "Status"
NO_RESPONDERS = "503"

_PING = encode(Ping())
_PONG = encode(Pong())

Handlers = dict[type, Callable[[Any], None]]


def nobody_there(message: Msg) -> bool:
    """Whether the server says that nobody listens where something was sent."""
    return message.headers is not None and message.headers.get(STATUS) == NO_RESPONDERS


class Link:
    """What both ends of a link have in common.

    Everything sent in one turn of the loop leaves in one message of the server, if it fits. Subclasses set `handlers`
    to what may arrive, add what they gathered in `gather`, and are told the end in `over`, once.
    """

    def __init__(
        self, broker: Broker, config: NatsConfig, there: str, here: str, decoder: msgspec.msgpack.Decoder[Any]
    ) -> None:
        """`there` is the subject that the other end listens to, `here` the own one."""
        self.broker = broker
        self.config = config
        self.peer = there
        #: The largest body that the other end takes; its own word replaces this.
        self.peer_limit = config.max_message
        #: Whether nothing more will be sent.
        self.closed = False
        self.handlers: Handlers = {}
        self._here = here
        self._decoder = decoder
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes] = []
        self._scheduled = False
        self._ask = False
        self._sent = 0
        self._expected = 0
        self._parts: list[memoryview] = []
        self._size = 0
        self._heard = True
        self._silent = 0
        self._unused = 0
        self._due = self._loop.time() + config.heartbeat
        self._ticker = self._loop.call_at(self._due, self._tick)
        self._common: Handlers = {Ping: self._on_ping, Pong: self._on_pong, Bye: self._on_bye}

    # What subclasses fill in.

    @property
    def used(self) -> bool:
        """Whether calls are open, so that it matters whether the other end lives."""
        raise NotImplementedError

    def gather(self, out: list[bytes]) -> None:
        """Appends the messages that wait, after those given to `send`."""

    def unused(self, seconds: float) -> None:
        """The link has not been used for so long."""

    def over(self, error: DynamoError) -> None:
        """Nothing more will arrive, for this reason. Called once."""

    # Sending.

    def send(self, message: Any) -> None:
        """Sends a message with the next piece."""
        self.send_encoded(encode(message))

    def send_encoded(self, message: bytes) -> None:
        """Sends an encoded message with the next piece."""
        if not self.closed:
            self._out.append(message)
            self.schedule()

    def ask(self, message: bytes) -> None:
        """Sends an encoded message, and wants to be told if nobody is there to get it."""
        self._ask = True
        self.send_encoded(message)

    def schedule(self) -> None:
        """Sends in the next turn of the loop."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        out, self._out = self._out, []
        self.gather(out)
        if self.closed or not out:
            return
        start, size = 0, 0
        for end, message in enumerate(out):
            # Each body as full as the other end takes it.
            if size and size + len(message) + PIECE_OVERHEAD > self.peer_limit:
                self._publish(bundle(out[start:end]))
                start, size = end, 0
            size += len(message)
        self._publish(bundle(out[start:]))

    def _publish(self, body: bytes) -> None:
        """A body as one piece, or as many as the server's limit makes of it."""
        reply, self._ask = (self._here if self._ask else ""), False
        step = self.broker.max_payload - PIECE_OVERHEAD
        view = memoryview(body)
        for start in range(0, len(body), step):
            more = start + step < len(body)
            self.broker.publish(self.peer, encode((self._sent, more, view[start : start + step])), reply)
            self._sent += 1
            reply = ""

    # Receiving.

    def receive(self, message: Msg) -> None:
        """Takes what arrived on the subject of this end."""
        if self.closed:
            return
        if nobody_there(message):
            self.finish(CannotConnect(f"nobody listens at {self.peer}: the process that did is gone"))
            return
        self._heard = True
        try:
            self._take(message.data)
        except DynamoError as error:
            log.warning("the link with %s is given up: %s", self.peer, error)
            self.close(error)

    def _take(self, data: bytes) -> None:
        piece = read_piece(data)
        if piece.number == UNKNOWN_LINK:
            self.unknown()
            return
        if piece.number != self._expected:
            raise StreamIncomplete(f"piece {piece.number} came where {self._expected} was due: messages were lost")
        self._expected += 1
        body: memoryview | bytes = piece.body
        if piece.more or self._parts:
            self._parts.append(piece.body)
            self._size += len(piece.body)
            if self._size > self.config.max_message:
                raise LinkError(
                    f"a message has more than the {self.config.max_message} bytes that are taken: `max_message_mb` "
                    "differs between the two processes"
                )
            if piece.more:
                return
            body = b"".join(self._parts)
            self._parts.clear()
            self._size = 0
        for message in read_bundle(self._decoder, body):
            handler = self.handlers.get(type(message)) or self._common.get(type(message))
            if handler is None:
                raise LinkError(f"{type(message).__name__} was not expected now")
            handler(message)
            if self.closed:
                return

    def unknown(self) -> None:
        """The other end does not know this link, or no longer."""
        self.finish(Disconnected(f"{self.peer} has forgotten this process"))

    def _on_ping(self, _: Ping) -> None:
        self.send_encoded(_PONG)

    def _on_pong(self, _: Pong) -> None:
        pass

    def _on_bye(self, bye: Bye) -> None:
        reason = from_wire(bye.error)
        if isinstance(reason, CannotConnect):
            self.finish(reason)
        else:
            self.finish(Disconnected(f"{self.peer} has ended the link: {reason}", cause=reason))

    # Ending.

    def close(self, error: DynamoError) -> None:
        """Sends what waits and the reason. Whatever is still open here ends with `error`."""
        if self.closed:
            return
        self._out.append(encode(Bye(to_wire(error))))
        self._flush()
        self.finish(error)

    def finish(self, error: DynamoError) -> None:
        """Ends this end; the other one is not told."""
        if self.closed:
            return
        self.closed = True
        self._ticker.cancel()
        self._out.clear()
        self._parts.clear()
        self.over(error)

    # Deadlines.

    def _tick(self) -> None:
        heartbeat = self.config.heartbeat
        now = self._loop.time()
        if self._heard or not self.used or now - self._due > heartbeat:
            # The last: this process itself slept. What came meanwhile has not been read yet.
            self._silent = 0
        else:
            self._silent += 1
        self._unused = 0 if self.used else self._unused + 1
        self._heard = False
        if self._silent * heartbeat >= self.config.silence:
            silent = ResponseTimeout(f"nothing came from {self.peer} for {self.config.silence} s")
            self.close(Disconnected(silent.message, cause=silent))
            return
        if self._silent:
            self.ask(_PING)
        self._due = now + heartbeat
        self._ticker = self._loop.call_at(self._due, self._tick)
        if self._unused:
            self.unused(self._unused * heartbeat)
