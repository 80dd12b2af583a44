"""Calls over a real server: what the kit cannot know."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Any

import pytest
from dynamo_core import EngineContext
from dynamo_core.errors import (
    StreamIncomplete,
)
from dynamo_plugin_transport_nats.broker import NatsBroker
from dynamo_plugin_transport_nats.config import NatsConfig
from dynamo_telemetry import Metrics
from dynamo_testing.transport.handlers import ECHO, TOKENS, SteppedEngine, at, echo
from dynamo_testing.transport.harness import Recorder

WAIT = 10.0


async def test_messages_dropped_because_too_many_wait_are_noticed_and_counted(bench: Any) -> None:
    metrics, patience = Metrics(), {"heartbeat": 1.0}
    server, client = (
        await bench.transport(**patience),
        await bench.transport(None, metrics, pending_messages=4, **patience),
    )
    engine, sinks = SteppedEngine(), [Recorder() for _ in range(24)]
    for number, sink in enumerate(sinks):
        instance = at(await server.serve(number, TOKENS, engine), number)
        await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
        await sink.begun()

    # The rows of 24 workers arrive in one read. A link that waits in vain for an answer pings.
    engine.step()
    for sink in sinks:
        await sink.until(partial(_settled, sink))

    ends = [error for sink in sinks for error in sink.ends]
    assert ends
    assert all(isinstance(error, StreamIncomplete) for error in ends)
    found = re.search(rb"dynamo_nats_dropped_messages_total (\d+)", await metrics.render())
    assert found is not None
    assert int(found[1]) > 0


async def test_a_server_that_dies_while_it_is_asked_for_a_sign_of_life_is_not_waited_for(bench: Any) -> None:
    nats = bench.server()
    broker = NatsBroker(NatsConfig(servers=[nats.url]), Metrics())
    session = next(broker.attempts())
    await session.connect()
    nats.freeze()
    settling = asyncio.create_task(session.settle())
    # Its ping leaves in one of the next turns.
    for _ in range(10):
        await asyncio.sleep(0)

    nats.kill()

    async with asyncio.timeout(5):
        with pytest.raises(session.broken):
            await settling
    await session.aclose()


async def test_the_next_listed_server_is_used_when_one_is_down(bench: Any) -> None:
    gone, there = bench.server(), bench.server()
    gone.kill()
    servers = [gone.url, there.url]
    server, client = await bench.transport(servers=servers), await bench.transport(servers=servers)
    sink = Recorder()

    await client.call(at(await server.serve(7, ECHO, echo)), ECHO, b"", EngineContext("r"), sink)

    assert await sink.end() is None


def _settled(sink: Recorder) -> bool:
    return bool(sink.ends) or len(sink.items) == 2
