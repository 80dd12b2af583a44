"""Parts of the tests: a broker in this process, which does what real ones do, and loses what it is told to lose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from dynamo_core import DynamoError, MetricsScope
from dynamo_core.errors import CannotConnect
from dynamo_telemetry import Metrics
from dynamo_testing.transport.harness import Recorder
from dynamo_wire.brokered.addresses import Addresses
from dynamo_wire.brokered.broker import Broker, Listening, OutboundMessage, Session
from dynamo_wire.brokered.settings import BrokeredConfig
from dynamo_wire.brokered.transport import BrokeredTransport

WAIT = 10.0


class Office:
    """The broker's side: who listens where, and what becomes of messages."""

    def __init__(self) -> None:
        self.listenings: dict[str, list[Listening]] = {}
        #: Whether a message gets lost.
        self.loses: Callable[[OutboundMessage], bool] = lambda message: False
        #: What becomes of a message on its way.
        self.spoils: Callable[[OutboundMessage], OutboundMessage] = lambda message: message
        #: Letters are kept back while this is not set.
        self.delivers = asyncio.Event()
        self.delivers.set()
        self.messages: list[OutboundMessage] = []
        self.kept: list[OutboundMessage] = []
        self.open = True
        #: How attempts to connect go, if not at once.
        self.door: Callable[[], Awaitable[None]] | None = None
        #: Connections that were closed.
        self.closed = 0

    def take(self, message: OutboundMessage) -> None:
        self.messages.append(message)
        if self.loses(message):
            return
        message = self.spoils(message)
        if self.delivers.is_set():
            self._deliver(message)
        else:
            self.kept.append(message)

    def deliver_kept(self) -> None:
        self.delivers.set()
        kept, self.kept = self.kept, []
        for message in kept:
            self._deliver(message)

    def _deliver(self, message: OutboundMessage) -> None:
        there = list(self.listenings.get(message.address, ()))
        for listening in there:
            listening.receive(message.link, message.data, message.reply)
        if message.reply and not there:
            for listening in list(self.listenings.get(message.reply, ())):
                listening.listener.absent(message.link)


class OfficeSession(Session):
    def __init__(self, office: Office) -> None:
        super().__init__()
        self.office = office
        self.mine: list[Listening] = []

    @property
    def max_message(self) -> int:
        return 1024 * 1024

    async def connect(self) -> None:
        if self.office.door is not None:
            await self.office.door()
        if not self.office.open:
            raise ConnectionRefusedError("the office is closed")

    def explain(self, error: Exception) -> DynamoError:
        return CannotConnect(f"no office: {error}", cause=error)

    async def attach(self, listening: Listening) -> None:
        self.mine.append(listening)
        self.office.listenings.setdefault(listening.address, []).append(listening)

    async def detach(self, listening: Listening) -> None:
        if listening in self.mine:
            self.mine.remove(listening)
            there = self.office.listenings[listening.address]
            there[:] = [other for other in there if other is not listening]

    async def settle(self) -> None:
        await asyncio.sleep(0)

    async def write(self, messages: list[OutboundMessage]) -> None:
        loop = asyncio.get_running_loop()
        for message in messages:
            loop.call_soon(self.office.take, message)
        await asyncio.sleep(0)

    async def aclose(self) -> None:
        self.office.closed += 1
        for listening in list(self.mine):
            await self.detach(listening)


class OfficeBroker(Broker):
    SERVER = "Office"

    def __init__(self, config: BrokeredConfig, metrics: MetricsScope, office: Office) -> None:
        super().__init__(config, metrics)
        self.office = office
        self.session: OfficeSession | None = None

    @property
    def default_max_message(self) -> int:
        return 1024 * 1024

    @property
    def max_fragment(self) -> int:
        return 64 * 1024

    def attempts(self) -> Iterator[Session]:
        self.session = OfficeSession(self.office)
        yield self.session


class OfficeTransport(BrokeredTransport):
    NAME = "office"
    Config = BrokeredConfig

    def __init__(self, office: Office, metrics: Metrics, **options: Any) -> None:
        config = BrokeredConfig.model_validate(options)
        self.broker = OfficeBroker(config, metrics, office)
        super().__init__(config, metrics, self.broker, Addresses("test", "."))

    def break_connection(self) -> None:
        assert self.broker.session is not None
        self.broker.session.gone.set()


@pytest.fixture
def office() -> Office:
    return Office()


MakeTransport = Callable[..., Awaitable[OfficeTransport]]


@pytest.fixture
async def make_transport(office: Office) -> AsyncIterator[MakeTransport]:
    """Make transports that share the office, and close them at the end, the newest first."""
    made: list[OfficeTransport] = []

    async def make(metrics: Metrics | None = None, **options: Any) -> OfficeTransport:
        options = {"heartbeat": 0.2, "reconnect_wait": 0.2} | options
        transport = OfficeTransport(office, metrics or Metrics(), **options)
        made.append(transport)
        await transport.start()
        return transport

    yield make
    async with asyncio.timeout(WAIT):
        for transport in reversed(made):
            await transport.aclose()


@pytest.fixture
def recorder() -> type[Recorder]:
    """Make sinks."""
    return Recorder
