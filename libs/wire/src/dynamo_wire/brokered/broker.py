"""The process's connection with a broker: opened, watched, reopened, and shared by all links and events.

Whenever it breaks, it is thrown away with everything that was not sent, and a new one is made. So nothing of an earlier
connection is ever sent over a later one.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from dynamo_core import DynamoError, MetricsScope, TaskSet, pauses, wait_for_store
from dynamo_core.errors import CannotConnect, ConfigError, Disconnected, Unavailable

from dynamo_wire.brokered.settings import BrokeredConfig

log = logging.getLogger(__name__)

#: Seconds of the first pause before connecting again; it doubles up to `reconnect_wait`. Each is varied by half.
RETRY_FIRST = 0.05

#: Seconds between two looks at whether a connection was given up without a word.
CHECK = 0.25

#: Seconds that a connection being closed may take to send what is left.
CLOSE_GRACE = 2.0

#: Bytes that are given to a connection at a time.
BATCH = 64 * 1024

#: Turns of the loop in which what was published is written, unless much waits before it; and those that a library takes
#: from there to the socket.
WRITE_TURNS = 8
LIBRARY_TURNS = 2


class OutboundMessage(NamedTuple):
    """A message to be sent: its address, its link if any, and where to report that `address` has no listener."""

    address: str
    link: str
    data: bytes
    #: An own address, or nothing.
    reply: str


class Listener(Protocol):
    """Receives the messages of an address."""

    def receive(self, link: str, data: bytes, reply: str) -> None:
        """Receive a message, and the link it came over if any.

        `reply` is the address of a sender who asked for life.
        """

    def absent(self, link: str) -> None:
        """Record that the address of a message over this link, which asked for a report, has no listener."""


@dataclass(slots=True, eq=False)
class Listening:
    """A registration of `listener` for an address, over whichever connection. Made by `Broker.listen`."""

    address: str
    listener: Listener
    #: Whether it arrives over links.
    linked: bool
    #: What the present connection knows it by.
    handle: Any = None
    session: Session | None = None

    def receive(self, link: str, data: bytes, reply: str) -> None:
        """Hand on a message."""
        try:
            self.listener.receive(link, data, reply)
        except Exception:  # one message must not end the connection that carries all others
            log.exception("a received message could not be handled")


class Session(ABC):
    """One connection with a server, until it breaks."""

    def __init__(self) -> None:
        #: Set when it is over.
        self.gone = asyncio.Event()
        #: What was told of its end.
        self.reasons: list[Exception] = []
        #: Whether nothing more may be written.
        self.closing = False

    @property
    def alive(self) -> bool:
        """False if it was given up without a word."""
        return not self.gone.is_set()

    @property
    @abstractmethod
    def max_message(self) -> int:
        """The largest message that it takes, in bytes."""

    @abstractmethod
    async def connect(self) -> None:
        """Connect and log in. Raise what `explain` understands."""

    @abstractmethod
    def explain(self, error: Exception) -> DynamoError:
        """Return why it was not made, in one line; a `ConfigError` where trying again will not help."""

    @abstractmethod
    async def attach(self, listening: Listening) -> None:
        """Begin to listen at an address."""

    @abstractmethod
    async def detach(self, listening: Listening) -> None:
        """Listen there no more."""

    @abstractmethod
    async def settle(self) -> None:
        """Return when the server knows everything that was attached, and has all that was written."""

    @abstractmethod
    async def write(self, messages: list[OutboundMessage]) -> None:
        """Send; wait while too much waits for the network. Raise what `broken` names. End early if `closing`."""

    #: What `write`, `attach`, `detach` and `settle` raise when the connection breaks.
    broken: ClassVar[tuple[type[Exception], ...]] = (OSError,)

    @abstractmethod
    async def aclose(self) -> None:
        """End it for good, whatever state it is in, within a few seconds."""


class Broker(ABC):
    """The connection, as links and events see it."""

    #: What the server is called in messages, and in the names of metrics.
    SERVER: ClassVar[str]

    def __init__(self, config: BrokeredConfig, metrics: MetricsScope) -> None:
        self._config = config
        name = self.SERVER.lower()
        self._connected = metrics.gauge(
            f"dynamo_{name}_connected", f"1 while the process is connected with {self.SERVER}."
        ).labels()
        self._disconnects = metrics.counter(
            f"dynamo_{name}_disconnects_total", f"Connections with {self.SERVER} that broke."
        ).labels()
        self.damaged = metrics.counter(
            f"dynamo_{name}_damaged_messages_total",
            "Messages that did not arrive as they were sent; each ended its link.",
        ).labels()
        #: Whether the write buffer is full, so that senders have to wait.
        self.blocked = False
        self.writable = asyncio.Event()
        self.writable.set()
        #: Called when the connection has broken, with the reason; and when more may be sent after it was `blocked`.
        self.on_lost: list[Callable[[DynamoError], None]] = []
        self.on_writable: list[Callable[[], None]] = []
        self._listenings: set[Listening] = set()
        self._session: Session | None = None
        self._up = asyncio.Event()
        self._count = 0
        self._since = 0.0
        self._out: list[OutboundMessage] = []
        #: How many messages were published, and how many of them were written or dropped since.
        self._published = 0
        self._written = 0
        self._waiting = 0
        self._wake = asyncio.Event()
        #: Set while nothing waits to be written.
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks = TaskSet()
        self._started = False
        self._closed = False

    # What a plugin fills in.

    @abstractmethod
    def attempts(self) -> Iterable[Session]:
        """Return connections to be tried one after the other, not connected yet. The first that works is taken."""

    @property
    @abstractmethod
    def default_max_message(self) -> int:
        """The largest message that is assumed to be taken while there is no connection, in bytes."""

    @property
    def max_fragment(self) -> int:
        """The largest message that a link should make, in bytes; what is more goes in parts."""
        return self.max_message

    def another(self, metrics: MetricsScope) -> Broker | None:
        """Return a broker with the same settings, for a connection of its own in another thread.

        None if there can be none.
        """
        return None

    def begun(self, session: Session) -> None:
        """Record that this connection stands."""

    # Its life.

    async def start(self, tell: Callable[[str], object] = str) -> None:
        """Connect, and keep connected from then on. `tell` is given what it waits for, and "" in the end.

        Raises:
            ConfigError: the server refuses the login or does not offer what the settings ask for.
            CannotConnect: no server was reached in time.
        """
        self._started = True
        timeout = self._config.start_timeout
        session = await wait_for_store(
            self._connect,
            timeout=timeout,
            what=f"a {self.SERVER} server",
            unreachable=f"no {self.SERVER} server was reached within {timeout} s: {{}}",
            tell=tell,
        )
        self._begin(session)
        self._tasks.spawn(self._keep(session), name=f"{self.SERVER}-connection")

    async def aclose(self) -> None:
        """Send what waits and close. Safe twice, and without `start`."""
        if self._closed:
            return
        self._closed = True
        session = self._session
        if session is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_GRACE):
                    await self._idle.wait()
            session.closing = True
        await self._tasks.aclose()
        self._lose(Disconnected("the transport is closed"))
        if session is not None:
            # No listener is left: it is enough that the server has what was sent.
            with suppress(TimeoutError, *session.broken):
                async with asyncio.timeout(CLOSE_GRACE):
                    await session.settle()
            await session.aclose()

    async def ready(self) -> None:
        """Return once the connection stands.

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
    def max_message(self) -> int:
        """The largest message that the server takes, in bytes."""
        session = self._session
        return self.default_max_message if session is None else session.max_message

    def publish(self, address: str, data: bytes, *, link: str = "", reply: str = "") -> None:
        """Send a message with the next write. Without a connection it is dropped: the numbering will tell.

        With `reply`, an address of this process, its listener is told if `address` has none.
        """
        if self._session is None:
            return
        self._out.append(OutboundMessage(address, link, data, reply))
        self._published += 1
        self._waiting += len(data)
        self._idle.clear()
        self._wake.set()
        if self._waiting > self._config.write_high_water and not self.blocked:
            self.blocked = True
            self.writable.clear()

    async def written(self) -> None:
        """Return when what was published so far is in the socket, or after some turns of the loop."""
        published = self._published
        for _ in range(WRITE_TURNS):
            if self._written >= published:
                break
            await asyncio.sleep(0)
        for _ in range(LIBRARY_TURNS):
            await asyncio.sleep(0)

    async def listen(self, address: str, listener: Listener, *, linked: bool) -> Listening:
        """Give everything that arrives at an address to `listener`, until `ignore`.

        When this returns the server knows; without a connection it will be told as soon as there is one.
        """
        listening = Listening(address, listener, linked)
        self._listenings.add(listening)
        session = self._session
        if session is not None:
            # If it breaks meanwhile, the next connection has it.
            with suppress(TimeoutError, *session.broken):
                async with asyncio.timeout(self._config.connect_timeout):
                    await self._attach(listening, session)
                    await session.settle()
        return listening

    def ignore(self, listening: Listening) -> None:
        """Listen there no more. Safe twice."""
        self._listenings.discard(listening)
        session, listening.session = listening.session, None
        if session is not None and session is self._session:
            self._tasks.spawn(_detach(session, listening), name=f"ignore-{listening.address}")

    # Connecting.

    async def _connect(self) -> Session:
        """Return a new connection that listens to everything, with the first server that lets us.

        Raises:
            ConfigError: one refuses what the settings say.
            CannotConnect: none was reached.
        """
        problem: DynamoError = CannotConnect("no server is known")
        for session in self.attempts():
            try:
                async with asyncio.timeout(self._config.connect_timeout):
                    await session.connect()
                    # From here on messages arrive, and may have to be answered.
                    self._session = session
                    while pending := [known for known in self._listenings if known.session is not session]:
                        for listening in pending:
                            await self._attach(listening, session)
                    await session.settle()
                return session
            except BaseException as error:
                if self._session is session:
                    self._lose(Disconnected("the connection with the message broker broke", cause=error))
                await session.aclose()
                if not isinstance(error, Exception):
                    raise
                problem = session.explain(error)
                if isinstance(problem, ConfigError):
                    raise problem from error
        raise problem

    async def _attach(self, listening: Listening, session: Session) -> None:
        listening.session = session
        await session.attach(listening)
        if listening not in self._listenings:
            # It was taken back meanwhile.
            await _detach(session, listening)

    def _begin(self, session: Session) -> None:
        self._count += 1
        self._since = asyncio.get_running_loop().time()
        self._connected.set(1)
        self._up.set()
        self.begun(session)

    # Keeping it.

    async def _keep(self, session: Session) -> None:
        while True:
            await self._hold(session)
            reason = session.reasons[-1] if session.reasons else None
            log.warning("the connection with %s broke: %s", self.SERVER, reason or "the server closed it")
            self._disconnects.inc()
            self._lose(Disconnected("the connection with the message broker broke", cause=reason))
            await session.aclose()
            session = await self._reconnect()
            self._begin(session)

    async def _hold(self, session: Session) -> None:
        """Write until the connection is gone."""
        writer = self._tasks.spawn(self._write(session), name=f"{self.SERVER}-writer")
        try:
            while session.alive:
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK):
                        await session.gone.wait()
        finally:
            session.closing = True
            writer.cancel()
            # A library may swallow the cancelling and go on waiting for the network, until its connection is closed.
            await asyncio.wait([writer], timeout=CHECK)

    async def _reconnect(self) -> Session:
        retries, told = pauses(RETRY_FIRST, self._config.reconnect_wait), set[str]()
        while True:
            # Also before the first attempt: a thousand processes have lost the same server in the same moment.
            await asyncio.sleep(next(retries))
            try:
                session = await self._connect()
            except DynamoError as error:
                if str(error) not in told:
                    told.add(str(error))
                    log.warning("%s cannot be reached: %s", self.SERVER, error)
            else:
                if not self._closed:
                    return session
                await session.aclose()
            if self._closed:
                # A library may swallow the cancelling of an attempt that ends in the same moment, well or badly.
                raise asyncio.CancelledError

    async def _write(self, session: Session) -> None:
        low = self._config.write_high_water // 2
        try:
            while True:
                if not self._out:
                    self._idle.set()
                    self._wake.clear()
                    await self._wake.wait()
                out, self._out = self._out, []
                start, size = 0, 0
                for end, message in enumerate(out, 1):
                    size += len(message.data)
                    if size < BATCH and end < len(out):
                        continue
                    await session.write(out[start:end])
                    if session.closing:
                        return
                    self._waiting -= size
                    self._written += end - start
                    start, size = end, 0
                    if self.blocked and self._waiting <= low:
                        self._unblock()
        except session.broken as error:
            session.reasons.append(error)
            session.gone.set()

    def _unblock(self) -> None:
        self.blocked = False
        self.writable.set()
        for callback in self.on_writable:
            callback()

    def _lose(self, error: DynamoError) -> None:
        """Lose the connection, and everything that waited for it."""
        if self._session is None:
            return
        self._session = None
        self._up.clear()
        self._connected.set(0)
        self._out.clear()
        self._written = self._published
        self._waiting = 0
        self._idle.set()
        for callback in self.on_lost:
            callback(error)
        self._unblock()


async def _detach(session: Session, listening: Listening) -> None:
    with suppress(TimeoutError, *session.broken):
        await session.detach(listening)
