"""Checks of endings: draining, closing one side or the other, and a broken connection."""

from __future__ import annotations

import asyncio

from dynamo_core.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoError,
    EngineShutdown,
    StreamIncomplete,
)

from dynamo_testing.optional_packages import pytest
from dynamo_testing.transport.caller_cancellation import deaf
from dynamo_testing.transport.harness import Ask, Call, Recorder, Stage, TransportHarness
from dynamo_testing.waiting import turns

#: What a caller may be told when it comes too late.
GONE = (CannotConnect, ConnectionTimeout, EngineShutdown)
#: What a reader may be told when the other side went away in mid-stream.
LOST = (Disconnected, StreamIncomplete, EngineShutdown)


class EndChecks(TransportHarness):
    """Checks that no cut stream ends well, and nothing is left behind."""

    async def test_a_draining_endpoint_refuses_new_calls(self, stage: Stage) -> None:
        served = await stage.serve()
        call = await stage.call()
        await call.sink.arrived()

        async with asyncio.TaskGroup() as group:
            draining = group.create_task(served.drain(stage.wait))
            await turns()
            with pytest.raises(GONE):
                await stage.call(Ask(limit=1))
            call.ctx.stop_generating()

        assert draining.result() is True
        assert len(stage.visits) == 1, "the handler was called while draining"

    async def test_draining_lets_running_calls_finish(self, stage: Stage) -> None:
        served = await stage.serve()
        calls = [await stage.call(Ask(limit=50, stream=number)) for number in range(4)]

        async with stage.deadline("Served.drain"):
            in_time = await served.drain(stage.wait)
        for call in calls:
            await call.sink.end()

        assert in_time is True
        assert [len(call.sink.items) for call in calls] == [50] * 4
        assert [call.sink.error() for call in calls] == [None] * 4

    async def test_draining_reports_a_timeout(self, stage: Stage) -> None:
        served = await stage.serve()
        call = await stage.call()
        await call.sink.arrived()

        async with stage.deadline("Served.drain"):
            in_time = await served.drain(0.05)

        assert in_time is False
        await stage.close(call.source)

    async def test_output_of_a_drained_endpoint_arrives_before_the_close(self, stage: Stage) -> None:
        served = await stage.serve()
        call = await stage.call(Ask(limit=3))
        visit = await stage.visit()
        # The call has ended in this turn of the event loop, and what it said last has not been sent.
        await stage.happens(visit.over, "the end of the call")

        async with stage.deadline("Served.drain and Transport.aclose"):
            assert await served.drain(stage.wait) is True
            await stage.planes.server.aclose()

        await call.sink.end()
        assert call.sink.outcome() is None
        assert [item.number for item in call.sink.items] == [0, 1, 2]

    async def test_an_endpoint_without_calls_is_drained_at_once(self, stage: Stage) -> None:
        served = await stage.serve()

        async with stage.deadline("Served.drain"):
            assert await served.drain(10 * stage.wait) is True

    async def test_closing_the_endpoint_ends_its_streams_with_an_error(self, stage: Stage) -> None:
        served = await stage.serve(deaf)
        calls = await _running(stage)

        async with stage.deadline("Served.aclose"):
            await served.aclose()

        await _all_lost(calls)

    async def test_closing_the_endpoint_ends_its_handlers(self, stage: Stage) -> None:
        served = await stage.serve(deaf)
        await _running(stage)

        async with stage.deadline("Served.aclose"):
            await served.aclose()
            await served.aclose()

        assert all(visit.left.is_set() for visit in stage.visits), "a handler still runs after Served.aclose"
        assert [visit.deferred for visit in stage.visits] == [1, 1, 1]

    async def test_an_endpoint_that_was_closed_cannot_be_called(self, stage: Stage) -> None:
        served = await stage.serve()
        await stage.collect(Ask(limit=1))

        await served.aclose()

        with pytest.raises(GONE):
            await stage.call(Ask(limit=1))

    async def test_closing_one_endpoint_leaves_another_alone(self, stage: Stage) -> None:
        served = await stage.serve(instance_id=1)
        await stage.serve(instance_id=2)
        call = await stage.call(instance=stage.instance(2))
        await call.sink.arrived()

        await served.aclose()
        await call.sink.arrived(len(call.sink.items) + 5)
        call.ctx.stop_generating()
        await call.sink.end()

        assert call.sink.error() is None

    async def test_closing_the_serving_transport_ends_all_streams_with_an_error(self, stage: Stage) -> None:
        await stage.serve(deaf)
        calls = await _running(stage)

        async with stage.deadline("Transport.aclose"):
            await stage.planes.server.aclose()

        await _all_lost(calls)
        assert all(visit.left.is_set() for visit in stage.visits), "a handler still runs after Transport.aclose"

    async def test_closing_the_calling_transport_ends_all_streams_and_their_handlers(self, stage: Stage) -> None:
        await stage.serve(deaf)
        calls = await _running(stage)

        async with stage.deadline("Transport.aclose"):
            await stage.planes.client.aclose()

        for call in calls:
            await call.sink.end()
            assert call.sink.outcome() is not None, "a stream that was cut ended well"
        for visit in stage.visits:
            await stage.happens(visit.left, "the end of the handler")

    async def test_a_source_can_be_closed_after_its_transport(self, stage: Stage) -> None:
        await stage.serve(deaf)
        (call, *_) = await _running(stage)

        async with stage.deadline("Transport.aclose"):
            await stage.planes.client.aclose()
        await stage.close(call.source)

        await call.sink.end()
        assert len(call.sink.ends) == 1

    async def test_transports_can_be_closed_twice_and_leave_no_task_behind(self, stage: Stage) -> None:
        before = asyncio.all_tasks()
        await stage.serve(deaf)
        await _running(stage)

        async with stage.deadline("Transport.aclose"):
            for _ in range(2):
                await stage.planes.client.aclose()
                await stage.planes.server.aclose()

        left = [task.get_name() for task in asyncio.all_tasks() - before if not task.done()]
        assert left == []

    async def test_a_broken_connection_ends_every_stream(self, stage: Stage) -> None:
        self._needs(self.CAN_BREAK_CONNECTION, "CAN_BREAK_CONNECTION")
        await stage.serve(deaf)
        calls = await _running(stage)

        await self.break_connection(stage.planes)

        for call in calls:
            await call.sink.end()
            error = call.sink.outcome()
            assert isinstance(error, Disconnected), f"the stream ended with {error!r}"

    async def test_a_broken_connection_ends_the_handler_without_a_stop(self, stage: Stage) -> None:
        self._needs(self.CAN_BREAK_CONNECTION, "CAN_BREAK_CONNECTION")
        await stage.serve(deaf)
        await _running(stage)

        await self.break_connection(stage.planes)

        for visit in stage.visits:
            await stage.happens(visit.left, "the end of the handler")
            assert visit.stops == 0, "the caller did not give up, but the handler was told so"

    async def test_after_a_broken_connection_the_next_call_connects_anew(self, stage: Stage) -> None:
        self._needs(self.CAN_BREAK_CONNECTION, "CAN_BREAK_CONNECTION")
        call = await stage.running()
        await self.break_connection(stage.planes)
        await call.sink.end()

        sink = await stage.collect(Ask(limit=3))

        assert len(sink.items) == 3
        assert sink.error() is None

    async def test_an_item_lost_on_the_way_is_noticed(self, stage: Stage) -> None:
        self._needs(self.CAN_LOSE_AN_ITEM, "CAN_LOSE_AN_ITEM")
        call = await stage.running()

        await self.lose_an_item(stage.planes)
        await call.sink.end()
        await turns()

        error = call.sink.outcome()
        assert isinstance(error, StreamIncomplete), f"the stream ended with {error!r}"
        numbers = [item.number for item in call.sink.items]
        assert numbers == list(range(len(numbers))), "items that follow the gap were delivered"

    def _needs(self, can: bool, name: str) -> None:
        if not can:
            pytest.skip(f"{name} is False")


async def _running(stage: Stage) -> list[Call]:
    """Return three streams in the middle of their course."""
    calls = [await stage.call(sink=Recorder(stage.wait)) for _ in range(3)]
    for call in calls:
        await call.sink.arrived()
    return calls


async def _all_lost(calls: list[Call]) -> None:
    for call in calls:
        await call.sink.end()
        error: DynamoError | None = call.sink.outcome()
        assert error is not None, "a stream that was cut ended well"
        assert isinstance(error, LOST), f"the stream ended with {error!r}"
        assert len(call.sink.ends) == 1
