"""What the kits of transports and events do not ask of the transport within one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from dynamo_core import Endpoint, PluginConfig, ServedContext
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_plugin_transport_inproc.events import InprocEvents
from dynamo_plugin_transport_inproc.transport import InprocTransport
from dynamo_telemetry import Metrics

COUNT = Endpoint("count", int, int)


async def nothing(limit: int, ctx: ServedContext) -> AsyncGenerator[int, None]:
    raise NotImplementedError


async def test_an_endpoint_is_served_once() -> None:
    transport = InprocTransport(PluginConfig(), Metrics())
    await transport.serve(7, COUNT, nothing)

    with pytest.raises(ValueError, match="count"):
        await transport.serve(7, COUNT, nothing)
    await transport.aclose()


async def test_dropped_events_are_counted(directory: MemoryDiscovery) -> None:
    metrics = Metrics()
    events = InprocEvents(metrics, backlog=2)
    publisher = await events.publisher("loads", await directory.lease())
    async with aclosing(events.subscribe("loads", directory)) as subscription:
        # The subscription begins with its first wait.
        first = asyncio.ensure_future(anext(subscription))
        await asyncio.sleep(0)

        assert [publisher.send(b"x") for _ in range(4)] == [True, True, False, False]
        await first

    assert b'dynamo_event_plane_dropped_total{subject="loads"} 2' in await metrics.render()
