"""Checks of rows of many streams in few messages, and of messages larger than one part."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from functools import partial

from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.transports.call import ServedContext
from dynamo_core.errors import (
    DynamoError,
    InvalidArgument,
)
from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_wire import ROWS_TAG

from dynamo_testing.brokered.bench import BrokerBench
from dynamo_testing.faults import Direction, Passing
from dynamo_testing.optional_packages import pytest
from dynamo_testing.transport.handlers import ECHO, TOKENS, SteppedEngine, at, echo, open_streams, until
from dynamo_testing.transport.harness import Recorder

#: What an echoed payload that fills one part leaves for its fragment and row.
FRAGMENT_HEAD = 32


@pytest.mark.asyncio
class RowChecks:
    """Checks of the messages at the server."""

    async def test_far_fewer_messages_than_tokens_reach_the_server(self, bench: BrokerBench) -> None:
        broker = bench.server()
        engine, sinks = await open_streams(*await bench.pair(broker), 64, first=100)
        before = broker.published()

        for number in range(10):
            engine.step()
            for sink in sinks:
                await sink.until(partial(_reached, sink, 101 + number))

        # One message of rows in each turn, and one that says that they were taken; some pings may fall in between.
        assert broker.published() - before < 64
        assert [token for item in sinks[63].items for token in item.token_ids] == [100 + number for number in range(11)]

    async def test_the_rows_of_all_streams_in_one_turn_leave_in_one_message(self, bench: BrokerBench) -> None:
        sizes: list[int] = []

        def tap(passing: Passing) -> None:
            if passing.direction is Direction.DOWN:
                sizes.extend(len(message[1]) for message in bench.messages(passing.body) if message[0] == ROWS_TAG)

        wire = await bench.wire(tap)
        server, client = await bench.transport(), await bench.transport(wire)
        engine, sinks = await open_streams(server, client, 20)
        sizes.clear()

        engine.step()
        for sink in sinks:
            await sink.arrived(2)

        assert sizes == [20]

    async def test_all_output_of_a_worker_in_one_turn_leaves_in_one_message(self, bench: BrokerBench) -> None:
        broker = bench.server()
        server, client = await bench.pair(broker)
        engine, sinks, opened = SteppedEngine(), [Recorder() for _ in range(100)], asyncio.Event()

        async def gate(first: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
            await opened.wait()
            return await engine(first, ctx)

        instance = at(await server.serve(7, TOKENS, gate))
        before = broker.published()
        async with asyncio.TaskGroup() as group:
            for sink in sinks:
                group.create_task(client.call(instance, TOKENS, 0, EngineContext("r"), sink))
            await until(lambda: len(server._registry.acceptors[7].links) == 1)
            opened.set()
        for sink in sinks:
            await sink.begun()

        # A hundred questions, acceptances and first rows.
        assert broker.published() - before < 30

    @pytest.mark.parametrize(
        ("parts", "over"),
        [(0, 0), (0, 1), (1, -536), (1, -FRAGMENT_HEAD), (1, 1 - FRAGMENT_HEAD), (2, 0), (25, -2400), (0, 3_000_000)],
    )
    async def test_a_message_over_the_limit_arrives_in_parts(self, bench: BrokerBench, parts: int, over: int) -> None:
        size = parts * bench.PART + over
        broker = bench.small_server()
        server, client = await bench.pair(broker)
        payload, sink = secrets.token_bytes(size), Recorder()
        instance = at(await server.serve(7, ECHO, echo))

        await client.call(instance, ECHO, payload, EngineContext("r"), sink)

        assert await sink.end() is None
        assert sink.items == [b"first", payload, b"last"]

    async def test_small_answers_pass_between_the_parts_of_large_ones(self, bench: BrokerBench) -> None:
        server, client = await bench.pair()
        instance = at(await server.serve(7, ECHO, echo))
        sinks = [Recorder() for _ in range(12)]
        sent = [bytes([number]) * (4_000_000 if number % 2 else 10) for number in range(12)]

        async with asyncio.TaskGroup() as group:
            for sink, payload in zip(sinks, sent, strict=True):
                group.create_task(client.call(instance, ECHO, payload, EngineContext("r"), sink))
        for sink in sinks:
            await sink.end()

        assert [sink.ends for sink in sinks] == [[None]] * 12
        assert [sink.items[1] for sink in sinks] == sent

    async def test_a_request_larger_than_the_worker_takes_is_refused_once_its_limit_is_known(
        self, bench: BrokerBench
    ) -> None:
        server, client = await bench.transport(max_message_mb=1), await bench.transport(max_message_mb=4)
        instance = at(await server.serve(7, ECHO, echo))

        # The limit comes with the first answer; before it, the worker itself gives up what grows too large.
        with pytest.raises(DynamoError, match="max_message_mb"):
            await client.call(instance, ECHO, bytes(2_000_000), EngineContext("r"), Recorder())
        sink = Recorder()
        await client.call(instance, ECHO, b"small", EngineContext("r"), sink)
        await sink.end()
        with pytest.raises(InvalidArgument, match="more than the"):
            await client.call(instance, ECHO, bytes(2_000_000), EngineContext("r"), Recorder())


def _reached(sink: Recorder, token: int) -> bool:
    return bool(sink.items[-1].token_ids[-1] == token)
