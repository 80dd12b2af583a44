"""Calls over a real server: what the kit cannot know."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from dynamo_core.contracts.call import Endpoint, ServedContext
from dynamo_core.contracts.context import EngineContext
from dynamo_core.contracts.transport import Served
from dynamo_core.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoError,
    InvalidArgument,
    ResponseTimeout,
    StreamIncomplete,
    Unavailable,
    chain_has,
)
from dynamo_core.protocol.output import LLMEngineOutput, merge_outputs
from dynamo_core.protocol.records import Instance
from dynamo_core.telemetry.metrics import Metrics
from dynamo_plugin_transport_redis import broker as redis_broker
from dynamo_plugin_transport_redis.transport import RedisTransport
from dynamo_testing.faults import BlackHole, Corrupt, Delay, Direction, Drop, Duplicate, Fault, Passing, Reorder
from dynamo_testing.transport.elsewhere import ITEMS, WORK, Elsewhere, Work
from dynamo_wire import ROWS_TAG

Make = Callable[..., Coroutine[Any, Any, RedisTransport]]

WAIT = 10.0
TOKENS = Endpoint("tokens", int, LLMEngineOutput, merge_outputs)
ECHO = Endpoint("echo", bytes, bytes)

#: What a caller says.
RESUME, ACK = 13, 14


class Engine:
    """A handler that emits when told to, and remembers its calls."""

    def __init__(self) -> None:
        self.contexts: list[ServedContext] = []
        self.left: list[asyncio.Event] = []
        self._step = asyncio.Event()
        self._done = False

    def step(self, *, last: bool = False) -> None:
        """One token in every stream, in one turn of the loop."""
        self._done = last
        step, self._step = self._step, asyncio.Event()
        step.set()

    async def __call__(self, first: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
        self.contexts.append(ctx)
        self.left.append(left := asyncio.Event())
        return self._items(first, ctx, left)

    async def _items(
        self, token: int, ctx: ServedContext, left: asyncio.Event
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        ctx.on_stop(lambda: self.step())
        try:
            while not self._done and not ctx.is_stopped():
                step = self._step
                yield LLMEngineOutput([token])
                token += 1
                await step.wait()
        finally:
            left.set()


async def echo(request: bytes, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
    """What was asked, between two words."""

    async def items() -> AsyncGenerator[bytes, None]:
        yield b"first"
        yield request
        yield b"last"

    return items()


def at(served: Served, instance_id: int = 7) -> Instance:
    return Instance(instance_id=instance_id, address=served.address)


async def happens(event: asyncio.Event) -> None:
    async with asyncio.timeout(WAIT):
        await event.wait()


async def until(condition: Callable[[], Any]) -> None:
    """For what only the server can be asked about."""
    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110 - nothing tells when it holds
            await asyncio.sleep(0.01)


def messages(body: bytes) -> list[Any]:
    """The messages in a payload; none in what is not a whole fragment."""
    try:
        _, _, fragment = body.removesuffix(b"\r\n").split(b" ", 2)
        _, more, bundle, *_ = msgspec.msgpack.decode(fragment)
        found: list[Any] = [] if more else msgspec.msgpack.decode(bundle)
    except (msgspec.MsgspecError, ValueError, TypeError):
        return []
    return found


def says(tag: int) -> Callable[[bytes], bool]:
    return lambda body: any(message[0] == tag for message in messages(body))


async def behind(make_wire: Any, make_transport: Make, **options: Any) -> tuple[Any, RedisTransport]:
    """A transport that reaches the server through a wire."""
    wire = await make_wire()
    return wire, await make_transport(url=f"redis://127.0.0.1:{wire.port}", **options)


def unplug(wire: Any) -> None:
    """Nothing of what is behind the wire reaches the server any more, as if the machine were off."""
    wire.target = ("127.0.0.1", 1)
    wire.cut()


# Rows.


async def test_far_fewer_messages_than_tokens_pass_the_server(
    make_server: Any, make_transport: Make, recorder: Any
) -> None:
    broker = make_server()
    server, client = await make_transport(url=broker.url), await make_transport(url=broker.url)
    engine, sinks = Engine(), [recorder() for _ in range(64)]
    instance = at(await server.serve(7, TOKENS, engine))
    for sink in sinks:
        await client.call(instance, TOKENS, 100, EngineContext("r"), sink)
        await sink.until(lambda sink=sink: sink.items)
    before = broker.published()

    for number in range(10):
        engine.step()
        for sink in sinks:
            await sink.until(lambda sink=sink, number=number: sink.items[-1].token_ids[-1] == 101 + number)

    # One message of rows in each turn, and one that says that they were taken; some pings may fall in between.
    assert broker.published() - before < 64
    assert [token for item in sinks[63].items for token in item.token_ids] == [100 + number for number in range(11)]


async def test_the_rows_of_all_streams_in_one_turn_leave_in_one_message(
    make_wire: Any, make_transport: Make, recorder: Any
) -> None:
    sizes: list[int] = []

    def tap(passing: Passing) -> None:
        if passing.direction is Direction.DOWN:
            sizes.extend(len(message[1]) for message in messages(passing.body) if message[0] == ROWS_TAG)

    wire = await make_wire(tap)
    server, client = await make_transport(), await make_transport(url=f"redis://127.0.0.1:{wire.port}")
    engine, sinks = Engine(), [recorder() for _ in range(20)]
    instance = at(await server.serve(7, TOKENS, engine))
    for sink in sinks:
        await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
        await sink.until(lambda sink=sink: sink.items)
    sizes.clear()

    engine.step()
    for sink in sinks:
        await sink.until(lambda sink=sink: len(sink.items) == 2)

    assert sizes == [20]


async def test_all_that_a_worker_has_to_say_in_one_turn_leaves_in_one_message(
    make_server: Any, make_transport: Make, recorder: Any
) -> None:
    broker = make_server()
    server, client = await make_transport(url=broker.url), await make_transport(url=broker.url)
    engine, sinks, opened = Engine(), [recorder() for _ in range(100)], asyncio.Event()

    async def door(first: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
        await opened.wait()
        return await engine(first, ctx)

    instance = at(await server.serve(7, TOKENS, door))
    before = broker.published()
    async with asyncio.TaskGroup() as group:
        for sink in sinks:
            group.create_task(client.call(instance, TOKENS, 0, EngineContext("r"), sink))
        await until(lambda: len(server._registry.acceptors[7].links) == 1)
        opened.set()
    for sink in sinks:
        await sink.until(lambda sink=sink: sink.items)

    # A hundred questions, acceptances and first rows.
    assert broker.published() - before < 30


# Large messages.


@pytest.mark.parametrize("size", [0, 1, 65_000, 65_504, 65_505, 131_072, 3_000_000])
async def test_what_is_too_large_for_one_message_arrives_in_parts(
    make_server: Any, make_transport: Make, recorder: Any, size: int
) -> None:
    broker = make_server()
    server, client = await make_transport(url=broker.url), await make_transport(url=broker.url)
    payload, sink = secrets.token_bytes(size), recorder()
    instance = at(await server.serve(7, ECHO, echo))

    await client.call(instance, ECHO, payload, EngineContext("r"), sink)

    assert await sink.end() is None
    assert sink.items == [b"first", payload, b"last"]


async def test_small_answers_pass_between_the_parts_of_large_ones(make_transport: Make, recorder: Any) -> None:
    server, client = await make_transport(), await make_transport()
    instance = at(await server.serve(7, ECHO, echo))
    sinks = [recorder() for _ in range(12)]
    sent = [bytes([number]) * (4_000_000 if number % 2 else 10) for number in range(12)]

    async with asyncio.TaskGroup() as group:
        for sink, payload in zip(sinks, sent, strict=True):
            group.create_task(client.call(instance, ECHO, payload, EngineContext("r"), sink))
    for sink in sinks:
        await sink.end()

    assert [sink.ends for sink in sinks] == [[None]] * 12
    assert [sink.items[1] for sink in sinks] == sent


async def test_a_request_larger_than_the_worker_takes_is_refused_once_its_limit_is_known(
    make_transport: Make, recorder: Any
) -> None:
    server, client = await make_transport(max_message_mb=1), await make_transport(max_message_mb=4)
    instance = at(await server.serve(7, ECHO, echo))

    # The limit comes with the first answer; before it, the worker itself gives up what grows too large.
    with pytest.raises(DynamoError, match="max_message_mb"):
        await client.call(instance, ECHO, bytes(2_000_000), EngineContext("r"), recorder())
    sink = recorder()
    await client.call(instance, ECHO, b"small", EngineContext("r"), sink)
    await sink.end()
    with pytest.raises(InvalidArgument, match="more than the"):
        await client.call(instance, ECHO, bytes(2_000_000), EngineContext("r"), recorder())


# Who is not there.


async def test_an_address_nobody_listens_at_is_told_at_once(make_transport: Make, recorder: Any) -> None:
    server, client = await make_transport(), await make_transport(accept_timeout=60)
    instance = at(await server.serve(7, ECHO, echo))
    await server.aclose()

    begun = time.monotonic()
    with pytest.raises(CannotConnect, match="nobody listens"):
        await client.call(instance, ECHO, b"", EngineContext("r"), recorder())

    assert time.monotonic() - begun < WAIT


async def test_another_run_of_a_worker_with_the_same_id_is_not_taken_for_it(
    make_transport: Make, recorder: Any
) -> None:
    old, new, client = await make_transport(), await make_transport(), await make_transport()
    instance = at(await old.serve(7, ECHO, echo))
    await old.aclose()
    await new.serve(7, ECHO, echo)

    with pytest.raises(CannotConnect, match="nobody listens"):
        await client.call(instance, ECHO, b"", EngineContext("r"), recorder())


@pytest.mark.parametrize(
    "address",
    [
        "",
        "a b",
        "x:rq:7:*",
        "x:rq:7:00\r\nPING",
        "other:rq:7:000000000000000000000000",
        "x:rq::000000000000000000000000",
        "x:rq:7:",
        "x:rq:7:" + "0" * 600,
    ],
)
async def test_an_address_that_is_none_never_becomes_a_channel(
    make_transport: Make, recorder: Any, address: str
) -> None:
    client = await make_transport(prefix="x")

    with pytest.raises(CannotConnect, match="not an address"):
        await client.call(
            Instance(instance_id=7, address={"redis": address}), ECHO, b"", EngineContext("r"), recorder()
        )


async def test_a_worker_that_dies_is_noticed_by_its_callers(
    make_wire: Any, make_transport: Make, recorder: Any
) -> None:
    (wire, server), client = await behind(make_wire, make_transport), await make_transport()
    sink = recorder()
    instance = at(await server.serve(7, TOKENS, Engine()))
    await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
    await sink.until(lambda: sink.items)

    unplug(wire)

    error = await sink.end()
    assert isinstance(error, Disconnected)
    assert "nobody listens" in error.message
    assert not chain_has(error, ResponseTimeout)


async def test_a_caller_that_dies_is_noticed_by_its_workers(
    make_wire: Any, make_transport: Make, recorder: Any
) -> None:
    server, (wire, client) = await make_transport(), await behind(make_wire, make_transport)
    engine, sink = Engine(), recorder()
    instance = at(await server.serve(7, TOKENS, engine))
    await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
    await sink.until(lambda: sink.items)

    unplug(wire)

    await happens(engine.left[0])
    assert not engine.contexts[0].is_stopped(), "a caller that was lost has not given up"


async def test_a_caller_that_was_away_is_told_apart_from_its_former_self(
    make_wire: Any, make_transport: Make, recorder: Any
) -> None:
    server, (wire, client) = await make_transport(), await behind(make_wire, make_transport)
    engine, first, second = Engine(), recorder(), recorder()
    instance = at(await server.serve(7, TOKENS, engine))
    await client.call(instance, TOKENS, 0, EngineContext("r"), first)
    await first.until(lambda: first.items)

    wire.cut()
    assert isinstance(await first.end(), Disconnected)
    await client.call(instance, TOKENS, 50, EngineContext("s"), second)
    await happens(engine.left[0])
    engine.step(last=True)

    assert await second.end() is None
    assert [item.token_ids for item in second.items] == [[50]]
    assert [item.token_ids for item in first.items] == [[0]]


async def test_two_processes_that_call_one_worker_do_not_touch_each_other(make_transport: Make, recorder: Any) -> None:
    server = await make_transport()
    stays, leaves = await make_transport(), await make_transport()
    engine, kept, lost = Engine(), recorder(), recorder()
    instance = at(await server.serve(7, TOKENS, engine))
    await stays.call(instance, TOKENS, 0, EngineContext("a"), kept)
    await leaves.call(instance, TOKENS, 100, EngineContext("b"), lost)
    await kept.until(lambda: kept.items)
    await lost.until(lambda: lost.items)

    await leaves.aclose()
    await happens(engine.left[1])
    engine.step()
    await kept.until(lambda: len(kept.items) == 2)
    engine.step(last=True)

    assert await kept.end() is None
    assert [item.token_ids for item in kept.items] == [[0], [1]]
    assert isinstance(await lost.end(), Disconnected)


@pytest.mark.parametrize("dead", ["worker", "caller"])
async def test_an_end_that_is_there_but_silent_is_given_up_in_the_end(
    make_wire: Any, make_transport: Make, recorder: Any, dead: str
) -> None:
    patience = {"heartbeat": 0.05, "silence": 0.3}
    wire, hung = await behind(make_wire, make_transport, **patience)
    other = await make_transport(**patience)
    server, client = (hung, other) if dead == "worker" else (other, hung)
    engine, sink = Engine(), recorder()
    instance = at(await server.serve(7, TOKENS, engine))
    await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
    await sink.until(lambda: sink.items)

    # The server sees an open connection, and goes on to believe in it.
    rule = wire.plan.inject(BlackHole(), times=None)
    await rule.hit()

    error = await sink.end()
    assert chain_has(error or Disconnected(), ResponseTimeout), error
    await happens(engine.left[0])
    assert not engine.contexts[0].is_stopped()


async def test_a_worker_that_does_not_accept_in_time_is_given_up(make_transport: Make, recorder: Any) -> None:
    server, client = await make_transport(), await make_transport(accept_timeout=0.1)
    stopped = asyncio.Event()

    async def closed_door(request: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
        ctx.on_stop(stopped.set)
        await asyncio.Event().wait()
        raise AssertionError

    instance = at(await server.serve(7, TOKENS, closed_door))

    with pytest.raises(ConnectionTimeout, match=r"within 0\.1 s"):
        await client.call(instance, TOKENS, 0, EngineContext("r"), recorder())
    await happens(stopped)


# What is lost on the way.


async def test_a_message_that_comes_twice_ends_the_streams_of_its_link_only(
    make_wire: Any, make_transport: Make, recorder: Any
) -> None:
    server, other, (wire, client) = (
        await make_transport(),
        await make_transport(),
        await behind(make_wire, make_transport),
    )
    engine, bystander, broken, whole = Engine(), Engine(), recorder(), recorder()
    await client.call(at(await server.serve(7, TOKENS, engine)), TOKENS, 0, EngineContext("r"), broken)
    await client.call(at(await other.serve(8, TOKENS, bystander), 8), TOKENS, 0, EngineContext("s"), whole)
    await broken.until(lambda: broken.items)
    await whole.until(lambda: whole.items)

    rule = wire.plan.inject(Duplicate(), direction=Direction.DOWN, when=says(ROWS_TAG))
    engine.step()
    await rule.hit()
    error = await broken.end()
    await happens(engine.left[0])
    bystander.step(last=True)

    assert isinstance(error, StreamIncomplete)
    assert "fragment" in error.message
    assert await whole.end() is None


@pytest.mark.parametrize("lost", ["resume", "taken"])
async def test_a_word_of_the_caller_that_is_lost_is_noticed_by_the_worker(
    make_wire: Any, make_transport: Make, recorder: Any, lost: str
) -> None:
    server, (wire, client) = await make_transport(), await behind(make_wire, make_transport)
    engine, sink = Engine(), recorder()
    source = await client.call(at(await server.serve(7, TOKENS, engine)), TOKENS, 0, EngineContext("r"), sink)
    await sink.until(lambda: sink.items)
    if lost == "resume":
        source.pause()

    rule = wire.plan.inject(Drop(), direction=Direction.UP, when=says(RESUME if lost == "resume" else ACK))
    if lost == "resume":
        source.resume()
    else:
        engine.step()
    await rule.hit()

    # Without the numbering this stream would stand still for ever.
    error = await sink.end()
    assert isinstance(error, Disconnected)
    assert chain_has(error, StreamIncomplete)
    await happens(engine.left[0])


@pytest.mark.parametrize("kind", [Drop, Duplicate, Reorder, Corrupt], ids=lambda kind: str(kind.__name__))
@pytest.mark.parametrize("direction", Direction)
async def test_no_stream_lies_whatever_message_suffers(
    make_wire: Any, make_transport: Make, recorder: Any, kind: type[Fault], direction: Direction
) -> None:
    patience = {"heartbeat": 0.05, "accept_timeout": 0.2}
    server = await make_transport(**patience)
    wire, client = await behind(make_wire, make_transport, **patience)

    async def count(limit: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
        async def items() -> AsyncGenerator[LLMEngineOutput, None]:
            for number in range(limit):
                yield LLMEngineOutput([number])
                await asyncio.sleep(0)

        return items()

    instance = at(await server.serve(7, TOKENS, count))
    for nth in range(8):
        # Of frames with a payload; what the client and the server say to each other is their own affair.
        wire.plan.clear()
        wire.plan.inject(kind(), direction=direction, at=nth, when=lambda body: len(body) > 4)
        sinks = [recorder() for _ in range(3)]
        for sink in sinks:
            try:
                await client.call(instance, TOKENS, 300, EngineContext("r"), sink)
            except DynamoError:
                assert sink.items == sink.ends == []
                continue
            error = await sink.end()
            tokens = [token for item in sink.items for token in item.token_ids]
            assert tokens == list(range(len(tokens)))
            if error is None:
                assert sink.complete
                assert len(tokens) == 300


async def test_the_end_of_a_stream_that_is_lost_is_noticed_though_nothing_follows_it(
    make_wire: Any, make_transport: Make, recorder: Any
) -> None:
    server, (wire, client) = await make_transport(), await behind(make_wire, make_transport)
    engine, sink = Engine(), recorder()
    await client.call(at(await server.serve(7, TOKENS, engine)), TOKENS, 0, EngineContext("r"), sink)
    await sink.until(lambda: sink.items)

    rule = wire.plan.inject(Drop(), direction=Direction.DOWN, when=says(ROWS_TAG))
    engine.step(last=True)
    await rule.hit()

    assert isinstance(await sink.end(), StreamIncomplete)
    assert not sink.complete


async def test_a_subscriber_that_the_server_drops_because_it_fell_behind_loses_its_streams_and_comes_back(
    make_server: Any, make_transport: Make, recorder: Any
) -> None:
    broker = make_server("--client-output-buffer-limit", "pubsub", "262144", "0", "0")
    server, client = await make_transport(url=broker.url), await make_transport(url=broker.url)
    instance, sink = at(await server.serve(7, ECHO, echo)), recorder()
    fine = recorder()
    await client.call(instance, ECHO, bytes(100_000), EngineContext("r"), fine)
    assert await fine.end() is None

    # All in one command, so that the server cannot send any of it in between.
    script = "for _ = 1, 64 do redis.call('PUBLISH', ARGV[1], string.rep('x', 65536)) end"
    broker.ask("EVAL", script, "0", server._registry.acceptors[7].address)
    await until(lambda: client._broker.connected and server._broker.settling)
    await client.call(instance, ECHO, b"again", EngineContext("r"), sink)

    assert await sink.end() is None


async def test_more_than_a_server_holds_for_a_subscriber_passes_through_it(
    make_server: Any, make_transport: Make, recorder: Any
) -> None:
    broker = make_server()
    metrics = Metrics()
    server, client = (
        await make_transport(url=broker.url),
        await make_transport(metrics, url=broker.url, accept_timeout=60),
    )
    instance, sinks = at(await server.serve(7, ECHO, echo)), [recorder() for _ in range(3)]
    payload = bytes(14_000_000)

    async with asyncio.TaskGroup() as group:
        for sink in sinks:
            group.create_task(client.call(instance, ECHO, payload, EngineContext("r"), sink))
    for sink in sinks:
        await sink.end()

    assert [sink.ends for sink in sinks] == [[None]] * 3
    assert all(sink.items[1] == payload for sink in sinks)
    assert b"dynamo_redis_disconnects_total 1" not in await metrics.render()


async def test_a_worker_is_served_only_when_the_server_knows_where_it_listens(
    make_wire: Any, make_transport: Make, recorder: Any
) -> None:
    (wire, server), client = await behind(make_wire, make_transport), await make_transport()
    rule = wire.plan.inject(Delay(0.3), direction=Direction.UP, when=lambda body: not body)

    instance, sink = at(await server.serve(7, ECHO, echo)), recorder()
    await client.call(instance, ECHO, b"", EngineContext("r"), sink)

    await rule.hit()
    assert await sink.end() is None


async def test_nothing_is_left_on_the_server(make_server: Any, make_transport: Make, recorder: Any) -> None:
    broker = make_server()
    server, client = await make_transport(url=broker.url), await make_transport(url=broker.url)
    instance = at(await server.serve(7, ECHO, echo))
    for _ in range(20):
        sink = recorder()
        await client.call(instance, ECHO, bytes(500_000), EngineContext("r"), sink)
        assert await sink.end() is None

    assert broker.ask("DBSIZE") == 0
    await client.aclose()
    await server.aclose()
    await until(lambda: not broker.listened_to() and not broker.connections())


# The server goes away.


async def test_open_calls_end_when_the_server_dies(make_server: Any, make_transport: Make, recorder: Any) -> None:
    broker = make_server()
    server, client = await make_transport(url=broker.url), await make_transport(url=broker.url)
    engine, sinks = Engine(), [recorder() for _ in range(3)]
    instance = at(await server.serve(7, TOKENS, engine))
    for sink in sinks:
        await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
        await sink.until(lambda sink=sink: sink.items)

    broker.kill()

    for sink, left in zip(sinks, engine.left, strict=True):
        assert isinstance(await sink.end(), Disconnected)
        await happens(left)
    assert not any(ctx.is_stopped() for ctx in engine.contexts)


async def test_a_new_call_waits_for_a_server_that_comes_back_empty(
    make_server: Any, make_transport: Make, recorder: Any
) -> None:
    broker, metrics = make_server(), Metrics()
    server = await make_transport(url=broker.url)
    client = await make_transport(metrics, url=broker.url)
    instance, sink = at(await server.serve(7, ECHO, echo)), recorder()

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
    assert b"dynamo_redis_connected 1" in text
    assert b"dynamo_redis_disconnects_total 1" in text


async def test_a_worker_that_comes_back_later_than_its_caller_is_waited_for(
    make_wire: Any, make_transport: Make, recorder: Any
) -> None:
    worker_wire, server = await behind(make_wire, make_transport)
    caller_wire, client = await behind(make_wire, make_transport)
    instance, sink, there = at(await server.serve(7, ECHO, echo)), recorder(), worker_wire.target
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


async def test_a_call_that_comes_while_a_worker_is_still_connecting_is_answered(
    make_wire: Any, make_transport: Make, recorder: Any
) -> None:
    (wire, server), client = await behind(make_wire, make_transport), await make_transport()
    instance, sink = at(await server.serve(7, ECHO, echo)), recorder()

    # Login and ping, two subscriptions and two pings: the last one is late, so that the worker hears before it knows
    # that it is connected.
    rule = wire.plan.inject(Delay(0.3), direction=Direction.UP, at=5, when=lambda body: not body)
    wire.cut()
    await rule.hit()
    source = None
    while source is None:
        # The subscriptions were sent, but the server may not have come to them yet.
        with suppress(CannotConnect):
            source = await client.call(instance, ECHO, b"hello", EngineContext("r"), sink)

    assert await sink.end() is None


async def test_a_server_that_hangs_is_given_up_and_used_again_when_it_goes_on(
    make_server: Any, make_transport: Make, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_broker, "PING_INTERVAL", 0.1)
    monkeypatch.setattr(redis_broker, "ANSWER", 0.5)
    broker = make_server()
    options = {"url": broker.url, "connect_timeout": 0.5}
    server, client = await make_transport(**options), await make_transport(**options)
    engine, sink, again = Engine(), recorder(), recorder()
    instance = at(await server.serve(7, TOKENS, engine))
    await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
    await sink.until(lambda: sink.items)

    broker.stop()
    error = await sink.end()
    await happens(engine.left[0])
    broker.resume()
    await client._broker.ready()
    await client.call(instance, TOKENS, 50, EngineContext("s"), again)
    await again.until(lambda: again.items)

    assert isinstance(error, Disconnected)
    assert not engine.contexts[0].is_stopped()


async def test_whoever_waits_for_a_server_that_dies_is_woken(make_server: Any, make_transport: Make) -> None:
    broker = make_server()
    server = await make_transport(url=broker.url, connect_timeout=60.0)
    broker.stop()

    async with asyncio.timeout(WAIT), asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(7, ECHO, echo))
        await until(lambda: server._registry.acceptors)
        await asyncio.sleep(0.1)
        early = serving.done()
        broker.kill()

    assert not early, "it must not be told as served before the server knows"


async def test_answers_that_are_out_of_step_end_the_connection(
    make_wire: Any, make_transport: Make, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_broker, "PING_INTERVAL", 0.05)
    server, (wire, client) = await make_transport(), await behind(make_wire, make_transport)
    instance, sink = at(await server.serve(7, ECHO, echo)), recorder()

    rule = wire.plan.inject(Drop(), direction=Direction.UP, when=bool)
    with pytest.raises(DynamoError):
        await client.call(instance, ECHO, b"", EngineContext("r"), recorder())
    await rule.hit()
    await until(lambda: client._broker.settling)
    await client.call(instance, ECHO, b"", EngineContext("r"), sink)

    assert await sink.end() is None


async def test_a_connection_with_a_server_that_hangs_is_closed_at_once(make_server: Any, make_transport: Make) -> None:
    broker = make_server()
    # What a loop opens with its first connection, it keeps.
    await (await make_transport(url=broker.url)).aclose()
    before = open_files()
    client = await make_transport(url=broker.url, write_high_water_kb=65_536)
    broker.stop()
    for _ in range(32):
        client._broker.publish("x", bytes(1_000_000))

    await client.aclose()

    await until(lambda: open_files() <= before)
    broker.resume()


def open_files() -> int:
    """How many this process has, connections included."""
    return len(os.listdir("/proc/self/fd"))


async def test_what_a_stranger_publishes_to_a_worker_is_dropped(
    make_server: Any, make_transport: Make, recorder: Any
) -> None:
    broker, metrics = make_server(), Metrics()
    server, client = await make_transport(metrics, url=broker.url), await make_transport(url=broker.url)
    instance, sink = at(await server.serve(7, ECHO, echo)), recorder()

    for text in ("", "garbage", "two words", "\u00e4 b c", "a b c"):
        broker.ask("PUBLISH", instance.address["redis"], text)
    await client.call(instance, ECHO, b"", EngineContext("r"), sink)

    assert await sink.end() is None
    assert b"dynamo_redis_disconnects_total 0" in await metrics.render()


async def test_a_server_that_hangs_does_not_keep_a_transport_from_closing(
    make_server: Any, make_transport: Make, recorder: Any
) -> None:
    broker = make_server()
    server, client = await make_transport(url=broker.url), await make_transport(url=broker.url)
    engine, sink = Engine(), recorder()
    instance = at(await server.serve(7, TOKENS, engine))
    await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
    await sink.until(lambda: sink.items)
    broker.stop()

    async with asyncio.timeout(WAIT):
        await client.aclose()
        await server.aclose()
    broker.resume()

    assert isinstance(await sink.end(), Disconnected)
    await happens(engine.left[0])


async def test_a_server_that_stays_away_makes_new_calls_unavailable(
    make_server: Any, make_transport: Make, recorder: Any
) -> None:
    broker = make_server()
    server, client = (
        await make_transport(url=broker.url),
        await make_transport(url=broker.url, unavailable_wait=0.2),
    )
    instance, sink = at(await server.serve(7, TOKENS, Engine())), recorder()
    await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
    broker.kill()
    await sink.end()

    with pytest.raises(Unavailable) as caught:
        await client.call(instance, TOKENS, 0, EngineContext("r"), recorder())

    assert "127.0.0.1" not in caught.value.message, "what clients are shown names no server"


async def test_many_restarts_of_the_server_leave_no_stream_that_lies(
    make_server: Any, make_transport: Make, recorder: Any
) -> None:
    broker = make_server()
    server, client = await make_transport(url=broker.url), await make_transport(url=broker.url)

    async def count(limit: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
        async def items() -> AsyncGenerator[LLMEngineOutput, None]:
            for number in range(limit):
                yield LLMEngineOutput([number])
                await asyncio.sleep(0.001)

        return items()

    instance = at(await server.serve(7, TOKENS, count))
    finished = broken = 0

    async def use() -> None:
        nonlocal finished, broken
        while finished < 20:
            sink = recorder()
            try:
                await client.call(instance, TOKENS, 30, EngineContext("r"), sink)
            except DynamoError:
                continue
            error = await sink.end()
            tokens = [token for item in sink.items for token in item.token_ids]
            assert tokens == list(range(len(tokens)))
            assert sink.complete == (error is None)
            assert error is not None or len(tokens) == 30
            finished += error is None
            broken += error is not None

    async with asyncio.timeout(30):
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(use())
            for _ in range(3):
                await asyncio.sleep(0.1)
                broker.kill()
                broker.start()

    assert broken


async def test_a_server_that_is_not_there_yet_is_waited_for(make_server: Any, make_transport: Make) -> None:
    broker = make_server()
    broker.kill()

    async with asyncio.TaskGroup() as group:
        starting = group.create_task(make_transport(url=broker.url))
        await asyncio.sleep(0.1)
        early = starting.done()
        broker.start()

    assert not early


async def test_a_server_that_never_comes_ends_the_start_in_one_line(make_server: Any, make_transport: Make) -> None:
    broker = make_server()
    broker.kill()

    with pytest.raises(CannotConnect, match=r"no Redis server was reached within 0\.2 s: Redis at 127\.0") as caught:
        await make_transport(url=broker.url, start_timeout=0.2)

    assert "\n" not in caught.value.message


# Stopping.


async def test_what_was_said_before_closing_still_arrives(make_transport: Make, recorder: Any) -> None:
    server, client = await make_transport(), await make_transport()
    sinks = [recorder() for _ in range(20)]
    served = await server.serve(7, ECHO, echo)
    for sink in sinks:
        await client.call(at(served), ECHO, bytes(100_000), EngineContext("r"), sink)

    assert await served.drain(WAIT)
    await server.aclose()

    for sink in sinks:
        assert await sink.end() is None
        assert len(sink.items) == 3


@pytest.mark.full
async def test_after_a_restart_of_the_server_a_busy_worker_is_still_told_from_a_dead_one(
    make_server: Any, make_transport: Make, recorder: Any, prefix: str
) -> None:
    broker = make_server()
    client = await make_transport(url=broker.url, unavailable_wait=WAIT, accept_timeout=WAIT)
    elsewhere = await Elsewhere.start(
        RedisTransport, {"url": broker.url, "prefix": prefix, "reconnect_wait": 0.2}, lease_ttl=0.5
    )
    before, after = recorder(), recorder()
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


async def test_a_closed_transport_leaves_no_connection_and_no_subscription(
    make_server: Any, make_transport: Make, recorder: Any
) -> None:
    broker = make_server()
    server, client = await make_transport(url=broker.url), await make_transport(url=broker.url)
    instance, sink = at(await server.serve(7, ECHO, echo)), recorder()
    await client.call(instance, ECHO, b"", EngineContext("r"), sink)
    await sink.end()
    # Two pairs that carry calls, and that of the worker's thread that answers probes.
    await until(lambda: broker.connections() == 6)

    await client.aclose()
    await server.aclose()

    await until(lambda: broker.connections() == 0)
    with pytest.raises(CannotConnect, match="closed"):
        await client.call(instance, ECHO, b"", EngineContext("r"), recorder())


async def test_connections_that_broke_in_the_middle_of_writing_leave_no_task_behind(
    make_wire: Any, make_transport: Make, recorder: Any
) -> None:
    before = asyncio.all_tasks()
    server = await make_transport()
    instance = at(await server.serve(7, ECHO, echo))
    wire, client = await behind(make_wire, make_transport, unavailable_wait=WAIT)

    for _ in range(5):
        await client._broker.ready()
        calls = [client.call(instance, ECHO, bytes(4_000_000), EngineContext("r"), recorder()) for _ in range(4)]
        async with asyncio.TaskGroup() as group:
            calling = [group.create_task(_failing(call)) for call in calls]
            await until(lambda: any(link.blocked for link in client._peers._links.values()))
            wire.cut()
        assert all(task.done() for task in calling)
    await client.aclose()
    await server.aclose()
    await wire.aclose()

    assert [task for task in asyncio.all_tasks() - before if not task.done()] == []


async def _failing(call: Coroutine[Any, Any, Any]) -> None:
    with suppress(DynamoError):
        await call


async def test_a_link_that_is_not_used_is_forgotten_by_both_ends_and_made_again(
    make_transport: Make, recorder: Any
) -> None:
    options = {"heartbeat": 0.02, "silence": 1.0, "idle_timeout": 0.1}
    server, client = await make_transport(**options), await make_transport(**options)
    instance, first, second = at(await server.serve(7, ECHO, echo)), recorder(), recorder()
    await client.call(instance, ECHO, b"", EngineContext("r"), first)
    await first.end()

    await until(lambda: not client._peers._links and not server._registry.acceptors[7].links)
    await client.call(instance, ECHO, b"", EngineContext("r"), second)

    assert await second.end() is None


async def test_a_worker_that_has_forgotten_a_caller_is_called_over_a_new_link(
    make_wire: Any, make_transport: Make, recorder: Any
) -> None:
    (wire, server), client = await behind(make_wire, make_transport), await make_transport()
    instance, first, second = at(await server.serve(7, ECHO, echo)), recorder(), recorder()
    await client.call(instance, ECHO, b"", EngineContext("r"), first)
    await first.end()

    wire.cut()
    await until(lambda: not server._registry.acceptors[7].links)
    await server._broker.ready()
    await client.call(instance, ECHO, b"", EngineContext("r"), second)

    assert await second.end() is None
