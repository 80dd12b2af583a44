"""The kits for transports and event planes, on everything but a real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

import msgspec
import pytest
from dynamo_core import PluginConfig
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_telemetry import Metrics
from dynamo_testing.events_kit import EventPlanes, EventsKit
from dynamo_testing.transport_kit import Planes, TransportKit
from dynamo_wire.brokered.broker import OutboundMessage
from dynamo_wire.messages import ROWS_TAG


def carries_rows(message: OutboundMessage) -> bool:
    """Return whether a message is a fragment with rows in it."""
    try:
        _, _, messages, *_ = msgspec.msgpack.decode(message.data)
        return any(message[0] == ROWS_TAG for message in msgspec.msgpack.decode(messages))
    except (msgspec.MsgspecError, ValueError, TypeError):
        return False


class TestBrokered(TransportKit):
    CAN_BREAK_CONNECTION: ClassVar[bool] = True
    CAN_LOSE_AN_ITEM: ClassVar[bool] = True
    ITEM_LIMIT: ClassVar[int | None] = 2 * 1024 * 1024

    @pytest.fixture
    async def planes(self, make_transport: Any, office: Any) -> Planes:
        self.office = office
        return Planes(server=await make_transport(max_message_mb=2), client=await make_transport(max_message_mb=2))

    async def break_connection(self, planes: Planes) -> None:
        client: Any = planes.client
        client.break_connection()

    async def lose_an_item(self, planes: Planes) -> None:
        lost: list[OutboundMessage] = []

        def loses(message: OutboundMessage) -> bool:
            if lost or not carries_rows(message):
                return False
            lost.append(message)
            return True

        self.office.loses = loses


class TestBrokeredEvents(EventsKit):
    @pytest.fixture
    async def events(self, make_transport: Any) -> AsyncIterator[EventPlanes]:
        sender, receiver = await make_transport(), await make_transport()
        directory = MemoryDiscovery(PluginConfig(), Metrics())
        yield EventPlanes(sender.events(), receiver.events(), directory)
        await directory.aclose()
