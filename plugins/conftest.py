"""What the tests of several plugins need."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from dynamo_core import PluginConfig
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_telemetry import Metrics


@pytest.fixture
async def directory() -> AsyncIterator[MemoryDiscovery]:
    """A directory of this process."""
    directory = MemoryDiscovery(PluginConfig(), Metrics())
    yield directory
    await directory.aclose()
