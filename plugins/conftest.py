"""What the tests of several plugins need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from dynamo_core import PluginConfig
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_telemetry import Metrics


async def until(condition: Callable[[], object]) -> None:
    """Wait for what no event tells, and fail if it does not come."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def directory() -> AsyncIterator[MemoryDiscovery]:
    """Yield a directory of this process."""
    directory = MemoryDiscovery(PluginConfig(), Metrics())
    yield directory
    await directory.aclose()
