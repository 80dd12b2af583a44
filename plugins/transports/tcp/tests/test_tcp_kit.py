"""The kits for transports and event planes, on loopback, with a wire between the two ends that can fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import pytest
from dynamo_core import PluginConfig, Served, Transport
from dynamo_core.protocol import Instance
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_plugin_transport_tcp.address import Address
from dynamo_plugin_transport_tcp.transport import TcpTransport
from dynamo_telemetry import Metrics
from dynamo_testing.events_kit import EventPlanes, EventsKit
from dynamo_testing.faults import Direction, FaultProxy, HalfOpen, Raw
from dynamo_testing.transport.hanging import HangChecks
from dynamo_testing.transport_kit import Planes, TransportKit

SECRET = "sixteen or more characters"

#: Deadlines that do not end a call before the checks of workers that hang do.
PATIENT = {"connect_timeout": 60, "accept_timeout": 60, "heartbeat": 0.2}


class TestTcp(TransportKit):
    """Without a wire between, with a secret."""

    QUICK_LOOP: ClassVar[str] = "uvloop"
    ITEM_LIMIT: ClassVar[int | None] = 2 * 1024 * 1024

    @pytest.fixture
    async def planes(self, make_transport: Callable[..., TcpTransport]) -> Planes:
        server, client = (make_transport(secret=SECRET, max_frame_mb=2) for _ in range(2))
        return Planes(server=server, client=client)


class TestTcpThatHangs(HangChecks):
    """Through a proxy, so that a connection may carry one way only."""

    QUICK_LOOP: ClassVar[str] = "uvloop"
    CAN_SERVE_ELSEWHERE: ClassVar[bool] = True
    CAN_GO_DEAF: ClassVar[bool] = True

    @pytest.fixture
    async def planes(self, make_transport: Callable[..., TcpTransport]) -> AsyncIterator[Planes]:
        server, client = (make_transport(**PATIENT) for _ in range(2))
        async with FaultProxy("127.0.0.1", 1, framing=Raw()) as self.proxy:

            def through_the_proxy(instance_id: int, served: Served) -> Instance:
                address = Address.parse(served.address["tcp"])
                self.proxy.target = address.host, address.port
                there = Address(self.proxy.host, self.proxy.port, address.nonce)
                return Instance(instance_id=instance_id, address={"tcp": str(there)})

            yield Planes(server=server, client=client, instance=through_the_proxy)

    async def go_deaf(self, planes: Planes) -> None:
        await self.proxy.plan.inject(HalfOpen(), direction=Direction.DOWN, connection=0).hit()

    def serves_elsewhere(self, planes: Planes) -> tuple[type[Transport], dict[str, Any]]:
        return TcpTransport, {}


@pytest.mark.full
class TestTcpThatHangsEncrypted(HangChecks):
    """With TLS and a secret; probes are plain."""

    CAN_SERVE_ELSEWHERE: ClassVar[bool] = True

    @pytest.fixture
    async def planes(self, make_transport: Callable[..., TcpTransport], encrypted: dict[str, Any]) -> Planes:
        self.settings = encrypted | {"secret": SECRET}
        server, client = (make_transport(**PATIENT, **self.settings) for _ in range(2))
        return Planes(server=server, client=client)

    def serves_elsewhere(self, planes: Planes) -> tuple[type[Transport], dict[str, Any]]:
        return TcpTransport, self.settings


class TestTcpOverAWire(TransportKit):
    QUICK_LOOP: ClassVar[str] = "asyncio"
    CAN_BREAK_CONNECTION: ClassVar[bool] = True
    CAN_LOSE_AN_ITEM: ClassVar[bool] = True

    @pytest.fixture
    async def planes(self, make_transport: Callable[..., TcpTransport], make_wire: Callable[[], Any]) -> Planes:
        server, client = make_transport(), make_transport()
        self.wire = await make_wire()

        def through_the_wire(instance_id: int, served: Served) -> Instance:
            self.wire.target = Address.parse(served.address["tcp"])
            return Instance(instance_id=instance_id, address={"tcp": str(self.wire.address)})

        return Planes(server=server, client=client, instance=through_the_wire)

    async def break_connection(self, planes: Planes) -> None:
        self.wire.cut()

    async def lose_an_item(self, planes: Planes) -> None:
        self.wire.lose_a_row = True


class TestTcpEvents(EventsKit):
    PEER_TO_PEER: ClassVar[bool] = True
    EVENT_LIMIT: ClassVar[int | None] = 1024 * 1024

    @pytest.fixture
    async def events(self, make_transport: Callable[..., TcpTransport]) -> AsyncIterator[EventPlanes]:
        sender, receiver = make_transport(), make_transport(max_frame_mb=1)
        directory = MemoryDiscovery(PluginConfig(), Metrics())
        yield EventPlanes(sender.events(), receiver.events(), directory, sender.aclose, receiver.aclose)
        await directory.aclose()
