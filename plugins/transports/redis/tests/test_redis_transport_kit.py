"""The kits for transports and event planes, on a real server, with a wire to it that can fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import msgspec
import pytest
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.transport import Transport
from dynamo_core.telemetry.metrics import Metrics
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_plugin_transport_redis.transport import RedisTransport
from dynamo_testing.events_kit import EventPlanes, EventsKit
from dynamo_testing.faults import Direction, Drop, HalfOpen
from dynamo_testing.transport.hanging import HangChecks
from dynamo_testing.transport_kit import Planes, TransportKit
from dynamo_wire import ROWS_TAG


def carries_rows(body: bytes) -> bool:
    """Whether a payload is a fragment with rows in it."""
    try:
        _, _, fragment = body.removesuffix(b"\r\n").split(b" ", 2)
        _, _, messages, *_ = msgspec.msgpack.decode(fragment)
        return any(message[0] == ROWS_TAG for message in msgspec.msgpack.decode(messages))
    except (msgspec.MsgspecError, ValueError, TypeError):
        return False


class TestRedis(TransportKit):
    ITEM_LIMIT: ClassVar[int | None] = 2 * 1024 * 1024

    @pytest.fixture
    async def planes(self, make_transport: Callable[..., Any]) -> Planes:
        return Planes(server=await make_transport(max_message_mb=2), client=await make_transport(max_message_mb=2))


class TestRedisOverAWire(TransportKit):
    CAN_BREAK_CONNECTION: ClassVar[bool] = True
    CAN_LOSE_AN_ITEM: ClassVar[bool] = True

    @pytest.fixture
    async def planes(self, make_transport: Callable[..., Any], make_wire: Callable[[], Any]) -> Planes:
        self.wire = await make_wire()
        server = await make_transport()
        client = await make_transport(url=f"redis://127.0.0.1:{self.wire.port}")
        return Planes(server=server, client=client)

    async def break_connection(self, planes: Planes) -> None:
        self.wire.cut()

    async def lose_an_item(self, planes: Planes) -> None:
        self.wire.plan.inject(Drop(), direction=Direction.DOWN, when=carries_rows)


class TestRedisThatHangs(HangChecks):
    """The client reaches the server through a wire."""

    CAN_SERVE_ELSEWHERE: ClassVar[bool] = True
    CAN_GO_DEAF: ClassVar[bool] = True

    @pytest.fixture
    async def planes(
        self, make_transport: Callable[..., Any], make_wire: Callable[..., Any], redis_server: Any, prefix: str
    ) -> Planes:
        self.server, self.prefix, self.wire = redis_server, prefix, await make_wire(raw=True)
        server = await make_transport(accept_timeout=60)
        client = await make_transport(accept_timeout=60, url=f"redis://127.0.0.1:{self.wire.port}")
        return Planes(server=server, client=client)

    async def go_deaf(self, planes: Planes) -> None:
        # The connection that listens is made after the one that publishes.
        await self.wire.plan.inject(HalfOpen(), direction=Direction.DOWN, connection=1).hit()

    def serves_elsewhere(self, planes: Planes) -> tuple[type[Transport], dict[str, Any]]:
        return RedisTransport, {"url": self.server.url, "prefix": self.prefix}


class TestRedisEvents(EventsKit):
    @pytest.fixture
    async def events(self, make_transport: Callable[..., Any]) -> AsyncIterator[EventPlanes]:
        sender, receiver = await make_transport(), await make_transport()
        directory = MemoryDiscovery(PluginConfig(), Metrics())
        yield EventPlanes(sender.events(), receiver.events(), directory)
        await directory.aclose()
