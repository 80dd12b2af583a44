"""One link, either end: numbered fragments out and in, parts put together, heartbeats, and exactly one end."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any

import msgspec
from dynamo_core import DynamoError
from dynamo_core.errors import CannotConnect, Disconnected, ResponseTimeout, StreamIncomplete, from_wire, to_wire

from dynamo_wire.brokered.broker import Broker
from dynamo_wire.brokered.settings import BrokeredConfig
from dynamo_wire.brokered.wire_format import (
    ARRIVED,
    FRAGMENT_OVERHEAD,
    PROBED,
    UNKNOWN_LINK,
    Checksums,
    Damaged,
    Fragment,
    LinkError,
    arrived_fragment,
    bundle,
    read_answer,
    read_bundle,
    read_count,
    read_fragment,
)
from dynamo_wire.liveness import Action, Liveness
from dynamo_wire.messages import Bye, Ping, Pong, encode

log = logging.getLogger(__name__)

#: Bytes that may be in flight before the other end confirms their arrival, and after how many it does. A broker drops a
#: subscriber with too long a queue, and all its links with it: a large message must not be faster than its reader.
CREDIT = 2 * 1024 * 1024
CREDIT_STEP = 256 * 1024

_PING = encode(Ping())
_PONG = encode(Pong())

Handlers = dict[type, Callable[[Any], None]]


class Link:
    """The base of both ends of a link.

    Everything sent in one turn of the loop leaves in one message of the broker, if it fits. Subclasses set `handlers`
    to what may arrive, add the messages that wait in `collect`, and learn of the end in `over`, once.
    """

    def __init__(
        self,
        broker: Broker,
        config: BrokeredConfig,
        name: str,
        *,
        there: str,
        here: str,
        decoder: msgspec.msgpack.Decoder[Any],
    ) -> None:
        """`there` is the address of the other end, `here` the own one."""
        self.broker = broker
        self.config = config
        self.name = name
        self.peer = there
        #: The largest body that the other end takes; its first message replaces this.
        self.peer_limit = config.max_message
        #: Whether nothing more will be sent.
        self.closed = False
        #: Whether what is sent now is the last.
        self.closing = False
        self.handlers: Handlers = {}
        self._here = here
        self._decoder = decoder
        self._loop = asyncio.get_running_loop()
        #: Work for the whole link belongs to no request, so it does not run in the context of the first one.
        self._context = Context()
        self._out: list[bytes] = []
        self._scheduled = False
        self._ask = False
        self._sent = 0
        self._expected = 0
        #: Bytes of bodies: sent, and arrived as far as the other end has said; arrived here, and told of.
        self._gone = 0
        self._landed = 0
        self._arrived = 0
        self._told = 0
        #: Fragments that wait until more has arrived: what they are, the size of their bodies, and the reply.
        self._held: deque[tuple[bytes, int, str]] = deque()
        self._released = asyncio.Event()
        self._released.set()
        self._outgoing = Checksums(name, there) if config.checksum else None
        self._incoming = Checksums(name, here)
        #: Whether the other end sends checksums; known from its first fragment.
        self._checked = False
        self._parts: list[memoryview] = []
        self._size = 0
        self.liveness = Liveness(config.heartbeat, config.callers_silence, self._loop.time())
        self._used_at = self._loop.time()
        self._ticker = self._loop.call_at(self.liveness.due, self._tick, context=self._context)
        self._common: Handlers = {Ping: self._on_ping, Pong: self._on_pong, Bye: self._on_bye}

    # What subclasses fill in.

    def update_liveness(self) -> bool:
        """Return whether calls are open, so that it matters if the other end lives. Set how long it may be silent."""
        raise NotImplementedError

    def collect(self, out: list[bytes]) -> None:
        """Append the messages that wait, after those given to `send`."""

    def probe(self) -> None:
        """Ask the other end's process in another way, if there is one: pings stay without an answer."""

    def report_busy(self, seconds: float) -> None:
        """Record a report of the other end's process that its event loop has been blocked for so long."""

    def unused(self, seconds: float) -> None:
        """Record that the link has not been used for so long."""

    def over(self, error: DynamoError) -> None:
        """Record that nothing more will arrive, for this reason. Called once."""

    # Sending.

    @property
    def limit(self) -> int:
        """The largest message that the other end takes, in bytes."""
        return self.peer_limit - FRAGMENT_OVERHEAD

    @property
    def blocked(self) -> bool:
        """Whether the buffer for the broker or the other end is full, so that senders have to wait."""
        return self.broker.blocked or bool(self._held)

    @property
    def writable(self) -> asyncio.Event:
        """Set while the buffer that keeps the link blocked has room."""
        return self.broker.writable if self.broker.blocked else self._released

    def send(self, message: Any) -> None:
        """Send a message with the next fragment."""
        self.send_encoded(encode(message))

    def send_encoded(self, message: bytes) -> None:
        """Send an encoded message with the next fragment."""
        if not self.closed:
            self._out.append(message)
            self.schedule()

    def ask(self, message: bytes) -> None:
        """Send an encoded message, and ask the broker to report a missing receiver."""
        self._ask = True
        self.send_encoded(message)

    async def sent(self) -> None:
        """Return when what was sent before has left this process, unless much waits before it."""
        await asyncio.sleep(0)
        await self.broker.written()

    def schedule(self) -> None:
        """Send in the next turn of the loop."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush, context=self._context)

    def _flush(self) -> None:
        self._scheduled = False
        out, self._out = self._out, []
        self.collect(out)
        if self.closed or not out:
            return
        start, size = 0, 0
        for end, message in enumerate(out):
            # Each body as full as the other end takes it.
            if size and size + len(message) + FRAGMENT_OVERHEAD > self.peer_limit:
                self._publish(bundle(out[start:end]))
                start, size = end, 0
            size += len(message)
        self._publish(bundle(out[start:]))

    def _publish(self, body: bytes) -> None:
        """Publish a body as one fragment, or as many as the broker's limit needs."""
        reply, self._ask = (self._here if self._ask else ""), False
        step = self.broker.max_fragment - FRAGMENT_OVERHEAD
        view = memoryview(body)
        checksums = self._outgoing
        for start in range(0, len(view), step):
            part, number, more = view[start : start + step], self._sent, start + step < len(view)
            fragment = (
                (number, more, part) if checksums is None else (number, more, part, checksums.of(number, more, part))
            )
            self._held.append((encode(fragment), len(part), reply))
            self._sent += 1
            reply = ""
        self._release()

    def _release(self) -> None:
        """Send what may be under way."""
        held = self._held
        while held and (self._gone - self._landed < CREDIT or self.closing):
            fragment, size, reply = held.popleft()
            self._gone += size
            self.broker.publish(self.peer, fragment, link=self.name, reply=reply)
        if held:
            self._released.clear()
        else:
            self._released.set()

    def _report_arrived(self, *, ask: bool = False) -> None:
        self._told = self._arrived
        fragment = arrived_fragment(self._arrived)
        self.broker.publish(self.peer, fragment, link=self.name, reply=self._here if ask else "")

    # Receiving.

    def absent(self) -> None:
        """Record that the other end does not listen any more."""
        self.finish(CannotConnect(f"no process listens at {self.peer}: the one that did is gone"))

    def receive(self, data: bytes, reply: str) -> None:
        """Take what arrived over this link; `reply` is set if life is asked for."""
        if self.closed:
            return
        try:
            fragment = read_fragment(data)
            self._check(fragment)
            if fragment.number == PROBED:
                # It comes from a thread, and says nothing about the link.
                if (busy := read_answer(fragment.body)) > 0:
                    self.report_busy(busy)
                return
            self.liveness.heard(self._loop.time())
            self._take(fragment, reply)
        except DynamoError as error:
            if isinstance(error, Damaged):
                self.broker.damaged.inc()
            log.warning("the link with %s is given up: %s", self.peer, error)
            self.close(error)

    def _check(self, fragment: Fragment) -> None:
        if fragment.check is None:
            damaged = self._checked and fragment.number >= 0
        else:
            self._checked = True
            damaged = fragment.check != self._incoming.of(fragment.number, fragment.more, fragment.body)
        if damaged:
            raise Damaged(f"fragment {fragment.number} of the link is not what was sent: its checksum differs")

    def _take(self, fragment: Fragment, reply: str) -> None:
        if fragment.number == UNKNOWN_LINK:
            self.unknown()
            return
        if fragment.number == ARRIVED:
            self._on_arrived(read_count(fragment.body), asked=bool(reply))
            return
        if fragment.number != self._expected:
            raise StreamIncomplete(
                f"fragment {fragment.number} came where {self._expected} was due: messages were lost"
            )
        self._expected += 1
        self._arrived += len(fragment.body)
        if self._arrived - self._told >= CREDIT_STEP:
            self._report_arrived()
        body: memoryview | bytes = fragment.body
        if fragment.more or self._parts:
            self._parts.append(fragment.body)
            self._size += len(fragment.body)
            if self._size > self.config.max_message:
                raise LinkError(
                    f"a message has more than the {self.config.max_message} bytes that are taken: `max_message_mb` "
                    "differs between the two processes"
                )
            if fragment.more:
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

    def _on_arrived(self, count: int, *, asked: bool) -> None:
        if count > self._gone:
            raise LinkError("more bytes have arrived than were sent")
        self._landed = max(self._landed, count)
        if asked:
            self._report_arrived()
        self._release()

    def unknown(self) -> None:
        """Record that the other end does not know this link, or no longer."""
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
        """Send what waits and the reason. Whatever is still open here ends with `error`."""
        if self.closed:
            return
        # Calls that ended in this turn come before the `Bye`.
        self.collect(self._out)
        self._out.append(encode(Bye(to_wire(error))))
        self.closing = True
        self._flush()
        self.finish(error)

    def finish(self, error: DynamoError) -> None:
        """End this end; the other one is not told."""
        if self.closed:
            return
        self.closed = True
        self._ticker.cancel()
        self._out.clear()
        self._held.clear()
        self._parts.clear()
        self._released.set()
        self.over(error)

    # Deadlines.

    def _tick(self) -> None:
        now, liveness, used = self._loop.time(), self.liveness, self.update_liveness()
        action = liveness.check(now, used=used)
        if action is Action.GIVE_UP:
            silent = ResponseTimeout(f"nothing came from {self.peer} for {liveness.silence:g} s")
            self.close(Disconnected(silent.message, cause=silent))
            return
        if action is Action.PROBE:
            self.probe()
        if self._held:
            # A ping would have to wait behind what waits. The answer also makes up for a count that was lost.
            self._report_arrived(ask=True)
        elif action is Action.PING:
            self.ask(_PING)
        elif self._arrived > self._told and self._parts:
            # Parts come slowly, and the other end waits for the confirmation.
            self._report_arrived()
        self._ticker = self._loop.call_at(liveness.due, self._tick, context=self._context)
        if used:
            self._used_at = now
        else:
            self.unused(now - self._used_at)
