"""The kit for transports over a message broker: what the kit for all transports cannot know, against a real server.

An author subclasses `BrokerBench` once, and writes two fixtures in ``conftest.py``: `bench`, an open bench, and
`directory`, any discovery. The whole test file::

    class TestMine(BrokeredTransportKit): ...
    class TestMineDirect(DirectKit): ...
    class TestMineOverAWire(WireKit): ...
    class TestMineThatHangs(BrokeredHangChecks): ...
    class TestMineDamaged(BrokeredDamageChecks): ...
    class TestMyEvents(BrokeredEventsKit): ...

It needs dynamo-wire, of which such a transport is made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

from dynamo_core.contracts.discovery import Discovery
from dynamo_core.contracts.transports.transport import Transport

from dynamo_testing.brokered.absence import AbsenceChecks
from dynamo_testing.brokered.bench import BrokerBench, BrokerServer
from dynamo_testing.brokered.closing import ClosingChecks
from dynamo_testing.brokered.events import EventChecks
from dynamo_testing.brokered.losses import LossChecks
from dynamo_testing.brokered.outages import OutageChecks
from dynamo_testing.brokered.rows import RowChecks
from dynamo_testing.events_kit import EventPlanes, EventsKit
from dynamo_testing.faults import Direction, Drop, HalfOpen
from dynamo_testing.optional_packages import pytest
from dynamo_testing.servers.server_process import server_binary
from dynamo_testing.transport.damage import TEXT, DamageChecks, Damaged, speak
from dynamo_testing.transport.handlers import at
from dynamo_testing.transport.hanging import HangChecks
from dynamo_testing.transport_kit import Planes, TransportKit

__all__ = [
    "BrokerBench",
    "BrokerServer",
    "BrokeredDamageChecks",
    "BrokeredEventsKit",
    "BrokeredHangChecks",
    "BrokeredTransportKit",
    "DirectKit",
    "WireKit",
    "server_binary",
]

#: Settings with which clients notice damage soon: most of the time they wait for deadlines.
QUICK = {"heartbeat": 0.05, "silence": 0.5, "accept_timeout": 0.5, "reconnect_wait": 0.05, "unavailable_wait": 2}
#: Clients that are damaged at a time.
CLIENTS = 40


class BrokeredTransportKit(RowChecks, AbsenceChecks, LossChecks, OutageChecks, ClosingChecks, EventChecks):
    """All checks of transports over a broker that `TransportKit` does not have."""


class DirectKit(TransportKit):
    """`TransportKit` with two transports at one server."""

    ITEM_LIMIT: ClassVar[int | None] = 2 * 1024 * 1024

    @pytest.fixture
    async def planes(self, bench: BrokerBench) -> Planes:
        server, client = await bench.pair(max_message_mb=2)
        return Planes(server=server, client=client)


class WireKit(TransportKit):
    """`TransportKit` with a wire between the client and the server that can fail."""

    CAN_BREAK_CONNECTION: ClassVar[bool] = True
    CAN_LOSE_AN_ITEM: ClassVar[bool] = True

    @pytest.fixture
    async def planes(self, bench: BrokerBench) -> Planes:
        self.bench, self.wire = bench, await bench.wire()
        return Planes(server=await bench.transport(), client=await bench.transport(self.wire))

    async def break_connection(self, planes: Planes) -> None:
        self.wire.cut()

    async def lose_an_item(self, planes: Planes) -> None:
        self.wire.plan.inject(Drop(), direction=Direction.DOWN, when=self.bench.carries_rows)


class BrokeredHangChecks(HangChecks):
    """`HangChecks` with a wire between the client and the server."""

    CAN_SERVE_ELSEWHERE: ClassVar[bool] = True
    CAN_GO_DEAF: ClassVar[bool] = True

    @pytest.fixture
    async def planes(self, bench: BrokerBench) -> Planes:
        self.bench, self.wire = bench, await bench.wire(raw=True)
        server = await bench.transport(accept_timeout=60)
        return Planes(server=server, client=await bench.transport(self.wire, accept_timeout=60))

    async def go_deaf(self, planes: Planes) -> None:
        connection = self.bench.RECEIVING_CONNECTION
        await self.wire.plan.inject(HalfOpen(), direction=Direction.DOWN, connection=connection).hit()

    def serves_elsewhere(self, planes: Planes) -> tuple[type[Transport], dict[str, Any]]:
        return self.bench.TRANSPORT, self.bench.reaches(self.bench.shared.port) | {"prefix": self.bench.prefix}


class BrokeredDamageChecks(DamageChecks):
    """`DamageChecks` with a wire between the clients and the server."""

    @pytest.fixture
    async def damaged(self, bench: BrokerBench) -> Damaged:
        server, wire = await bench.transport(**QUICK), await bench.wire(raw=True)
        instance = at(await server.serve(7, TEXT, speak))
        return Damaged([await bench.transport(wire, **QUICK) for _ in range(CLIENTS)], instance, wire.plan)


class BrokeredEventsKit(EventsKit):
    """`EventsKit` with a server that can be killed, and comes back empty."""

    CAN_BREAK_CONNECTION: ClassVar[bool] = True
    #: Settings of the server, such as the largest message.
    SERVER: ClassVar[tuple[str, ...]] = ()

    @pytest.fixture
    async def events(self, bench: BrokerBench, directory: Discovery) -> AsyncIterator[EventPlanes]:
        self.server = bench.server(*self.SERVER)
        sender, receiver = await bench.pair(self.server)
        yield EventPlanes(sender.events(), receiver.events(), directory, sender.aclose, receiver.aclose)

    async def break_connection(self, events: EventPlanes) -> None:
        self.server.kill()
        self.server.start()
