"""OutputStream a stream that may be stopped in any phase."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from dynamo_core import GenerateContext, TaskSet
from dynamo_plugin_engine_vllm.output_stream import OutputStream
from dynamo_testing import mock_context


class Request:
    """A stream as vLLM's: leaving it, or cancelling its reader, frees the request."""

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        self.freed = False
        self.waiting = asyncio.Event()

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            while True:
                self.waiting.set()
                output = await self.outputs.get()
                if isinstance(output, Exception):
                    raise output
                if output is None:
                    return
                yield output
        finally:
            self.freed = True

    async def abort(self) -> None:
        self.outputs.put_nowait(-1)


@pytest.fixture
async def tasks() -> AsyncIterator[TaskSet]:
    tasks = TaskSet()
    yield tasks
    await tasks.aclose()


def reading_of(request: Request, tasks: TaskSet, *, hold: bool = False) -> OutputStream:
    return OutputStream(request.stream(), abort=request.abort, tasks=tasks, hold=hold)


async def read(reading: OutputStream, ctx: GenerateContext) -> list[int]:
    try:
        with reading.stopped_by(ctx):
            return [output async for output in reading]
    finally:
        await reading.aclose()


async def test_all_outputs_come_in_order_up_to_the_end(tasks: TaskSet) -> None:
    request = Request()
    for output in (1, 2, 3, None):
        request.outputs.put_nowait(output)

    assert await read(reading_of(request, tasks), mock_context()) == [1, 2, 3]
    assert request.freed


@pytest.mark.parametrize("before", [0, 1])
async def test_an_error_comes_as_it_is(tasks: TaskSet, before: int) -> None:
    request = Request()
    for output in (*range(before), ValueError("as it is")):
        request.outputs.put_nowait(output)

    with pytest.raises(ValueError, match="as it is"):
        await read(reading_of(request, tasks), mock_context())


async def test_a_stop_before_the_first_output_ends_the_reading_and_frees_the_request(tasks: TaskSet) -> None:
    request, ctx = Request(), mock_context()
    reader = asyncio.create_task(read(reading_of(request, tasks), ctx))
    await request.waiting.wait()

    ctx.stop_generating()

    assert await reader == []
    assert request.freed


async def test_a_stop_later_has_vllm_send_a_last_output(tasks: TaskSet) -> None:
    request, ctx = Request(), mock_context()
    request.outputs.put_nowait(1)
    reading = reading_of(request, tasks)
    with reading.stopped_by(ctx):
        assert await anext(reading) == 1
        ctx.stop_generating()
        assert await anext(reading) == -1
    await reading.aclose()
    assert request.freed


async def freed_after_its_first_output(request: Request, tasks: TaskSet) -> None:
    assert not request.freed
    request.outputs.put_nowait(1)
    assert await tasks.join(5)
    assert request.freed


async def cancelled(request: Request, reading: OutputStream) -> None:
    """Return once a reader is cancelled that waits for the first output."""
    reader = asyncio.create_task(read(reading, mock_context()))
    await request.waiting.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


async def test_a_request_that_may_still_receive_its_cache_is_freed_after_its_first_output(tasks: TaskSet) -> None:
    request, ctx = Request(), mock_context()
    reader = asyncio.create_task(read(reading_of(request, tasks, hold=True), ctx))
    await request.waiting.wait()

    ctx.stop_generating()
    assert await reader == []
    await freed_after_its_first_output(request, tasks)


async def test_a_held_request_stopped_early_still_runs_to_fetch_its_cache(tasks: TaskSet) -> None:
    request, ctx = Request(), mock_context()
    ctx.stop_generating()

    assert await read(reading_of(request, tasks, hold=True), ctx) == []
    assert request.waiting.is_set()
    await freed_after_its_first_output(request, tasks)


async def test_a_held_request_with_a_cancelled_reader_is_freed_after_its_first_output(tasks: TaskSet) -> None:
    request = Request()
    await cancelled(request, reading_of(request, tasks, hold=True))

    await freed_after_its_first_output(request, tasks)


async def test_a_reader_that_is_cancelled_frees_the_request_at_once_otherwise(tasks: TaskSet) -> None:
    request = Request()
    await cancelled(request, reading_of(request, tasks))

    assert request.freed


async def test_held_requests_are_freed_at_the_end_of_the_engine(tasks: TaskSet) -> None:
    request, ctx = Request(), mock_context()
    reader = asyncio.create_task(read(reading_of(request, tasks, hold=True), ctx))
    await request.waiting.wait()
    ctx.stop_generating()
    await reader

    await tasks.aclose()

    assert request.freed
