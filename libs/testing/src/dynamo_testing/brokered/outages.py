"""Checks with a server that dies, stays away, comes back or is not there yet."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.errors import (
    CannotConnect,
    Disconnected,
    DynamoError,
    Unavailable,
)
from dynamo_telemetry.metrics import Metrics

from dynamo_testing.brokered.bench import WAIT, BrokerBench, unplug
from dynamo_testing.faults import Delay, Direction
from dynamo_testing.optional_packages import pytest
from dynamo_testing.transport.handlers import (
    ECHO,
    TOKENS,
    SteppedEngine,
    at,
    counted,
    echo,
    happens,
    open_streams,
    until,
)
from dynamo_testing.transport.harness import Recorder
from dynamo_testing.transport.worker_process import ITEMS, WORK, Elsewhere, Work


@pytest.mark.asyncio
class OutageChecks:
    """Calls wait for the server, or fail in time."""

    async def test_open_calls_end_when_the_server_dies(self, bench: BrokerBench) -> None:
        broker = bench.server()
        engine, sinks = await open_streams(*await bench.pair(broker), 3)

        broker.kill()

        for sink, left in zip(sinks, engine.left, strict=True):
            assert isinstance(await sink.end(), Disconnected)
            await happens(left)
        assert not any(ctx.is_stopped() for ctx in engine.contexts)

    async def test_a_new_call_waits_for_a_server_that_comes_back_empty(self, bench: BrokerBench) -> None:
        broker, metrics = bench.server(), Metrics()
        server = await bench.transport(broker)
        client = await bench.transport(broker, metrics)
        instance, sink = at(await server.serve(7, ECHO, echo)), Recorder()

        broker.kill()
        await until(lambda: not client._broker.connected and not server._broker.connected)
        async with asyncio.TaskGroup() as group:
            calling = group.create_task(client.call(instance, ECHO, b"hello", EngineContext("r"), sink))
            await asyncio.sleep(0)
            early = calling.done()
            broker.start()

        assert not early
        assert await sink.end() is None
        assert sink.items == [b"first", b"hello", b"last"]
        text = await metrics.render()
        assert f"dynamo_{bench.TRANSPORT.NAME}_connected 1".encode() in text
        assert f"dynamo_{bench.TRANSPORT.NAME}_disconnects_total 1".encode() in text

    async def test_a_worker_that_comes_back_later_than_its_caller_is_waited_for(self, bench: BrokerBench) -> None:
        worker_wire, server = await bench.behind()
        caller_wire, client = await bench.behind()
        instance, sink, there = at(await server.serve(7, ECHO, echo)), Recorder(), worker_wire.target
        unplug(worker_wire)
        caller_wire.cut()
        await until(lambda: client._broker.settling)

        async with asyncio.TaskGroup() as group:
            calling = group.create_task(client.call(instance, ECHO, b"hello", EngineContext("r"), sink))
            await until(lambda: client._peers._count > 1)
            early = calling.done()
            worker_wire.target = there

        assert not early
        assert await sink.end() is None

    async def test_a_call_that_comes_while_a_worker_is_still_connecting_is_answered(self, bench: BrokerBench) -> None:
        (wire, server), client = await bench.behind(), await bench.transport()
        instance, sink = at(await server.serve(7, ECHO, echo)), Recorder()

        # Login and ping, two subscriptions and two pings. The last ping is late, so that a call arrives before the
        # worker knows that it is connected.
        rule = wire.plan.inject(Delay(4.0), direction=Direction.UP, at=5, when=lambda body: not body)
        wire.cut()
        await rule.hit()
        source = None
        while source is None:
            # The server may not have handled the subscriptions yet.
            with suppress(CannotConnect):
                source = await client.call(instance, ECHO, b"hello", EngineContext("r"), sink)

        assert await sink.end() is None

    async def test_a_server_that_stays_away_makes_new_calls_unavailable(self, bench: BrokerBench) -> None:
        broker = bench.server()
        server, client = (
            await bench.transport(broker),
            await bench.transport(broker, unavailable_wait=0.2),
        )
        instance, sink = at(await server.serve(7, TOKENS, SteppedEngine())), Recorder()
        await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
        broker.kill()
        await sink.end()

        with pytest.raises(Unavailable) as caught:
            await client.call(instance, TOKENS, 0, EngineContext("r"), Recorder())

        assert "127.0.0.1" not in caught.value.message, "what clients are shown names no server"

    async def test_many_server_restarts_corrupt_no_stream(self, bench: BrokerBench) -> None:
        broker = bench.server()
        server, client = await bench.pair(broker)

        instance = at(await server.serve(7, TOKENS, counted(0.001)))
        finished = broken = 0
        running = asyncio.Event()

        async def use() -> None:
            nonlocal finished, broken
            while finished < 20:
                sink = Recorder()
                try:
                    await client.call(instance, TOKENS, 100, EngineContext("r"), sink)
                except DynamoError:
                    continue
                await sink.begun()
                running.set()
                error = await sink.end()
                tokens = [token for item in sink.items for token in item.token_ids]
                assert tokens == list(range(len(tokens)))
                assert sink.complete == (error is None)
                assert error is not None or len(tokens) == 100
                finished += error is None
                broken += error is not None

        async with asyncio.timeout(30):
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(use())
                for _ in range(3):
                    running.clear()
                    await running.wait()
                    broker.kill()
                    broker.start()

        assert broken

    async def test_a_server_that_is_not_there_yet_is_waited_for(self, bench: BrokerBench) -> None:
        broker = bench.server()
        broker.kill()

        async with asyncio.TaskGroup() as group:
            starting = group.create_task(bench.transport(broker))
            await asyncio.sleep(0.1)
            early = starting.done()
            broker.start()

        assert not early

    async def test_a_server_that_never_comes_ends_the_start_in_one_line(self, bench: BrokerBench) -> None:
        broker = bench.server()
        broker.kill()

        with pytest.raises(CannotConnect, match=r"no \w+ server was reached within 0\.2 s: .*127\.0\.0\.1") as caught:
            await bench.transport(broker, start_timeout=0.2)

        assert "\n" not in caught.value.message

    @pytest.mark.full
    async def test_a_busy_worker_survives_a_server_restart(self, bench: BrokerBench) -> None:
        broker = bench.server()
        client = await bench.transport(broker, unavailable_wait=WAIT, accept_timeout=WAIT)
        elsewhere = await Elsewhere.start(
            bench.TRANSPORT,
            bench.reaches(broker.port) | {"prefix": bench.prefix, "reconnect_wait": 0.2},
            lease_ttl=0.5,
        )
        before, after = Recorder(), Recorder()
        try:
            await client.call(elsewhere.instance, WORK, Work(), EngineContext("r"), before)
            await before.end()
            broker.kill()
            await until(lambda: not client._broker.connected)
            broker.start()

            await client.call(elsewhere.instance, WORK, Work(block=3.5), EngineContext("s"), after)
            await after.end()
        finally:
            await elsewhere.end()

        assert after.ends == [None]
        assert len(after.items) == ITEMS
