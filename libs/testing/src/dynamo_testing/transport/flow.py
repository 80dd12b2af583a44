"""Checks of flow control: many streams at once, and a slow reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from dynamo_core.contracts.transports.call import ServedContext

from dynamo_testing.transport.harness import Ask, Call, Stage, Tick, TransportHarness

STREAMS = 64

#: Items of a stream that is paused, and the size of each: more than any buffer between the two should hold.
LONG = 2000
PAD = bytes(16 * 1024)


async def plenty(ask: Ask, ctx: ServedContext) -> AsyncGenerator[Tick, None]:
    """Yield a long stream of large items for stream 0, a short one of small items for the others."""
    for number in range(ask.limit):
        if ctx.is_stopped():
            return
        yield Tick(number, ask.stream, b"" if ask.stream else PAD)
        await asyncio.sleep(0)


class FlowChecks(TransportHarness):
    """Streams do not touch each other."""

    async def test_many_streams_at_once_do_not_mix(self, stage: Stage) -> None:
        await stage.serve()

        async with asyncio.TaskGroup() as group:
            collecting = [group.create_task(stage.collect(Ask(limit=50, stream=number))) for number in range(STREAMS)]

        for stream, task in enumerate(collecting):
            assert [(item.stream, item.number) for item in task.result().items] == [(stream, n) for n in range(50)]

    async def test_stopping_one_of_many_streams_leaves_the_others_alone(self, stage: Stage) -> None:
        await stage.serve()
        calls = [await stage.call(Ask(stream=number)) for number in range(8)]
        for call in calls:
            await call.sink.arrived()

        await stage.close(calls[3].source)
        others = calls[:3] + calls[4:]
        for call in others:
            await call.sink.arrived(len(call.sink.items) + 20)

        stopped = [visit.request.stream for visit in stage.visits if visit.stops]
        assert stopped == [3]
        for call in others:
            await stage.close(call.source)

    async def test_a_paused_stream_waits_while_others_go_on(self, stage: Stage) -> None:
        await stage.serve(plenty)

        call = await self._paused(stage)

        visit = stage.visits[0]
        assert len(call.sink.items) < LONG, "all items were delivered although the sink asked for a pause"
        assert visit.yielded < LONG, "the handler was not held back: all it yields is kept somewhere"
        await stage.close(call.source)

    async def test_a_resumed_stream_goes_on_without_loss(self, stage: Stage) -> None:
        await stage.serve(plenty)
        call = await self._paused(stage)

        call.source.resume()
        await call.sink.end()

        assert [item.number for item in call.sink.items] == list(range(LONG))
        assert call.sink.error() is None

    async def test_a_paused_stream_can_be_closed(self, stage: Stage) -> None:
        await stage.serve(plenty)
        call = await self._paused(stage)

        await stage.close(call.source)

        await stage.happens(stage.visits[0].over, "the end of a handler that was held back")

    async def test_a_paused_stream_can_be_stopped_by_its_context(self, stage: Stage) -> None:
        await stage.serve(plenty)
        call = await self._paused(stage)

        call.ctx.stop_generating()

        await stage.happens(stage.visits[0].over, "the end of a handler that was held back")

    async def _paused(self, stage: Stage) -> Call:
        """Return a long stream that was asked to pause, once nothing of it arrives and nothing is made any more."""
        long = await stage.call(Ask(limit=LONG))
        await long.sink.arrived()
        long.source.pause()
        visit = await stage.visit()
        held, quiet = (-1, -1), 0
        while quiet < 10:
            # Each of these goes there and back: what was under way for the long stream has arrived by then.
            short = await stage.collect(Ask(limit=10, stream=1))
            assert len(short.items) == 10
            now = (len(long.sink.items), visit.yielded)
            quiet = quiet + 1 if now == held else 0
            held = now
        return long
