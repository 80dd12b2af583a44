"""The transport within one process keeps the promises of transports."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from dynamo_core import PluginConfig
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_plugin_transport_inproc.transport import InprocTransport
from dynamo_telemetry import Metrics
from dynamo_testing.events_kit import EventPlanes, EventsKit
from dynamo_testing.transport_kit import Planes, TransportKit


class TestInproc(TransportKit):
    @pytest.fixture
    async def planes(self) -> AsyncIterator[Planes]:
        transport = InprocTransport(PluginConfig(), Metrics())
        await transport.start()
        yield Planes(server=transport, client=transport)
        await transport.aclose()


class TestInprocEvents(EventsKit):
    @pytest.fixture
    async def events(self) -> AsyncIterator[EventPlanes]:
        transport = InprocTransport(PluginConfig(), Metrics())
        directory = MemoryDiscovery(PluginConfig(), Metrics())
        yield EventPlanes(transport.events(), transport.events(), directory)
        await transport.aclose()
        await directory.aclose()
