"""The one connection of this process with the servers: made, watched, made again, and shared by all links and events.

Whenever it breaks, the library's client is thrown away with everything that was not sent, and a new one is made. So
nothing of an earlier connection is ever sent over a later one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import nats.errors
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.errors import CannotConnect, ConfigError, Disconnected, DynamoError, Unavailable
from dynamo_core.tasks import TaskSet
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as LibrarySubscription

from dynamo_plugin_transport_nats.config import NatsConfig
from dynamo_plugin_transport_nats.security import Login, NotEncrypted

log = logging.getLogger(__name__)

#: Seconds of the first pause before connecting again; it doubles up to `reconnect_wait`. Each is varied by half.
RETRY_FIRST = 0.05

#: Seconds between two looks at whether the library has given the connection up without saying so.
CHECK = 0.25

#: Seconds between two pings of the server, and how many may stay without an answer.
PING_INTERVAL = 5
PINGS = 2

#: Seconds that a connection being closed may take to send what is left.
CLOSE_GRACE = 2.0

#: What the library takes as the largest message before a server has said so.
DEFAULT_PAYLOAD = 1024 * 1024


@dataclass(slots=True, eq=False)
class Subscription:
    """What arrives on a subject goes to `receive`, over whichever connection. Made by `Broker.subscribe`."""

    subject: str
    receive: Callable[[Msg], None]
    #: The library's, of the present connection.
    handle: LibrarySubscription | None = None
    session: _Session | None = None


@dataclass(slots=True, eq=False)
class _Session:
    """One connection."""

    client: Client
    #: All that was ever subscribed over it.
    handles: list[LibrarySubscription] = field(default_factory=list)
    #: Set when the library says that it is over.
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    #: What the library told of its end.
    reasons: list[Exception] = field(default_factory=list)
    #: Whether nothing more may be written.
    over: bool = False


class Broker:
    """The connection, as the rest of the plugin sees it.

    Raises:
        ConfigError: a file or key of the settings cannot be used.
    """

    def __init__(self, config: NatsConfig, metrics: MetricsScope) -> None:
        self._config = config
        self._login = Login(config)
        self._connected = metrics.gauge("dynamo_nats_connected", "Whether the NATS connection stands.").labels()
        self._disconnects = metrics.counter("dynamo_nats_disconnects_total", "Broken NATS connections.").labels()
        self._slow = metrics.counter(
            "dynamo_nats_dropped_messages_total", "Received messages dropped because too many waited to be read."
        ).labels()
        #: Whether so much waits to be sent that whoever can should wait.
        self.blocked = False
        self.writable = asyncio.Event()
        self.writable.set()
        #: Called when the connection has broken, with the reason; and when more may be sent after it was `blocked`.
        self.on_lost: list[Callable[[DynamoError], None]] = []
        self.on_writable: list[Callable[[], None]] = []
        self._servers = list(config.servers)
        self._subscriptions: set[Subscription] = set()
        self._session: _Session | None = None
        self._up = asyncio.Event()
        self._count = 0
        self._since = 0.0
        self._out: list[tuple[str, bytes, str]] = []
        self._waiting = 0
        self._wake = asyncio.Event()
        #: Set while nothing waits to be handed to the library.
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks = TaskSet()
        self._started = False
        self._closed = False

    # Its life.

    async def start(self) -> None:
        """Connects, and keeps connected from then on.

        Raises:
            ConfigError: the server refuses the login or does not offer what the settings ask for.
            CannotConnect: no server was reached in time.
        """
        self._started = True
        loop = asyncio.get_running_loop()
        until = loop.time() + self._config.start_timeout
        pause = RETRY_FIRST
        while True:
            try:
                session = await self._connect()
                break
            except ConfigError:
                raise
            except DynamoError as error:
                if loop.time() + pause > until:
                    raise CannotConnect(
                        f"no NATS server was reached within {self._config.start_timeout} s: {error}", cause=error
                    ) from error
                log.warning("waiting for a NATS server: %s", error)
            await asyncio.sleep(_varied(pause))
            pause = min(2 * pause, self._config.reconnect_wait)
        self._begin(session)
        self._tasks.spawn(self._keep(session), name="nats-connection")

    async def aclose(self) -> None:
        """Sends what waits, drains the subscriptions and closes. Safe twice, and without `start`."""
        if self._closed:
            return
        self._closed = True
        session = self._session
        if session is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_GRACE):
                    await self._idle.wait()
            session.over = True
        await self._tasks.aclose()
        self._lose(Disconnected("the transport is closed"))
        if session is not None:
            # Nobody is left who would take what still arrives: to drain is to have the server take what was sent.
            with suppress(TimeoutError, nats.errors.Error, OSError):
                async with asyncio.timeout(CLOSE_GRACE):
                    await _settle(session.client)
            await _discard(session)

    async def ready(self) -> None:
        """Returns once the connection stands.

        Raises:
            CannotConnect: the transport was not started, or is closed.
            Unavailable: it did not come back within `unavailable_wait`.
        """
        if self._up.is_set():
            return
        if self._closed or not self._started:
            raise CannotConnect("the transport is closed" if self._closed else "the transport was not started")
        try:
            async with asyncio.timeout(self._config.unavailable_wait):
                await self._up.wait()
        except TimeoutError:
            raise Unavailable("The message broker cannot be reached now, please retry later") from None

    @property
    def settling(self) -> bool:
        """Whether the connection came back so lately that others may still be on their way back."""
        if self._count < 2 or not self._up.is_set():
            return False
        return asyncio.get_running_loop().time() < self._since + self._config.unavailable_wait

    @property
    def connected(self) -> bool:
        """Whether the connection stands."""
        return self._session is not None

    # What it carries.

    @property
    def max_payload(self) -> int:
        """The largest message that the server takes, in bytes."""
        session = self._session
        return DEFAULT_PAYLOAD if session is None else session.client.max_payload

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        """Sends a message with the next write. Without a connection it is dropped: the numbering will tell."""
        if self._session is None:
            return
        self._out.append((subject, data, reply))
        self._waiting += len(data)
        self._idle.clear()
        self._wake.set()
        if self._waiting > self._config.write_high_water and not self.blocked:
            self.blocked = True
            self.writable.clear()

    async def subscribe(self, subject: str, receive: Callable[[Msg], None]) -> Subscription:
        """Gives everything that arrives on a subject to `receive`, until it is unsubscribed.

        When this returns the server knows; without a connection it will be told as soon as there is one.
        """
        subscription = Subscription(subject, receive)
        self._subscriptions.add(subscription)
        session = self._session
        if session is not None:
            # If it breaks meanwhile, the next connection has it.
            with suppress(nats.errors.Error, OSError, TimeoutError):
                async with asyncio.timeout(self._config.connect_timeout):
                    await self._attach(subscription, session)
                    await _settle(session.client)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Takes a subscription back. Safe twice."""
        self._subscriptions.discard(subscription)
        handle, subscription.handle = subscription.handle, None
        session = self._session
        if handle is not None and session is not None and subscription.session is session:
            self._tasks.spawn(_unsubscribe(handle), name=f"unsubscribe-{subscription.subject}")

    # Connecting.

    async def _connect(self) -> _Session:
        """A new connection with everything subscribed, to the first server that lets us.

        Raises:
            ConfigError: it refuses the login or does not offer TLS.
            CannotConnect: none was reached.
        """
        problem: DynamoError = CannotConnect("no server is known")
        random.shuffle(self._servers)
        for server in list(self._servers):
            session = _Session(Client())
            try:
                async with asyncio.timeout(self._config.connect_timeout):
                    await self._open(session, server)
                return session
            except BaseException as error:
                if self._session is session:
                    self._lose(Disconnected("the connection with the message broker broke", cause=error))
                await _discard(session)
                if not isinstance(error, Exception):
                    raise
                problem = _explained(error, server, session.reasons, self._config)
                if isinstance(problem, ConfigError):
                    raise problem from error
        raise problem

    async def _open(self, session: _Session, server: str) -> None:
        async def told(error: Exception) -> None:
            if isinstance(error, nats.errors.SlowConsumerError):
                self._slow.inc()
                return
            if not isinstance(error, (OSError, TimeoutError, nats.errors.Error)):
                log.error("a received message could not be handled", exc_info=error)
                return
            session.reasons = [*session.reasons[-9:], error]
            if isinstance(error, (OSError, nats.errors.StaleConnectionError)):
                session.gone.set()

        async def closed() -> None:
            session.gone.set()

        options, check = self._login.attempt()
        client = session.client
        await client.connect(
            [server],
            name="dynamo",
            error_cb=told,
            disconnected_cb=closed,
            closed_cb=closed,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=max(1, round(self._config.connect_timeout)),
            ping_interval=PING_INTERVAL,
            max_outstanding_pings=PINGS,
            pending_size=self._config.write_high_water,
            **options,
        )
        check()
        # One failed attempt of several addresses of a name is no end.
        session.gone.clear()
        # From here on messages arrive, and may have to be answered.
        self._session = session
        while pending := [known for known in self._subscriptions if known.session is not session]:
            for subscription in pending:
                await self._attach(subscription, session)
        await _settle(client)

    async def _attach(self, subscription: Subscription, session: _Session) -> None:
        async def receive(message: Msg) -> None:
            subscription.receive(message)

        subscription.session = session
        subscription.handle = await session.client.subscribe(
            subscription.subject,
            cb=receive,
            pending_msgs_limit=self._config.pending_messages,
            pending_bytes_limit=self._config.pending_mb * 1024 * 1024,
        )
        session.handles.append(subscription.handle)
        if subscription not in self._subscriptions:
            # It was taken back meanwhile.
            await _unsubscribe(subscription.handle)

    def _begin(self, session: _Session) -> None:
        known = set(self._servers)
        for found in session.client.discovered_servers:
            scheme = "tls" if self._config.wants_tls else "nats"
            address = f"{scheme}://{found.netloc}"
            if address not in known and f"nats://{found.netloc}" not in known:
                self._servers.append(address)
        self._count += 1
        self._since = asyncio.get_running_loop().time()
        self._connected.set(1)
        self._up.set()
        url = session.client.connected_url
        log.info("connected to NATS at %s", url.netloc if url is not None else "an unknown address")

    # Keeping it.

    async def _keep(self, session: _Session) -> None:
        while True:
            await self._hold(session)
            reason = session.reasons[-1] if session.reasons else None
            log.warning("the connection with NATS broke: %s", reason or "the server closed it")
            self._disconnects.inc()
            self._lose(Disconnected("the connection with the message broker broke", cause=reason))
            await _discard(session)
            session = await self._reconnect()
            self._begin(session)

    async def _hold(self, session: _Session) -> None:
        """Writes until the connection is gone."""
        writer = self._tasks.spawn(self._write(session), name="nats-writer")
        try:
            while not session.gone.is_set() and session.client.is_connected:
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK):
                        await session.gone.wait()
        finally:
            session.over = True
            writer.cancel()
            await asyncio.wait([writer])

    async def _reconnect(self) -> _Session:
        pause = RETRY_FIRST
        while True:
            # Also before the first attempt: a thousand processes have lost the same server in the same moment.
            await asyncio.sleep(_varied(pause))
            try:
                return await self._connect()
            except DynamoError as error:
                log.warning("NATS cannot be reached: %s", error)
            pause = min(2 * pause, self._config.reconnect_wait)

    async def _write(self, session: _Session) -> None:
        publish = session.client.publish
        low = self._config.write_high_water // 2
        try:
            while True:
                if not self._out:
                    self._idle.set()
                    self._wake.clear()
                    await self._wake.wait()
                out, self._out = self._out, []
                for subject, data, reply in out:
                    # Waits while the library holds too much that the socket does not take.
                    await publish(subject, data, reply)
                    if session.over:
                        # The library swallows the cancelling of a task that waits there.
                        return
                    self._waiting -= len(data)
                    if self.blocked and self._waiting <= low:
                        self._unblock()
        except (nats.errors.Error, OSError) as error:
            session.reasons.append(error)
            session.gone.set()

    def _unblock(self) -> None:
        self.blocked = False
        self.writable.set()
        for callback in self.on_writable:
            callback()

    def _lose(self, error: DynamoError) -> None:
        """The connection is gone, and so is everything that waited for it."""
        if self._session is None:
            return
        self._session = None
        self._up.clear()
        self._connected.set(0)
        self._out.clear()
        self._waiting = 0
        self._idle.set()
        for callback in self.on_lost:
            callback(error)
        self._unblock()


def _explained(error: Exception, server: str, told: list[Exception], config: NatsConfig) -> DynamoError:
    """Why a connection was not made, in one line; a `ConfigError` where trying again will not help."""
    if isinstance(error, NotEncrypted):
        return error
    place = urlsplit(server).netloc
    if isinstance(error, nats.errors.NoServersError) and told:
        error = told[-1]
    text = str(error).strip() or type(error).__name__
    if isinstance(error, ssl.SSLError):
        return ConfigError(
            f"transport.tls: no encrypted connection with {place}: {error.reason or text}; check `ca`, `cert` and "
            "`server_name` against the server's certificate",
            cause=error,
        )
    if isinstance(error, nats.errors.Error) and "authorization" in text.lower():
        ways = ("user", "token", "nkey", "credentials")
        used = next((name for name in ways if getattr(config, name) is not None), None)
        remedy = (
            f"check `{used}`" if used is not None else "set `user` and `password`, `token`, `nkey` or `credentials`"
        )
        return ConfigError(f"transport: {place} does not let us in ({text}): {remedy}", cause=error)
    if isinstance(error, TimeoutError):
        text = f"no connection within {config.connect_timeout} s"
    return CannotConnect(f"{place}: {text}", cause=error)


async def _settle(client: Client) -> None:
    """Returns when the server knows all subscriptions."""
    # The library writes a ping at once, but subscriptions in a later turn: only the second ping comes after them.
    await client.flush()
    await client.flush()


async def _unsubscribe(handle: LibrarySubscription) -> None:
    with suppress(nats.errors.Error, OSError):
        await handle.unsubscribe()


async def _discard(session: _Session) -> None:
    """Ends a client for good, whatever state it is in."""
    # The library first sends what waits, for which it would wait for ever on a network that swallows everything, and if
    # that fails it forgets the rest. There is no public way to give up the one, nor to make up for the other.
    client = session.client
    writer: Any = getattr(getattr(client, "_transport", None), "_io_writer", None)
    if writer is not None:
        writer.transport.abort()
    with suppress(Exception):
        async with asyncio.timeout(CLOSE_GRACE):
            await client.close()
    tasks: list[Any] = [getattr(handle, "_wait_for_msgs_task", None) for handle in session.handles]
    tasks += [getattr(client, name, None) for name in ("_reading_task", "_ping_interval_task", "_flusher_task")]
    theirs = [task for task in tasks if isinstance(task, asyncio.Task)]
    for task in theirs:
        task.cancel()
    if theirs:
        done, _ = await asyncio.wait(theirs, timeout=CLOSE_GRACE)
        for task in done:
            # Somebody has to take note of their errors, or else they are logged with a traceback.
            if not task.cancelled() and (error := task.exception()) is not None:
                log.debug("the connection ended with %s", error)


def _varied(seconds: float) -> float:
    # Not a secret: it keeps a thousand processes from coming back in the same moment.
    return seconds * random.uniform(0.5, 1.5)  # noqa: S311
