"""The connection with the NATS servers; see `dynamo_wire.brokered.broker`."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar
from urllib.parse import urlsplit

import nats.errors
from dynamo_core import CounterLike, DynamoError, MetricsScope, quote_greeting, read_greeting
from dynamo_core.errors import CannotConnect, ConfigError
from dynamo_wire.brokered import CLOSE_GRACE, Broker, Listening, OutboundMessage, Session
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from dynamo_plugin_transport_nats.config import NatsConfig
from dynamo_plugin_transport_nats.security import Login

log = logging.getLogger(__name__)

#: Seconds between two pings of the server, and how many may stay without an answer.
PING_INTERVAL = 5
PINGS = 2

#: What the library takes as the largest message before a server has said so.
DEFAULT_PAYLOAD = 1024 * 1024

#: The port of an address that names none, and how every server begins.
DEFAULT_PORT = 4222
GREETING = b"INFO "

#: The header with which a server answers for a subject without subscribers.
STATUS = "Status"
NO_RESPONDERS = "503"


class NatsBroker(Broker):
    """One connection with any of the servers.

    Raises:
        ConfigError: a file or key of the settings cannot be used.
    """

    SERVER = "NATS"

    def __init__(self, config: NatsConfig, metrics: MetricsScope) -> None:
        super().__init__(config, metrics)
        self._settings = config
        self._login = Login(config)
        self._dropped = metrics.counter(
            "dynamo_nats_dropped_messages_total",
            "Messages that were received and dropped, as too many waited to be read.",
        ).labels()
        self._servers = list(config.servers)

    @property
    def default_max_message(self) -> int:
        return DEFAULT_PAYLOAD

    def attempts(self) -> Iterator[Session]:
        random.shuffle(self._servers)
        for server in list(self._servers):
            # A server that has served before is known to be one of NATS.
            yield _NatsSession(server, self._settings, self._login, self._dropped, known=self._count > 0)

    def another(self, metrics: MetricsScope) -> NatsBroker:
        return NatsBroker(self._settings, metrics)

    def begun(self, session: Session) -> None:
        """Learn of unknown servers from the known ones."""
        assert isinstance(session, _NatsSession)  # noqa: S101 - it comes from `attempts`
        client = session.client
        known = set(self._servers)
        for found in client.discovered_servers:
            scheme = "tls" if self._settings.wants_tls else "nats"
            address = f"{scheme}://{found.netloc}"
            if address not in known and f"nats://{found.netloc}" not in known:
                self._servers.append(address)
        url = client.connected_url
        log.info("connected to NATS at %s", url.netloc if url is not None else "an unknown address")


class _NatsSession(Session):
    """One of the library's clients, which is thrown away when its connection breaks.

    A link is the last two words of a subject: ``<address>.<caller>.<number>``.
    """

    #: The last is how uvloop says that a connection has been closed.
    broken: ClassVar[tuple[type[Exception], ...]] = (nats.errors.Error, OSError, RuntimeError)

    def __init__(self, server: str, config: NatsConfig, login: Login, dropped: CounterLike, *, known: bool) -> None:
        super().__init__()
        self.client = Client()
        self._known = known
        self._server = server
        self._config = config
        self._login = login
        self._dropped = dropped
        #: The deadlines of waits for an answer.
        self._waits: set[asyncio.Timeout] = set()
        #: All that was ever subscribed over it.
        self._subscriptions: list[Subscription] = []

    @property
    def alive(self) -> bool:
        # What the library cannot read ends the task that reads, and the library goes on as if nothing were wrong.
        reading: asyncio.Task[None] | None = getattr(self.client, "_reading_task", None)
        return not self.gone.is_set() and self.client.is_connected and not (reading is not None and reading.done())

    @property
    def max_message(self) -> int:
        return self.client.max_payload

    async def connect(self) -> None:
        async def closed() -> None:
            self._broken()

        if not self._known:
            await self._check_greeting()
        options, check = self._login.attempt()
        await self.client.connect(
            [self._server],
            name="dynamo",
            error_cb=self._on_library_error,
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
        self.gone.clear()

    async def _check_greeting(self) -> None:
        """Check the greeting. The library waits for one, and reports that of another protocol as empty."""
        address = urlsplit(self._server)
        words = await read_greeting(address.hostname or "", address.port or DEFAULT_PORT)
        if words and not words.startswith(GREETING):
            raise ConfigError(
                f"transport.servers: this is no NATS server: {address.netloc} says {quote_greeting(words)}; "
                "name the port where NATS clients connect"
            )

    async def _on_library_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self._dropped.inc()
            return
        self.reasons = [*self.reasons[-9:], error]
        if isinstance(error, (OSError, nats.errors.StaleConnectionError)):
            self._broken()

    def explain(self, error: Exception) -> DynamoError:
        if isinstance(error, ConfigError):
            return error
        place = urlsplit(self._server).netloc
        if isinstance(error, nats.errors.NoServersError) and self.reasons:
            error = self.reasons[-1]
        text = str(error).strip() or type(error).__name__
        if isinstance(error, ssl.SSLError):
            return ConfigError(
                f"transport.tls: no encrypted connection with {place}: {error.reason or text}; check `ca`, `cert` and "
                "`server_name` against the server's certificate",
                cause=error,
            )
        if isinstance(error, nats.errors.Error) and "authorization" in text.lower():
            ways = ("user", "token", "nkey", "credentials")
            used = next((name for name in ways if getattr(self._config, name) is not None), None)
            remedy = (
                f"check `{used}`" if used is not None else "set `user` and `password`, `token`, `nkey` or `credentials`"
            )
            return ConfigError(f"transport: {place} does not let us in ({text}): {remedy}", cause=error)
        if isinstance(error, TimeoutError):
            text = f"no connection within {self._config.connect_timeout} s"
        return CannotConnect(f"{place}: {text}", cause=error)

    async def attach(self, listening: Listening) -> None:
        async def receive(message: Msg) -> None:
            link = ".".join(message.subject.rsplit(".", 2)[-2:]) if listening.linked else ""
            if message.headers is not None and message.headers.get(STATUS) == NO_RESPONDERS:
                listening.listener.absent(link)
            else:
                listening.receive(link, message.data, message.reply.removesuffix(f".{link}"))

        subject = f"{listening.address}.*.*" if listening.linked else listening.address
        subscription = await self.client.subscribe(
            subject,
            cb=receive,
            pending_msgs_limit=self._config.pending_messages,
            pending_bytes_limit=self._config.pending_mb * 1024 * 1024,
        )
        listening.handle = subscription
        self._subscriptions.append(subscription)

    async def detach(self, listening: Listening) -> None:
        subscription, listening.handle = listening.handle, None
        if subscription is not None:
            await subscription.unsubscribe()

    async def settle(self) -> None:
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                # The library writes a ping at once, but subscriptions in a later turn: only the second ping comes after
                # them.
                await self.client.flush()
                await self.client.flush()
        except TimeoutError:
            if not self.gone.is_set():
                raise
        finally:
            self._waits.discard(wait)
        # Then the library may also have done without an answer.
        if not self.alive:
            raise nats.errors.ConnectionClosedError

    def _broken(self) -> None:
        self.gone.set()
        # The library would go on waiting for answers that will not come.
        for wait in self._waits:
            wait.reschedule(0.0)
        self._waits.clear()

    async def write(self, messages: list[OutboundMessage]) -> None:
        publish = self.client.publish
        for address, link, data, reply in messages:
            # Waits while the library holds too much that the socket does not take.
            if link:
                await publish(f"{address}.{link}", data, f"{reply}.{link}" if reply else "")
            else:
                await publish(address, data)
            if self.closing:
                # The library swallows the cancelling of a task that waits there.
                return

    async def aclose(self) -> None:
        # The library first sends what waits, for which it would wait for ever on a network that swallows everything,
        # and if that fails it forgets the rest. There is no public way to give up the one, or to make up for the other.
        client = self.client
        writer: Any = getattr(getattr(client, "_transport", None), "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        with suppress(Exception):
            async with asyncio.timeout(CLOSE_GRACE):
                await client.close()
        tasks: list[Any] = [getattr(known, "_wait_for_msgs_task", None) for known in self._subscriptions]
        tasks += [getattr(client, name, None) for name in ("_reading_task", "_ping_interval_task", "_flusher_task")]
        theirs = [task for task in tasks if isinstance(task, asyncio.Task)]
        for task in theirs:
            task.cancel()
        if theirs:
            done, _ = await asyncio.wait(theirs, timeout=CLOSE_GRACE)
            for task in done:
                # An error that no code reads is logged with a traceback.
                if not task.cancelled() and (error := task.exception()) is not None:
                    log.debug("the connection ended with %s", error)
