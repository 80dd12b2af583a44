"""The contexts for tests written by hand."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from dynamo_core import GenerateContext
from dynamo_testing import cancelling_context, mock_context


async def test_a_mock_context_is_not_stopped() -> None:
    ctx = mock_context("r1", metadata={"traceparent": "…"})

    assert isinstance(ctx, GenerateContext)
    assert (ctx.id, ctx.metadata) == ("r1", {"traceparent": "…"})
    assert not ctx.is_stopped()
    ctx.stop_generating()
    assert ctx.is_stopped()


def test_a_mock_context_needs_no_event_loop() -> None:
    assert not mock_context().is_killed()


async def test_a_cancelling_context_stops_itself() -> None:
    ctx = cancelling_context(0.01)
    calls: list[str] = []
    ctx.on_stop(lambda: calls.append("stopped"))

    assert not ctx.is_stopped()
    async with asyncio.timeout(10):
        await ctx.stopped()

    assert calls == ["stopped"]
    assert not ctx.is_killed()


def test_a_cancelling_context_needs_an_event_loop() -> None:
    with pytest.raises(RuntimeError):
        cancelling_context(1)


def timers() -> int:
    """Return timers of the running loop that will still fire."""
    scheduled = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    return sum(not timer.cancelled() for timer in scheduled)


async def test_the_timer_of_a_cancelling_context_ends_when_it_is_stopped_before() -> None:
    before = timers()
    ctx = cancelling_context(3600)
    assert timers() == before + 1

    ctx.stop_generating()

    assert timers() == before


async def test_the_timer_of_a_cancelling_context_ends_with_it() -> None:
    before = timers()
    ctx = cancelling_context(3600)
    gone = weakref.ref(ctx.inner())

    del ctx
    gc.collect()

    assert gone() is None
    assert timers() == before


async def test_a_cancelling_context_has_no_task_of_its_own() -> None:
    before = asyncio.all_tasks()

    ctx = cancelling_context(3600)

    assert asyncio.all_tasks() == before
    ctx.stop_generating()
