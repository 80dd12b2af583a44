"""The directory in memory keeps the promises of discovery."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from dynamo_core import PluginConfig
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_telemetry import Metrics
from dynamo_testing.discovery_kit import Directories, DiscoveryKit


class TestMemory(DiscoveryKit):
    @pytest.fixture
    async def directories(self) -> AsyncIterator[Directories]:
        directory = MemoryDiscovery(PluginConfig(), Metrics())
        await directory.start()
        yield Directories(one=directory, other=directory)
        await directory.aclose()
