"""Calls over TCP, on loopback: what the kit cannot know."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from itertools import count
from typing import Any

import pytest
from dynamo_core import Endpoint, EngineContext, LLMEngineOutput, Served, ServedContext
from dynamo_core.contracts.transports import serving
from dynamo_core.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    ResponseTimeout,
    StreamIncomplete,
    WorkerOverloaded,
    chain_has,
)
from dynamo_core.protocol import Instance
from dynamo_plugin_transport_tcp.address import Address
from dynamo_plugin_transport_tcp.transport import TcpTransport
from dynamo_telemetry import Metrics
from dynamo_testing.transport.handlers import TOKENS, SteppedEngine, close_calls_that_do_not_end, happens
from dynamo_wire import calls

Make = Callable[..., TcpTransport]

WAIT = 10.0
BYTES = Endpoint("bytes", int, bytes)


async def burst(count: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
    """Yield all tokens without ever waiting."""

    async def items() -> AsyncGenerator[LLMEngineOutput, None]:
        for token in range(count):
            yield LLMEngineOutput([token])
        yield LLMEngineOutput.stop()

    return items()


#: What a caller says when it has taken rows.
ACK_TAG = 14


def at(served: Served | str, instance_id: int = 7) -> Instance:
    address = served if isinstance(served, str) else served.address["tcp"]
    return Instance(instance_id=instance_id, address={"tcp": address})


async def through(wire: Any, served: Served) -> Instance:
    wire.target = Address.parse(served.address["tcp"])
    return at(str(wire.address))


async def stepped(make_transport: Make, make_wire: Any) -> tuple[TcpTransport, Any, SteppedEngine, Instance]:
    """Return a caller, a wire between it and a worker, the worker's engine and its record."""
    wire, engine = await make_wire(), SteppedEngine()
    instance = await through(wire, await make_transport().serve(7, TOKENS, engine))
    return make_transport(), wire, engine, instance


# Rows.


async def test_the_rows_of_all_streams_in_one_turn_leave_in_one_frame(
    make_transport: Make, make_wire: Any, recorder: Any
) -> None:
    client, wire, engine, instance = await stepped(make_transport, make_wire)
    sinks = [recorder() for _ in range(64)]
    for sink in sinks:
        await client.call(instance, TOKENS, 100, EngineContext("r"), sink)
        await sink.begun()
    wire.rows.clear()

    for number in range(5):
        engine.step()
        for sink in sinks:
            await sink.until(lambda sink=sink, number=number: len(sink.items) >= number + 2)

    assert wire.rows == [64] * 5
    assert [item.token_ids for item in sinks[63].items] == [[100 + number] for number in range(6)]


async def test_rows_gather_and_are_merged_while_the_caller_is_busy_with_those_before(
    make_transport: Make, make_wire: Any, recorder: Any
) -> None:
    client, wire, engine, instance = await stepped(make_transport, make_wire)
    sink = recorder()
    wire.hold.add(ACK_TAG)
    await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
    await sink.begun()

    for _ in range(5):
        engine.step()
        await engine.all_wait()
    seen = [item.token_ids for item in sink.items]
    wire.release()
    await sink.until(lambda: len(sink.items) >= 2)

    assert seen == [[0]]
    assert [item.token_ids for item in sink.items] == [[0], [1, 2, 3, 4, 5]]


async def test_a_slow_caller_delays_its_ack(
    make_transport: Make, make_wire: Any, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, wire, engine, instance = await stepped(make_transport, make_wire)
    sink = recorder()
    ticks = count()
    monkeypatch.setattr(calls, "monotonic", lambda: 1000.0 * next(ticks))
    monkeypatch.setattr(calls, "MAX_REST", 3600.0)

    await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
    await sink.begun()
    for _ in range(3):
        engine.step()
        await engine.all_wait()
    engine.step(last=True)
    await sink.end()

    # Nothing was asked for, so the rows came together, with the end that never waits.
    assert ACK_TAG not in wire.tags
    assert [item.token_ids for item in sink.items] == [[0], [1, 2, 3]]


async def test_the_first_row_and_the_end_of_a_stream_do_not_wait_for_a_busy_caller(
    make_transport: Make, make_wire: Any, recorder: Any
) -> None:
    client, wire, engine, instance = await stepped(make_transport, make_wire)
    wire.hold.add(ACK_TAG)
    early, late = recorder(), recorder()

    await client.call(instance, TOKENS, 0, EngineContext("r"), early)
    await early.begun()
    await client.call(instance, TOKENS, 50, EngineContext("s"), late)
    await late.begun()
    engine.step()
    await engine.all_wait()
    engine.step(last=True)

    assert [await early.end(), await late.end()] == [None, None]
    assert [item.token_ids for item in late.items] == [[50], [51]]
    assert early.complete
    assert late.complete


async def test_a_handler_that_runs_ahead_of_a_busy_caller_is_made_to_wait(
    make_transport: Make, make_wire: Any, recorder: Any
) -> None:
    server, client, wire, sink = make_transport(), make_transport(), await make_wire(), recorder()
    made: list[int] = []

    async def endless(first: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
        async def items() -> AsyncGenerator[LLMEngineOutput, None]:
            while not ctx.is_stopped():
                made.append(len(made))
                yield LLMEngineOutput([made[-1]])

        return items()

    instance = await through(wire, await server.serve(7, TOKENS, endless))
    wire.hold.add(ACK_TAG)
    source = await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
    await sink.begun()
    for _ in range(100):
        await asyncio.sleep(0)

    assert len(made) < 200
    wire.release()
    await sink.until(lambda: len(sink.items) >= 4)
    await source.aclose()


async def test_a_caller_that_coalesces_gets_the_first_item_and_then_all_others_together(
    make_transport: Make, make_wire: Any, recorder: Any
) -> None:
    wire, engine, sink = await coalescing(make_transport, make_wire, recorder, coalesce=64, steps=5)

    engine.step(last=True)
    await sink.end()

    assert [item.token_ids for item in sink.items] == [[0], [1, 2, 3, 4, 5]]
    # Its frames need no answer: no stream of this connection is of low latency.
    assert ACK_TAG not in wire.tags


async def test_a_coalescing_caller_gets_batches_of_its_size(
    make_transport: Make, make_wire: Any, recorder: Any
) -> None:
    _, _, sink = await coalescing(make_transport, make_wire, recorder, coalesce=3, steps=6)

    await sink.arrived(3)

    assert [item.token_ids for item in sink.items] == [[0], [1, 2, 3], [4, 5, 6]]


async def coalescing(
    make_transport: Make, make_wire: Any, recorder: Any, *, coalesce: int, steps: int
) -> tuple[Any, SteppedEngine, Any]:
    """Return the wire, the engine and the sink of a call whose caller coalesces, after so many tokens."""
    client, wire, engine, instance = await stepped(make_transport, make_wire)
    sink, ctx = recorder(), EngineContext("r")
    ctx.coalesce = coalesce
    await client.call(instance, TOKENS, 0, ctx, sink)
    for _ in range(steps):
        engine.step()
        await engine.all_wait()
    return wire, engine, sink


async def test_items_that_wait_in_the_same_turn_are_merged_before_they_are_numbered(
    make_transport: Make, make_wire: Any, recorder: Any
) -> None:
    server, client, wire, sink = make_transport(), make_transport(), await make_wire(), recorder()
    instance = await through(wire, await server.serve(7, TOKENS, burst))

    await client.call(instance, TOKENS, 1000, EngineContext("r"), sink)

    assert await sink.end() is None
    assert [token for item in sink.items for token in item.token_ids] == list(range(1000))
    # A handler that never waits is made to, so that its items go out in portions.
    assert 1 < len(sink.items) < 50
    assert len(wire.rows) < 50
    assert sink.complete


async def test_large_items_of_a_handler_that_never_waits_leave_a_few_at_a_time(
    make_transport: Make, make_wire: Any, recorder: Any
) -> None:
    server, client, wire, sink = make_transport(), make_transport(), await make_wire(), recorder()

    async def chunks(count: int, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
        async def items() -> AsyncGenerator[bytes, None]:
            for _ in range(count):
                yield b"chunk"

        return items()

    instance = await through(wire, await server.serve(7, BYTES, chunks))

    await client.call(instance, BYTES, 40, EngineContext("r"), sink)

    assert await sink.end() is None
    assert sink.items == [b"chunk"] * 40
    assert max(wire.rows) <= 5


async def test_a_row_that_comes_twice_ends_the_stream_and_the_handler(
    make_transport: Make, make_wire: Any, recorder: Any
) -> None:
    client, wire, engine, instance = await stepped(make_transport, make_wire)
    broken, whole = recorder(), recorder()
    await client.call(instance, TOKENS, 0, EngineContext("r"), broken)
    await broken.begun()

    wire.double_a_row = True
    engine.step()
    error = await broken.end()
    await happens(engine.left[0])
    await client.call(instance, TOKENS, 0, EngineContext("s"), whole)
    await whole.begun()

    assert isinstance(error, StreamIncomplete)
    assert "row 1" in error.message
    assert engine.contexts[0].is_killed()
    assert whole.ends == []


# Connections.


async def test_all_calls_to_a_process_share_one_connection(make_transport: Make, recorder: Any) -> None:
    metrics = Metrics()
    server, client, engine = make_transport(), make_transport(metrics), SteppedEngine()
    connections = metrics.gauge("dynamo_tcp_connections", "", ("side",)).labels("caller")
    served = await server.serve(7, TOKENS, engine)

    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(client.call(at(served), TOKENS, 0, EngineContext("r"), recorder()))

    during = connections.value
    await client.aclose()

    assert (during, connections.value) == (1, 0)


async def test_another_process_on_a_reused_port_answers_not_me(make_transport: Make, recorder: Any) -> None:
    first, client = make_transport(), make_transport()
    old = (await first.serve(7, TOKENS, burst)).address["tcp"]
    await first.aclose()
    second, engine = make_transport(bind=old.split("/")[0]), SteppedEngine()
    new = await second.serve(7, TOKENS, engine)

    with pytest.raises(CannotConnect, match="not me"):
        await client.call(at(old), TOKENS, 1, EngineContext("r"), recorder())

    assert engine.contexts == []
    await client.call(at(new), TOKENS, 1, EngineContext("r"), recorder())


async def test_unreachable_and_malformed_addresses_are_told_apart(make_transport: Make, recorder: Any) -> None:
    server, client = make_transport(), make_transport()
    gone = (await server.serve(7, TOKENS, burst)).address["tcp"]
    await server.aclose()

    for address in (gone, "127.0.0.1", "nonsense/", f"127.0.0.1:99999/{'0' * 32}"):
        with pytest.raises(CannotConnect):
            await client.call(at(address), TOKENS, 1, EngineContext("r"), recorder())
    with pytest.raises(CannotConnect, match="no address"):
        await client.call(Instance(instance_id=7), TOKENS, 1, EngineContext("r"), recorder())


async def test_a_silent_listener_is_given_up_after_the_connect_timeout(make_transport: Make, recorder: Any) -> None:
    client = make_transport(connect_timeout=0.1)
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}/{'0' * 32}"

    with pytest.raises(ConnectionTimeout):
        await client.call(at(address), TOKENS, 1, EngineContext("r"), recorder())
    server.close()


async def test_a_call_over_the_accept_timeout_is_cancelled_at_the_worker(make_transport: Make, recorder: Any) -> None:
    server, client, sink = make_transport(), make_transport(accept_timeout=0.1), recorder()
    killed = asyncio.Event()

    async def slow(request: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
        await ctx.stopped()
        if ctx.is_killed():
            killed.set()
        raise WorkerOverloaded("too late")

    served = await server.serve(7, TOKENS, slow)

    with pytest.raises(ConnectionTimeout, match="accept"):
        await client.call(at(served), TOKENS, 1, EngineContext("r"), sink)

    await happens(killed)
    assert (sink.items, sink.ends) == ([], [])


async def test_connections_and_streams_are_limited(make_transport: Make, recorder: Any) -> None:
    server, engine = make_transport(max_connections=1, max_streams=2), SteppedEngine()
    first, second = make_transport(), make_transport()
    served = await server.serve(7, TOKENS, engine)
    for _ in range(2):
        await first.call(at(served), TOKENS, 0, EngineContext("r"), recorder())

    with pytest.raises(WorkerOverloaded):
        await first.call(at(served), TOKENS, 0, EngineContext("r"), recorder())
    with pytest.raises(CannotConnect, match="no more are accepted"):
        await second.call(at(served), TOKENS, 0, EngineContext("r"), recorder())


async def test_an_idle_connection_is_closed_and_made_again_when_needed(
    make_transport: Make, make_wire: Any, recorder: Any
) -> None:
    server, client, wire = make_transport(), make_transport(heartbeat=0.02, idle_timeout=0.06), await make_wire()
    instance = await through(wire, await server.serve(7, TOKENS, burst))
    sink, again = recorder(), recorder()
    await client.call(instance, TOKENS, 1, EngineContext("r"), sink)
    await sink.end()

    await wire.until(lambda: 42 in wire.tags)
    await client.call(instance, TOKENS, 1, EngineContext("r"), again)

    assert await again.end() is None
    assert wire.tags.count(0) == 2


async def test_a_silent_connection_with_a_living_peer_is_kept(
    make_transport: Make, make_wire: Any, recorder: Any
) -> None:
    server, client, wire = make_transport(), make_transport(heartbeat=0.02, silence=0.1), await make_wire()
    engine, sink = SteppedEngine(), recorder()
    instance = await through(wire, await server.serve(7, TOKENS, engine))
    await client.call(instance, TOKENS, 0, EngineContext("r"), sink)

    await wire.until(lambda: wire.tags.count(41) >= 8)
    engine.step(last=True)

    assert await sink.end() is None


@pytest.mark.parametrize("first", ["caller", "worker"])
async def test_a_connection_over_which_nothing_comes_is_given_up_by_both_ends(
    make_transport: Make, make_wire: Any, recorder: Any, first: str
) -> None:
    quick, slow = {"heartbeat": 0.02, "silence": 0.1}, {"heartbeat": 0.02, "silence": 60.0}
    server = make_transport(**(quick if first == "worker" else slow))
    client, wire = make_transport(**(quick if first == "caller" else slow)), await make_wire()
    engine, sink = SteppedEngine(), recorder()
    instance = await through(wire, await server.serve(7, TOKENS, engine))
    await client.call(instance, TOKENS, 0, EngineContext("r"), sink)

    wire.dead = True
    error = await sink.end()
    await happens(engine.left[0])

    assert isinstance(error, Disconnected)
    assert chain_has(error, ResponseTimeout) is (first == "caller")
    assert not engine.contexts[0].is_stopped()


async def test_closing_a_call_to_a_silent_worker_is_bounded(
    make_transport: Make, make_wire: Any, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "CLOSE_BOUND", 0.1)
    monkeypatch.setattr(serving, "STOP_GRACE", 0.3)
    server, client = make_transport(), make_transport()
    ready, other = asyncio.Event(), recorder()

    async def stubborn(request: int, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
        async def items() -> AsyncGenerator[bytes, None]:
            while True:
                yield b"still here"
                ready.set()
                await asyncio.sleep(0)

        return items()

    served = await server.serve(7, BYTES, stubborn)
    await server.serve(7, TOKENS, burst)
    sink = recorder()
    source = await client.call(at(served), BYTES, 0, EngineContext("r"), sink)
    await happens(ready)

    async with asyncio.timeout(WAIT):
        await source.aclose()
    told = len(sink.items)
    await client.call(at(served), TOKENS, 1, EngineContext("s"), other)

    assert await other.end() is None
    assert sink.ends == [None]
    assert len(sink.items) == told


async def test_calls_that_do_not_end_are_warned_of_once_for_all_of_a_connection(
    make_transport: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls, "CLOSE_BOUND", 0.1)
    monkeypatch.setattr(serving, "STOP_GRACE", 0.5)

    await close_calls_that_do_not_end(make_transport(), make_transport())

    assert len([record for record in caplog.records if "abandoned" in record.getMessage()]) == 1


# Processes.

WORKER = """
import asyncio, sys
from dynamo_core.contracts.transports.call import Endpoint
from dynamo_core.protocol.output import LLMEngineOutput, merge_outputs
from dynamo_telemetry.metrics import Metrics
from dynamo_plugin_transport_tcp.config import TcpConfig
from dynamo_plugin_transport_tcp.transport import TcpTransport

async def endless(request, ctx):
    async def items():
        token = 0
        while not ctx.is_stopped():
            yield LLMEngineOutput([token])
            token += 1
            await asyncio.sleep(0.001)
    return items()

async def main():
    transport = TcpTransport(TcpConfig(), Metrics())
    served = await transport.serve(7, Endpoint("tokens", int, LLMEngineOutput, merge_outputs), endless)
    print(served.address["tcp"], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_worker_process_that_is_killed_in_mid_stream_disconnects_its_streams(
    make_transport: Make, recorder: Any
) -> None:
    client, sinks = make_transport(), [recorder() for _ in range(3)]
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        address = (await worker.stdout.readline()).decode().strip()
        for sink in sinks:
            await client.call(at(address), TOKENS, 0, EngineContext("r"), sink)
            await sink.until(lambda sink=sink: len(sink.items) >= 5)

        worker.send_signal(signal.SIGKILL)
        ends = [await sink.end() for sink in sinks]
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()

    assert [type(error) for error in ends] == [Disconnected] * 3
    for sink in sinks:
        tokens = [token for item in sink.items for token in item.token_ids]
        assert tokens == list(range(len(tokens)))
        assert not sink.complete
    with pytest.raises(CannotConnect):
        await client.call(at(address), TOKENS, 0, EngineContext("r"), recorder())
