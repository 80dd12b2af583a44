"""A client that does not read slows its own answer only, and keeps no place that others wait for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from dynamo_core import EngineContext, Principal
from dynamo_core.errors import Cancelled
from dynamo_core.protocol.output import merge_outputs
from dynamo_runtime.dispatch.execution.response_stream import HIGH_WATER, ResponseStream
from dynamo_runtime.dispatch.unread_answers import size_of
from hypothesis import given
from hypothesis import strategies as st

Make = Callable[..., Any]
#: Tokens of an answer that nobody reads: some times what is gathered at once.
LONG = 10 * HIGH_WATER
MB = 1 << 20
NUMBERS = itertools.count()


def bounds(**changes: Any) -> dict[str, Any]:
    """Return bounds that no test reaches, unless it changes them."""
    return {"most_each": 100 * MB, "most_all": 1000 * MB, "stall": 60.0} | changes


def gathered(stage: Any) -> float:
    """Return bytes that are gathered now."""
    held: float | None = stage.metrics.registry.get_sample_value("dynamo_frontend_unread_bytes")
    assert held is not None
    return held


async def another(stage: Any, tenant: str = "default", tokens: int = 12) -> ResponseStream:
    """Return one more request."""
    stage.principal, stage.ctx = Principal(tenant=tenant), EngineContext(f"r{next(NUMBERS)}")
    stream: ResponseStream = await stage.generate(tokens)
    return stream


async def unread(stage: Any, tenant: str = "default", tokens: int = LONG) -> tuple[ResponseStream, Any]:
    """Return a stream of which so many tokens have come and none was taken, and the call at its worker."""
    stream = await another(stage, tenant, LONG + 1)
    call = stage.transport.calls[-1]
    call.give(tokens)
    return stream, call


async def ended(stream: ResponseStream) -> None:
    """Return when the stream has ended, though none of it is taken."""
    over = asyncio.Event()
    stream.on_ready(lambda: over.set() if stream.ended else None)
    async with asyncio.timeout(10):
        await over.wait()


@given(st.lists(st.one_of(st.just("take"), st.integers(1, 3 * HIGH_WATER)), max_size=12))
def test_buffered_items_are_read_whole_and_in_order(make_stage: Make, steps: list[Any]) -> None:
    async def scene() -> None:
        stage = make_stage(unread=bounds(most_each=1000))
        total = 1 + sum(step for step in steps if step != "take")
        stream = await stage.generate(total)
        call, taken = stage.transport.calls[0], []
        for step in steps:
            if step == "take":
                taken += [token for item in stream.take() for token in item.token_ids]
            else:
                call.give(step)
            arrived = [token for item in stream.unread_items() for token in item.token_ids]
            assert [*taken, *arrived] == stage.answer(call.given)
        call.complete()
        async for item in stream:
            taken += item.token_ids

        assert taken == stage.answer(total)
        assert stage.permit.told == [total]
        await stream.aclose()
        assert gathered(stage) == 0

    asyncio.run(scene())


async def test_an_unread_answer_continues_and_frees_its_place_at_the_end(make_stage: Make) -> None:
    stage = make_stage(unread=bounds())
    stream, call = await unread(stage)

    assert not call.paused
    call.complete()
    assert stage.tracker.total_requests == 0
    assert stage.permit.told == [LONG + 1]
    assert len([token async for item in stream for token in item.token_ids]) == LONG + 1
    await stream.aclose()


async def test_answer_at_its_bound_is_paused_until_it_is_read(make_stage: Make) -> None:
    stage = make_stage(unread=bounds(most_each=LONG))
    stream, call = await unread(stage)
    assert call.paused

    while stream.waiting:
        stream.take()

    assert not call.paused
    assert stream.error is None
    await stream.aclose()


async def test_paused_answer_that_is_not_read_is_given_up(make_stage: Make) -> None:
    stage = make_stage(unread=bounds(most_each=LONG, stall=0.1))
    stream, call = await unread(stage)
    assert call.paused

    await ended(stream)

    assert isinstance(stream.error, Cancelled)
    assert (stage.tracker.total_requests, gathered(stage), stream.waiting) == (0, 0, 0)
    assert stage.permit.told == [0]
    await stream.aclose()


async def test_unread_answer_is_given_up_once_others_wait_for_its_worker(make_stage: Make) -> None:
    stage = make_stage(workers=1, unread=bounds(stall=0.1))
    stream, call = await unread(stage)
    watch = asyncio.create_task(ended(stream))
    await asyncio.sleep(0.5)
    alone = watch.done()

    waiting = await another(stage)
    await watch

    assert not alone
    assert not call.paused
    assert isinstance(stream.error, Cancelled)
    assert stage.tracker.total_requests == 1
    await stream.aclose()
    await waiting.aclose()


async def test_answer_of_a_slow_client_is_kept_though_others_wait(make_stage: Make) -> None:
    stage = make_stage(workers=1, unread=bounds(stall=1.0))
    stream, call = await unread(stage)
    waiting = await another(stage)
    for _ in range(15):
        assert stream.waiting, "it has caught up"
        stream.take()
        call.give(HIGH_WATER)
        await asyncio.sleep(0.15)

    assert stream.error is None
    await stream.aclose()
    await waiting.aclose()


async def test_largest_unread_answer_of_the_tenant_that_has_most_is_given_up(make_stage: Make) -> None:
    stage = make_stage()
    probe, _ = await unread(stage)
    one = sum(map(size_of, merge_outputs(list(probe.unread_items()))))
    await probe.aclose()

    stage = make_stage(unread=bounds(most_all=5 * one))
    small = [(await unread(stage, "greedy", LONG // 4))[0] for _ in range(3)]
    large, _ = await unread(stage, "greedy")
    modest = [(await unread(stage, f"tenant {number}"))[0] for number in range(3)]
    assert not any(stream.ended for stream in (*small, large, *modest))

    last, _ = await unread(stage, "tenant 9")

    assert isinstance(large.error, Cancelled)
    assert not any(stream.ended for stream in (*small, *modest, last))
    for stream in (*small, large, *modest, last):
        await stream.aclose()
    assert gathered(stage) == 0


@pytest.mark.parametrize("whole", [True, False])
async def test_reader_that_comes_back_to_a_given_up_answer_gets_its_error(make_stage: Make, whole: bool) -> None:
    stage = make_stage(unread=bounds())
    stream, call = await unread(stage, tokens=HIGH_WATER + 1)
    if whole:
        call.complete()
    stream.give_up(Cancelled("clients do not read"))

    with pytest.raises(Cancelled, match="clients do not read"):
        await anext(stream)
    await stream.aclose()
