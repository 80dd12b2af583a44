"""Checks of closed transports and unused links."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.errors import (
    CannotConnect,
    DynamoError,
)

from dynamo_testing.brokered.bench import WAIT, BrokerBench
from dynamo_testing.optional_packages import pytest
from dynamo_testing.transport.handlers import ECHO, at, echo, until
from dynamo_testing.transport.harness import Recorder


@pytest.mark.asyncio
class ClosingChecks:
    """Checks that a close loses nothing and leaves nothing behind."""

    async def test_messages_sent_before_closing_still_arrive(self, bench: BrokerBench) -> None:
        server, client = await bench.pair()
        sinks = [Recorder() for _ in range(20)]
        served = await server.serve(7, ECHO, echo)
        for sink in sinks:
            await client.call(at(served), ECHO, bytes(100_000), EngineContext("r"), sink)

        assert await served.drain(WAIT)
        await server.aclose()

        for sink in sinks:
            assert await sink.end() is None
            assert len(sink.items) == 3

    async def test_a_closed_transport_leaves_no_connection_and_no_subscription(self, bench: BrokerBench) -> None:
        broker = bench.server()
        server, client = await bench.pair(broker)
        instance, sink = at(await server.serve(7, ECHO, echo)), Recorder()
        await client.call(instance, ECHO, b"", EngineContext("r"), sink)
        await sink.end()
        # Those that carry calls, and those of the thread that answers probes.
        await until(lambda: broker.connections() == bench.CONNECTIONS)

        await client.aclose()
        await server.aclose()

        await until(lambda: broker.connections() == 0)
        with pytest.raises(CannotConnect, match="closed"):
            await client.call(instance, ECHO, b"", EngineContext("r"), Recorder())

    async def test_connections_that_broke_in_the_middle_of_writing_leave_no_task_behind(
        self, bench: BrokerBench
    ) -> None:
        before = asyncio.all_tasks()
        server = await bench.transport()
        instance = at(await server.serve(7, ECHO, echo))
        wire, client = await bench.behind(unavailable_wait=WAIT)

        for _ in range(5):
            await client._broker.ready()
            calls = [client.call(instance, ECHO, bytes(4_000_000), EngineContext("r"), Recorder()) for _ in range(4)]
            async with asyncio.TaskGroup() as group:
                calling = [group.create_task(_failing(call)) for call in calls]
                await until(lambda: any(link.blocked for link in client._peers._links.values()))
                wire.cut()
            assert all(task.done() for task in calling)
        await client.aclose()
        await server.aclose()
        await wire.aclose()

        assert [task for task in asyncio.all_tasks() - before if not task.done()] == []

    async def test_an_unused_link_is_dropped_and_reopened(self, bench: BrokerBench) -> None:
        options = {"heartbeat": 0.02, "silence": 1.0, "idle_timeout": 0.1}
        server, client = await bench.pair(**options)
        instance, first, second = at(await server.serve(7, ECHO, echo)), Recorder(), Recorder()
        await client.call(instance, ECHO, b"", EngineContext("r"), first)
        await first.end()

        await until(lambda: not client._peers._links and not server._registry.acceptors[7].links)
        await client.call(instance, ECHO, b"", EngineContext("r"), second)

        assert await second.end() is None

    async def test_a_worker_that_has_forgotten_a_caller_is_called_over_a_new_link(self, bench: BrokerBench) -> None:
        (wire, server), client = await bench.behind(), await bench.transport()
        instance, first, second = at(await server.serve(7, ECHO, echo)), Recorder(), Recorder()
        await client.call(instance, ECHO, b"", EngineContext("r"), first)
        await first.end()

        wire.cut()
        await until(lambda: not server._registry.acceptors[7].links)
        await server._broker.ready()
        await client.call(instance, ECHO, b"", EngineContext("r"), second)

        assert await second.end() is None


async def _failing(call: Coroutine[Any, Any, Any]) -> None:
    with suppress(DynamoError):
        await call
