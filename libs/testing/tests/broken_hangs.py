"""Transports that cannot tell a dead worker from a busy one, and what of the kit must find it.

Not collected with the other tests: `test_kits_on_broken_parts` runs this file and compares.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from dynamo_core import Endpoint, Handler, Served, ServedContext, Transport
from dynamo_core.protocol import Instance
from dynamo_plugin_transport_tcp.address import Address
from dynamo_plugin_transport_tcp.config import TcpConfig
from dynamo_plugin_transport_tcp.transport import TcpTransport
from dynamo_telemetry import Metrics
from dynamo_testing.faults import Direction, FaultProxy, HalfOpen, Raw
from dynamo_testing.transport.hanging import HangChecks
from dynamo_testing.transport_kit import Planes


class Broken(HangChecks):
    """The checks over tcp, through a wire that may carry one way only."""

    CAN_SERVE_ELSEWHERE: ClassVar[bool] = True
    CAN_GO_DEAF: ClassVar[bool] = True

    #: What serves the calls of the other process.
    server: ClassVar[type[TcpTransport]] = TcpTransport
    #: The checks that must fail, and no others may.
    FAILS: ClassVar[frozenset[str]] = frozenset()
    #: The seconds that a check waits which must fail, and any other.
    PATIENCE = (3.0, 15.0)

    @pytest.fixture(autouse=True)
    def path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # The other process imports this file.
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    @pytest.fixture
    async def planes(self) -> AsyncIterator[Planes]:
        config = TcpConfig(connect_timeout=60, accept_timeout=60, heartbeat=0.2)
        one, other = (TcpTransport(config, Metrics()) for _ in range(2))
        async with FaultProxy("127.0.0.1", 1, framing=Raw()) as self.proxy:

            def through_the_proxy(instance_id: int, served: Served) -> Instance:
                address = Address.parse(served.address["tcp"])
                self.proxy.target = address.host, address.port
                there = Address(self.proxy.host, self.proxy.port, address.nonce)
                return Instance(instance_id=instance_id, address={"tcp": str(there)})

            yield Planes(server=one, client=other, instance=through_the_proxy)
            await other.aclose()
            await one.aclose()

    async def go_deaf(self, planes: Planes) -> None:
        await self.proxy.plan.inject(HalfOpen(), direction=Direction.DOWN, connection=0).hit()

    def serves_elsewhere(self, planes: Planes) -> tuple[type[Transport], dict[str, Any]]:
        return self.server, {}


class TestWithoutAFault(Broken):
    pass


class TestTakesTheBusyForDead(Broken):
    @pytest.fixture(autouse=True)
    def nobody_is_busy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def probe(*where: Any) -> None:
            return None

        monkeypatch.setattr("dynamo_plugin_transport_tcp.calling.probe", probe)

    FAILS = frozenset({"test_a_worker_with_a_busy_event_loop_is_not_given_up"})


class TestTakesTheDeadForBusy(Broken):
    @pytest.fixture(autouse=True)
    def everyone_is_busy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def probe(*where: Any) -> float:
            return 1.0

        monkeypatch.setattr("dynamo_plugin_transport_tcp.calling.probe", probe)

    FAILS = frozenset(
        {
            "test_a_frozen_worker_is_given_up_in_every_phase_of_a_call",
            "test_a_worker_that_is_frozen_while_its_event_loop_is_busy_is_given_up",
            "test_a_call_is_accepted_before_its_handler_can_hold_the_event_loop",
            "test_a_connection_that_carries_nothing_back_is_given_up",
        }
    )


class AcceptsWithTheFirstItem(TcpTransport):
    """Accepts a call once there is something to send."""

    async def serve(self, instance_id: int, endpoint: Endpoint, handler: Handler) -> Served:
        async def late(request: Any, ctx: ServedContext) -> AsyncGenerator[Any, None]:
            items = await handler(request, ctx)
            first = await anext(items)

            async def all_of_them() -> AsyncGenerator[Any, None]:
                yield first
                async for item in items:
                    yield item

            return all_of_them()

        return await super().serve(instance_id, endpoint, late)


class TestAcceptsWithTheFirstItem(Broken):
    server = AcceptsWithTheFirstItem

    FAILS = frozenset(
        {
            "test_a_call_is_accepted_before_its_handler_can_hold_the_event_loop",
            # One of its calls waits for its first item.
            "test_a_frozen_worker_is_given_up_in_every_phase_of_a_call",
        }
    )
