"""Calls over a real server: what the kit cannot know."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from dynamo_core import DynamoError, EngineContext
from dynamo_core.errors import Disconnected
from dynamo_plugin_transport_redis import broker as redis_broker
from dynamo_telemetry import Metrics
from dynamo_testing.faults import Delay, Direction, Drop
from dynamo_testing.transport.handlers import ECHO, TOKENS, SteppedEngine, at, echo, happens, until
from dynamo_testing.transport.harness import Recorder

#: Loops behave alike here: the other one runs in the long lanes.
QUICK_LOOP = "asyncio"
WAIT = 10.0


async def test_a_subscriber_that_the_server_drops_because_it_fell_behind_loses_its_streams_and_comes_back(
    bench: Any,
) -> None:
    broker = bench.server("--client-output-buffer-limit", "pubsub", "262144", "0", "0")
    server, client = await bench.pair(broker)
    instance, sink = at(await server.serve(7, ECHO, echo)), Recorder()
    fine = Recorder()
    await client.call(instance, ECHO, bytes(100_000), EngineContext("r"), fine)
    assert await fine.end() is None

    # All in one command, so that the server cannot send any of it in between.
    script = "for _ = 1, 64 do redis.call('PUBLISH', ARGV[1], string.rep('x', 65536)) end"
    broker.ask("EVAL", script, "0", server._registry.acceptors[7].address)
    await until(lambda: client._broker.connected and server._broker.settling)
    await client.call(instance, ECHO, b"again", EngineContext("r"), sink)

    assert await sink.end() is None


async def test_more_than_a_server_holds_for_a_subscriber_passes_through_it(bench: Any) -> None:
    broker = bench.server()
    metrics = Metrics()
    server, client = (
        await bench.transport(broker),
        await bench.transport(broker, metrics, accept_timeout=60),
    )
    instance, sinks = at(await server.serve(7, ECHO, echo)), [Recorder() for _ in range(3)]
    payload = bytes(14_000_000)

    async with asyncio.TaskGroup() as group:
        for sink in sinks:
            group.create_task(client.call(instance, ECHO, payload, EngineContext("r"), sink))
    for sink in sinks:
        await sink.end()

    assert [sink.ends for sink in sinks] == [[None]] * 3
    assert all(sink.items[1] == payload for sink in sinks)
    assert b"dynamo_redis_disconnects_total 1" not in await metrics.render()


async def test_a_worker_is_served_only_when_the_server_knows_where_it_listens(bench: Any) -> None:
    (wire, server), client = await bench.behind(), await bench.transport()
    rule = wire.plan.inject(Delay(0.3), direction=Direction.UP, when=lambda body: not body)

    instance, sink = at(await server.serve(7, ECHO, echo)), Recorder()
    await client.call(instance, ECHO, b"", EngineContext("r"), sink)

    await rule.hit()
    assert await sink.end() is None


async def test_no_key_is_left_on_the_server(bench: Any) -> None:
    broker = bench.server()
    server, client = await bench.pair(broker)
    instance = at(await server.serve(7, ECHO, echo))
    for _ in range(20):
        sink = Recorder()
        await client.call(instance, ECHO, bytes(500_000), EngineContext("r"), sink)
        assert await sink.end() is None

    assert broker.ask("DBSIZE") == 0
    await client.aclose()
    await server.aclose()
    await until(lambda: not broker.channels() and not broker.connections())


async def test_a_server_that_hangs_is_given_up_and_used_again_when_it_goes_on(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_broker, "PING_INTERVAL", 0.1)
    monkeypatch.setattr(redis_broker, "ANSWER", 0.5)
    broker = bench.server()
    server, client = await bench.pair(broker, connect_timeout=0.5)
    engine, sink, again = SteppedEngine(), Recorder(), Recorder()
    instance = at(await server.serve(7, TOKENS, engine))
    await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
    await sink.begun()

    broker.freeze()
    error = await sink.end()
    await happens(engine.left[0])
    broker.resume()
    await client._broker.ready()
    await client.call(instance, TOKENS, 50, EngineContext("s"), again)
    await again.begun()

    assert isinstance(error, Disconnected)
    assert not engine.contexts[0].is_stopped()


async def test_calls_waiting_for_a_dying_server_are_woken(bench: Any) -> None:
    broker = bench.server()
    server = await bench.transport(broker, connect_timeout=60.0)
    broker.freeze()

    async with asyncio.timeout(WAIT), asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(7, ECHO, echo))
        await until(lambda: server._registry.acceptors)
        await asyncio.sleep(0.1)
        early = serving.done()
        broker.kill()

    assert not early, "it must not be told as served before the server knows"


async def test_answers_that_are_out_of_step_end_the_connection(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_broker, "PING_INTERVAL", 0.05)
    server, (wire, client) = await bench.transport(), await bench.behind()
    instance, sink = at(await server.serve(7, ECHO, echo)), Recorder()

    rule = wire.plan.inject(Drop(), direction=Direction.UP, when=bool)
    with pytest.raises(DynamoError):
        await client.call(instance, ECHO, b"", EngineContext("r"), Recorder())
    await rule.hit()
    await until(lambda: client._broker.settling)
    await client.call(instance, ECHO, b"", EngineContext("r"), sink)

    assert await sink.end() is None


async def test_a_connection_with_a_server_that_hangs_is_closed_at_once(bench: Any) -> None:
    broker = bench.server()
    # What a loop opens with its first connection, it keeps.
    await (await bench.transport(broker)).aclose()
    before = open_files()
    client = await bench.transport(broker, write_high_water_kb=65_536)
    broker.freeze()
    for _ in range(32):
        client._broker.publish("x", bytes(1_000_000))

    await client.aclose()

    await until(lambda: open_files() <= before)
    broker.resume()


def open_files() -> int:
    """Return how many this process has, connections included."""
    return len(os.listdir("/proc/self/fd"))


async def test_foreign_messages_to_a_worker_are_dropped(bench: Any) -> None:
    broker, metrics = bench.server(), Metrics()
    server, client = await bench.transport(broker, metrics), await bench.transport(broker)
    instance, sink = at(await server.serve(7, ECHO, echo)), Recorder()

    for text in ("", "garbage", "two words", "\u00e4 b c", "a b c"):
        broker.ask("PUBLISH", instance.address["redis"], text)
    await client.call(instance, ECHO, b"", EngineContext("r"), sink)

    assert await sink.end() is None
    assert b"dynamo_redis_disconnects_total 0" in await metrics.render()


async def test_a_server_that_hangs_does_not_keep_a_transport_from_closing(bench: Any) -> None:
    broker = bench.server()
    server, client = await bench.pair(broker)
    engine, sink = SteppedEngine(), Recorder()
    instance = at(await server.serve(7, TOKENS, engine))
    await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
    await sink.begun()
    broker.freeze()

    async with asyncio.timeout(WAIT):
        await client.aclose()
        await server.aclose()
    broker.resume()

    assert isinstance(await sink.end(), Disconnected)
    await happens(engine.left[0])
