"""Checks of callers that give up: by context, by source, by closing, or before acceptance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from dynamo_core.contracts.transports import serving
from dynamo_core.contracts.transports.call import ServedContext
from dynamo_core.errors import DynamoError

from dynamo_testing.optional_packages import pytest
from dynamo_testing.transport.harness import Ask, Recorder, Stage, Tick, TransportHarness, Visit, count
from dynamo_testing.waiting import turns

#: What a handler says last once it has been stopped.
LAST = Tick(-1)


async def obedient(ask: Ask, ctx: ServedContext) -> AsyncGenerator[Tick, None]:
    """Count until it is stopped, then say so and end."""
    async for tick in count(ask, ctx):
        yield tick
    yield LAST


async def deaf(ask: Ask, ctx: ServedContext) -> AsyncGenerator[Tick, None]:
    """Yield one item and never look at its context."""
    yield Tick(0)
    await asyncio.Event().wait()


async def closed(request: Any, ctx: ServedContext) -> None:
    """Let no call in before it is stopped."""
    await ctx.stopped()


class StopChecks(TransportHarness):
    """Every way of giving up reaches the handler, once."""

    async def test_stopping_the_callers_context_stops_the_handlers(self, stage: Stage) -> None:
        call = await stage.running(obedient)

        call.ctx.stop_generating()
        call.ctx.stop_generating()
        await call.sink.end()

        visit = stage.visits[0]
        assert visit.stops == 1
        assert not visit.ctx.is_killed()

    async def test_killing_the_callers_context_kills_the_handlers(self, stage: Stage) -> None:
        call = await stage.running(obedient)

        call.ctx.kill()
        await call.sink.end()

        visit = stage.visits[0]
        assert visit.stops == 1
        assert visit.ctx.is_killed()

    async def test_after_source_stop_the_stream_ends_by_itself(self, stage: Stage) -> None:
        call = await stage.running(obedient)

        call.source.stop()
        call.source.stop()
        await call.sink.end()

        assert stage.visits[0].stops == 1
        assert not stage.visits[0].ctx.is_killed()
        assert call.sink.items[-1] == LAST
        assert call.sink.error() is None

    async def test_closing_an_unfinished_call_stops_the_handler_once(self, stage: Stage) -> None:
        call = await stage.running(obedient)
        visit = stage.visits[0]

        await stage.close(call.source)
        await stage.happens(visit.over, "the end of the handler")

        assert visit.stops == 1

    async def test_closing_runs_every_finally_of_the_handler(self, stage: Stage) -> None:
        call = await stage.running(obedient)
        visit = stage.visits[0]

        await stage.close(call.source)
        if stage.planes.server.CROSS_PROCESS:
            await stage.happens(visit.left, "the end of the handler")

        assert visit.left.is_set(), "the handler still runs after Source.aclose has returned"

    async def test_a_closed_call_ends_its_sink_exactly_once(self, stage: Stage) -> None:
        call = await stage.running(obedient)

        await stage.close(call.source)
        await call.sink.end()
        told = list(call.sink.log)
        await stage.collect(Ask(limit=3))
        await turns()

        assert len(call.sink.ends) == 1
        assert call.sink.log == told

    async def test_closing_twice_at_once_and_later_is_safe(self, stage: Stage) -> None:
        call = await stage.running(obedient)

        async with asyncio.TaskGroup() as group:
            group.create_task(stage.close(call.source))
            group.create_task(stage.close(call.source))
        await stage.close(call.source)

        await call.sink.end()
        assert len(call.sink.ends) == 1

    async def test_a_handler_that_does_not_stop_is_cancelled(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(serving, "STOP_GRACE", 0.05)
        call = await stage.running(deaf)

        call.source.stop()

        await stage.happens(stage.visits[0].left, "the end of a handler that ignores its context")
        await call.sink.end()

    async def test_closing_does_not_wait_for_ever_on_a_handler_that_does_not_stop(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(serving, "STOP_GRACE", 0.05)
        call = await stage.running(deaf)

        await stage.close(call.source)

        await stage.happens(stage.visits[0].left, "the end of a handler that ignores its context")

    async def test_a_stop_before_the_acceptance_reaches_the_handler(self, stage: Stage) -> None:
        await stage.serve(obedient, door=closed)
        ctx = stage.context()
        async with asyncio.TaskGroup() as group:
            group.create_task(_give_up(stage, Recorder(stage.wait), ctx))
            visit = await stage.visit()
            ctx.stop_generating()

        await stage.happens(visit.over, "the end of the handler")
        assert visit.stops == 1

    async def test_a_context_that_is_stopped_already_never_runs_a_handler_unstopped(self, stage: Stage) -> None:
        await stage.serve(obedient)
        ctx = stage.context()
        ctx.stop_generating()
        sink = Recorder(stage.wait)

        await _give_up(stage, sink, ctx)

        for visit in stage.visits:
            await stage.happens(visit.over, "the end of the handler")
            assert visit.stops == 1

    async def test_a_call_cancelled_before_its_acceptance_ends_its_handler(self, stage: Stage) -> None:
        visit = await _cancelled_at_the_door(stage, Recorder(stage.wait))

        assert visit.stops <= 1
        assert visit.deferred == 1

    async def test_a_call_cancelled_before_its_acceptance_leaves_the_sink_untouched(self, stage: Stage) -> None:
        sink = Recorder(stage.wait)

        await _cancelled_at_the_door(stage, sink)
        await turns()

        assert sink.log == []


async def _cancelled_at_the_door(stage: Stage, sink: Recorder) -> Visit:
    """Return a call that is cancelled before its acceptance, once its handler has ended."""
    await stage.serve(obedient, door=closed)
    async with asyncio.TaskGroup() as group:
        calling = group.create_task(stage.call(sink=sink))
        visit = await stage.visit()
        calling.cancel()
    await stage.happens(visit.over, "the end of the handler")
    return visit


async def _give_up(stage: Stage, sink: Recorder, ctx: Any) -> None:
    """Check that a call whose context is stopped is refused, or accepted and soon over."""
    with suppress(DynamoError):
        await stage.call(sink=sink, ctx=ctx)
        await sink.end()
