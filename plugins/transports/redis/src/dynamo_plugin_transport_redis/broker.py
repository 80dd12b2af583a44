"""The connection with a Redis server; see `dynamo_wire.brokered.broker`.

Messages are published to channels: the server keeps none of them, so that nothing has to be trimmed there, and says of
each how many received it, so that a missing listener shows at once. It may drop a subscriber that falls behind, and
forget everything; the numbering of links finds what is missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, ClassVar

from dynamo_core import DynamoError, MetricsScope, TaskSet
from dynamo_redis import config_error, connection_factory, explain
from dynamo_wire.brokered import CLOSE_GRACE, Broker, Listening, OutboundMessage, Session
from redis.asyncio.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from dynamo_plugin_transport_redis.config import RedisConfig

log = logging.getLogger(__name__)

#: Seconds between two pings of the server, and those that it may take to answer.
PING_INTERVAL = 5.0
ANSWER = 10.0

#: The largest message, in bytes; and the largest that is made of a link's. A server reads and writes little at a time,
#: and drops a subscriber for which too much waits: small fragments keep what waits there small.
MAX_MESSAGE = 1024 * 1024
MAX_FRAGMENT = 64 * 1024


class RedisBroker(Broker):
    """Two connections with one server: one that publishes, and one that listens.

    Raises:
        ConfigError: a file of the settings cannot be used.
    """

    SERVER = "Redis"

    def __init__(self, config: RedisConfig, metrics: MetricsScope) -> None:
        super().__init__(config, metrics)
        self._settings = config
        self._make = connection_factory(config, "transport", connect_timeout=config.connect_timeout)

    @property
    def default_max_message(self) -> int:
        return MAX_MESSAGE

    @property
    def max_fragment(self) -> int:
        return MAX_FRAGMENT

    def attempts(self) -> Iterator[Session]:
        yield _RedisSession(self._settings, self._make)

    def another(self, metrics: MetricsScope) -> RedisBroker:
        return RedisBroker(self._settings, metrics)

    def begun(self, session: Session) -> None:
        log.info("connected to Redis at %s:%s", self._settings.host, self._settings.port)


class _RedisSession(Session):
    """Two connections, which are thrown away together when either breaks.

    What goes over a link has a head: ``<link> <reply>`` and a space, both of which may be empty.
    """

    broken: ClassVar[tuple[type[Exception], ...]] = (RedisError, OSError)

    def __init__(self, config: RedisConfig, make: Callable[[], Connection]) -> None:
        super().__init__()
        self._config = config
        self._publishing = make()
        self._listening = make()
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskSet()
        #: What waits for an answer, in order: a future; or the own address and the link of a message that asks for
        #: life; or None. And the same of the other connection: for a confirmation or a pong.
        self._asked: deque[asyncio.Future[None] | tuple[bytes, str] | None] = deque()
        self._subscribing: deque[asyncio.Future[None]] = deque()
        self._pinged: deque[asyncio.Future[None]] = deque()
        #: By channel: who listens there, and what is done when the server knows.
        self._channels: dict[bytes, list[Listening]] = {}
        self._confirmed: dict[bytes, asyncio.Future[None]] = {}
        self._wires: list[asyncio.WriteTransport] = []
        #: Cancelling is not enough to end what reads: the library may swallow it.
        self._ended = False

    @property
    def max_message(self) -> int:
        return MAX_MESSAGE

    def explain(self, error: Exception) -> DynamoError:
        if isinstance(error, TimeoutError) and not str(error):
            error = TimeoutError(f"no connection within {self._config.connect_timeout} s")
        failure = explain(self._config, error)
        return config_error(failure, "transport") or failure

    async def connect(self) -> None:
        for connection in (self._publishing, self._listening):
            await connection.connect()  # type: ignore[no-untyped-call]
            # The library forgets it when a write is cancelled, and leaves it to send what waits, for ever on a network
            # that swallows everything; there is no public way to give that up.
            writer = connection._writer
            assert writer is not None  # noqa: S101 - it has just been connected
            self._wires.append(writer.transport)
        # Whether we may, before anything depends on it. The subscription stays: with one, pongs are like messages.
        await self._publishing.send_command("PUBLISH", f"{self._config.prefix}:rq:", b"")
        await self._publishing.read_response()
        await self._listening.send_command("SUBSCRIBE", f"{self._config.prefix}:cl:")
        await self._listening.read_response()
        self._spawn(self._answers(), "redis-answers")
        self._spawn(self._messages(), "redis-messages")
        self._spawn(self._watch(), "redis-watch")

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.spawn(self._guarded(coroutine), name=name)

    async def _guarded(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except Exception as error:
            if not isinstance(error, self.broken):
                log.exception("what the server says cannot be handled")
            self._give_up(error)

    def _give_up(self, reason: Exception) -> None:
        self.reasons.append(reason)
        self.gone.set()
        # No answer will come; each waiter checks `gone` when it wakes.
        waiting = [asked for asked in self._asked if isinstance(asked, asyncio.Future)]
        for future in [*waiting, *self._subscribing, *self._pinged]:
            if not future.done():
                future.set_result(None)

    # Listening.

    async def attach(self, listening: Listening) -> None:
        channel = listening.address.encode()
        known = self._channels.setdefault(channel, [])
        known.append(listening)
        if len(known) == 1:
            confirmed = self._confirmed[channel] = self._loop.create_future()
            self._subscribing.append(confirmed)
            await self._listening.send_command("SUBSCRIBE", channel)
        else:
            confirmed = self._confirmed[channel]
        # Whether it was confirmed or the connection broke is told by `settle`.
        await asyncio.shield(confirmed)

    async def detach(self, listening: Listening) -> None:
        channel = listening.address.encode()
        known = self._channels.get(channel, [])
        if listening not in known:
            return
        known.remove(listening)
        if not known:
            del self._channels[channel], self._confirmed[channel]
            await self._listening.send_command("UNSUBSCRIBE", channel)

    async def _messages(self) -> None:
        """Read what is published to our channels."""
        read = self._listening.read_response
        while not self._ended:
            kind, channel, data = (await read(disable_decoding=True) + [None])[:3]
            if kind == b"message":
                self._deliver(channel, data)
            elif kind == b"subscribe" and self._subscribing:
                _done(self._subscribing.popleft())
            elif kind == b"pong" and self._pinged:
                _done(self._pinged.popleft())

    def _deliver(self, channel: bytes, data: bytes) -> None:
        for listening in list(self._channels.get(channel, ())):
            if not listening.linked:
                listening.receive("", data, "")
                continue
            try:
                link, reply, fragment = data.split(b" ", 2)
                names = link.decode("ascii"), reply.decode("ascii")
            except ValueError:
                log.warning("a message is dropped: it does not say which link it belongs to")
                continue
            listening.receive(names[0], fragment, names[1])

    # Publishing.

    async def write(self, messages: list[OutboundMessage]) -> None:
        commands: list[tuple[bytes | str, ...]] = []
        for address, link, data, reply in messages:
            commands.append(("PUBLISH", address, f"{link} {reply} ".encode() + data if link else data))
            self._asked.append((reply.encode(), link) if reply else None)
        await self._publishing.send_packed_command(self._publishing.pack_commands(commands))

    async def settle(self) -> None:
        await self._ping()
        if self.gone.is_set():
            raise self.reasons[-1]

    async def _ping(self) -> None:
        answered = self._loop.create_future()
        self._asked.append(answered)
        await self._publishing.send_command("PING")
        await answered

    async def _answers(self) -> None:
        """Read how many got what was published."""
        read = self._publishing.read_response
        while not self._ended:
            answer = await read(disable_decoding=True)
            asked = self._asked.popleft() if self._asked else None
            if isinstance(asked, asyncio.Future) != (answer == b"PONG"):
                raise RedisConnectionError("the answers of the server are out of step")
            if isinstance(asked, asyncio.Future):
                _done(asked)
            elif asked is not None and answer == 0:
                reply, link = asked
                for listening in list(self._channels.get(reply, ())):
                    listening.listener.absent(link)

    # Its end.

    async def _watch(self) -> None:
        """Find out when the server hangs."""
        while not self._ended:
            # A timer, since what waits for the network may not hear that it is cancelled.
            silent = TimeoutError(f"the server did not answer for {ANSWER:g} s")
            timer = self._loop.call_later(ANSWER, self._give_up, silent)
            try:
                await self._ping()
                pong = self._loop.create_future()
                self._pinged.append(pong)
                await self._listening.send_command("PING")
                await pong
            finally:
                timer.cancel()
            await asyncio.sleep(PING_INTERVAL)

    async def aclose(self) -> None:
        self._ended = True
        if not self.gone.is_set():
            self._give_up(RedisConnectionError("the connection was closed"))
        for wire in self._wires:
            wire.abort()
        await self._tasks.aclose()
        for connection in (self._publishing, self._listening):
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_GRACE):
                    await connection.disconnect(nowait=True)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
