"""Streams of the mocker over its scheduler: order, slots, cancellation, slow readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

import pytest
from dynamo_core import (
    BackendError,
    FinishReason,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
)
from dynamo_plugin_engine_mocker.clock import VirtualClock
from dynamo_plugin_engine_mocker.engine import MockerEngine
from dynamo_plugin_engine_mocker.sequence import MAX_BACKLOG
from dynamo_testing.waiting import turns
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.engines.mocker.tests.conftest import ask, context, running


def request(max_tokens: int) -> PreprocessedRequest:
    return ask([32, 33, 34], max_tokens)


def stream(
    engine: MockerEngine, asked: PreprocessedRequest, ctx: GenerateContext | None = None
) -> AsyncGenerator[LLMEngineOutput, None]:
    return cast("AsyncGenerator[LLMEngineOutput, None]", engine.generate(asked, ctx or context()))


async def collect(
    engine: MockerEngine, asked: PreprocessedRequest, ctx: GenerateContext | None = None
) -> list[LLMEngineOutput]:
    async with aclosing(stream(engine, asked, ctx)) as items:
        return [item async for item in items]


def tokens(items: list[LLMEngineOutput]) -> list[int]:
    return [token for item in items for token in item.token_ids]


@pytest.mark.parametrize("keys", [{}, {"speedup_ratio": 0}, {"fixed_itl_ms": 5}])
async def test_a_prompt_reader_gets_one_token_per_item_and_one_terminal_last(keys: dict[str, Any]) -> None:
    async with running(**keys) as engine:
        items = await collect(engine, request(10))

    assert [len(item.token_ids) for item in items] == [1] * 10
    assert [item.finish_reason for item in items] == [None] * 9 + [FinishReason.LENGTH]


async def test_a_reader_that_comes_back_late_gets_everything_as_one_item() -> None:
    async with running() as engine, aclosing(stream(engine, request(10))) as items:
        first = await anext(items)
        await turns(100)
        assert engine.running_requests == 0

        second = await anext(items)

    assert len(first.token_ids) == 1
    assert len(second.token_ids) == 9
    assert second.finish_reason is FinishReason.LENGTH


async def test_requests_beyond_the_slots_wait_in_order_of_arrival() -> None:
    order: list[int] = []

    async def run(number: int) -> None:
        async for item in engine.generate(request(5), context()):
            if number not in order:
                order.append(number)
            assert engine.running_requests <= 2
            del item

    async with running(max_num_seqs=2) as engine:
        await asyncio.gather(*(run(number) for number in range(9)))

    assert order == [*range(9)]


@settings(deadline=None)
@given(
    ways=st.lists(st.tuples(st.sampled_from(["stop", "kill", "close", "end"]), st.integers(0, 30)), max_size=12),
    slots=st.integers(1, 4),
    fast=st.booleans(),
)
def test_however_and_whenever_streams_end_every_slot_comes_back(
    ways: list[tuple[str, int]], slots: int, fast: bool
) -> None:
    async def one(engine: MockerEngine, way: str, after: int) -> None:
        ctx = context()
        read = 0
        last = None
        async with aclosing(stream(engine, request(20), ctx)) as items:
            if after == 0 and way in ("stop", "kill"):
                ctx.stop_generating() if way == "stop" else ctx.kill()
            async for item in items:
                assert last is None, "an item after the terminal"
                last = item.finish_reason
                read += len(item.token_ids)
                if read >= after and last is None:
                    if way == "stop":
                        ctx.stop_generating()
                    elif way == "kill":
                        ctx.kill()
                    elif way == "close":
                        return
        assert last is (FinishReason.CANCELLED if ctx.is_stopped() else FinishReason.LENGTH)

    async def all_of_them() -> None:
        async with running(max_num_seqs=slots, speedup_ratio=0 if fast else 1) as engine:
            await asyncio.gather(*(one(engine, way, after) for way, after in ways))
            assert (engine.running_requests, engine.waiting_requests) == (0, 0)
            assert len(tokens(await collect(engine, request(3)))) == 3

    asyncio.run(all_of_them())


async def test_a_stream_that_is_never_read_holds_nothing() -> None:
    async with running() as engine:
        items = stream(engine, request(10))
        await turns()

        assert (engine.running_requests, engine.waiting_requests) == (0, 0)
        await items.aclose()


async def test_production_stops_at_the_backlog_of_an_absent_reader() -> None:
    async with running(speedup_ratio=0) as engine, aclosing(stream(engine, request(5000))) as items:
        await anext(items)
        await turns(2 * MAX_BACKLOG)

        waiting = await anext(items)

        assert MAX_BACKLOG <= len(waiting.token_ids) <= MAX_BACKLOG + 1
        assert engine.running_requests == 1
        rest = [item async for item in items]
        assert 1 + len(waiting.token_ids) + len(tokens(rest)) == 5000
        assert rest[-1].finish_reason is FinishReason.LENGTH


async def test_cleanup_ends_running_and_waiting_streams_with_engine_shutdown() -> None:
    clock = VirtualClock()
    async with running(clock=clock, max_num_seqs=1) as engine:
        clock.pause()
        tasks = [asyncio.ensure_future(collect(engine, request(5))) for _ in range(3)]
        await turns()

        await engine.cleanup()

        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, BackendError.EngineShutdown)


async def test_cleanup_before_the_first_step_ends_streams_too() -> None:
    async with running() as engine:
        items = stream(engine, request(5))
        first = asyncio.ensure_future(anext(items))
        await asyncio.sleep(0)

        await engine.cleanup()

        with pytest.raises(BackendError.EngineShutdown):
            await first


async def test_draining_refuses_new_requests_and_finishes_running_ones() -> None:
    async with running() as engine, aclosing(stream(engine, request(10))) as items:
        first = await anext(items)

        await engine.drain()

        with pytest.raises(BackendError.EngineShutdown, match="draining"):
            await collect(engine, request(1))
        assert len(tokens([first, *[item async for item in items]])) == 10
