"""A reader in no hurry is called once enough waits, and always at the end."""

from __future__ import annotations

import asyncio

from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.output import chunk, merge_outputs
from dynamo_runtime.dispatch.execution.response_stream import FlushQueue, ResponseStream


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_reader_in_no_hurry_is_called_when_enough_waits_and_at_the_end() -> None:
    stream = ResponseStream(merge_outputs, FlushQueue())
    sink = stream.begin()
    seen: list[list[int]] = []
    stream.on_ready(lambda: seen.append([token for item in stream.take() for token in item.token_ids]), coalesce=3)

    sink.data(chunk.token(1))
    sink.data(chunk.token(2))
    await turns()
    early = list(seen)
    sink.data(chunk.token(3))
    await turns()
    enough = list(seen)
    sink.data(chunk.token(4))
    sink.event(Annotated.from_complete_final())
    await turns()

    assert early == []
    assert enough == [[1, 2, 3]]
    assert seen == [[1, 2, 3], [4]]
    await stream.aclose()


async def test_a_reader_that_comes_after_the_end_is_called_though_little_waits() -> None:
    stream = ResponseStream(merge_outputs, FlushQueue())
    sink = stream.begin()
    sink.data(chunk.token(1))
    sink.event(Annotated.from_complete_final())
    called = asyncio.Event()

    stream.on_ready(called.set, coalesce=100)

    async with asyncio.timeout(10):
        await called.wait()
    await stream.aclose()
