"""Calls within one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from dynamo_core import DynamoError, Endpoint, EngineContext, PluginConfig, ServedContext
from dynamo_core.errors import CannotConnect, Disconnected, EngineShutdown, Unknown, WorkerOverloaded
from dynamo_core.protocol import Annotated, Instance
from dynamo_plugin_transport_inproc.transport import InprocTransport
from dynamo_telemetry import Metrics

COUNT = Endpoint("count", int, int)
HERE = Instance(instance_id=7)


class Recorder:
    """A sink that writes down what it is given."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.events: list[Annotated[Any]] = []
        self.ends: list[DynamoError | None] = []
        self.end = asyncio.Event()
        self.began = asyncio.Event()

    def data(self, item: Any) -> None:
        self.items.append(item)
        self.began.set()

    def event(self, item: Annotated[Any]) -> None:
        self.events.append(item)

    def closed(self, error: DynamoError | None) -> None:
        self.ends.append(error)
        self.end.set()


async def up_to(limit: int, ctx: ServedContext) -> AsyncGenerator[int, None]:
    """The handler used here: counts up to the limit, or without end for a negative one."""
    if limit == 13:
        raise WorkerOverloaded("thirteen is too many")

    async def numbers() -> AsyncGenerator[int, None]:
        number = 0
        while number != limit and not ctx.is_stopped():
            yield number
            number += 1
            await asyncio.sleep(0)
        if limit == 3:
            raise Unknown("three breaks")

    return numbers()


@pytest.fixture
async def transport() -> AsyncIterator[InprocTransport]:
    transport = InprocTransport(PluginConfig(), Metrics())
    yield transport
    await transport.aclose()


async def test_items_arrive_in_order_and_the_flag_completes_the_stream(transport: InprocTransport) -> None:
    await transport.serve(7, COUNT, up_to)
    sink = Recorder()

    source = await transport.call(HERE, COUNT, 5, EngineContext("r"), sink)
    await sink.end.wait()
    await source.aclose()

    assert sink.items == [0, 1, 2, 3, 4]
    assert sink.events == [Annotated.from_complete_final()]
    assert sink.ends == [None]


async def test_an_error_item_is_followed_by_the_flag(transport: InprocTransport) -> None:
    await transport.serve(7, COUNT, up_to)
    sink = Recorder()

    await transport.call(HERE, COUNT, 3, EngineContext("r"), sink)
    await sink.end.wait()

    assert [event.event for event in sink.events] == ["error", "complete_final"]
    assert str(sink.events[0].to_error()) == "three breaks"


async def test_a_refusal_is_raised_with_its_type_and_the_sink_is_not_touched(transport: InprocTransport) -> None:
    await transport.serve(7, COUNT, up_to)
    sink = Recorder()

    with pytest.raises(WorkerOverloaded, match="thirteen"):
        await transport.call(HERE, COUNT, 13, EngineContext("r"), sink)

    assert (sink.items, sink.events, sink.ends) == ([], [], [])


async def test_an_instance_that_is_not_here_cannot_be_reached(transport: InprocTransport) -> None:
    with pytest.raises(CannotConnect):
        await transport.call(HERE, COUNT, 1, EngineContext("r"), Recorder())


async def test_stopping_the_callers_context_stops_the_handler(transport: InprocTransport) -> None:
    await transport.serve(7, COUNT, up_to)
    sink, ctx = Recorder(), EngineContext("r")
    await transport.call(HERE, COUNT, -1, ctx, sink)
    await sink.began.wait()

    ctx.stop_generating()
    await sink.end.wait()

    assert sink.events == [Annotated.from_complete_final()]


async def test_after_closing_the_source_the_sink_is_told_nothing_but_the_end(transport: InprocTransport) -> None:
    await transport.serve(7, COUNT, up_to)
    sink = Recorder()
    source = await transport.call(HERE, COUNT, -1, EngineContext("r"), sink)
    await sink.began.wait()

    await source.aclose()
    await source.aclose()

    assert sink.events == []
    assert sink.ends == [None]


async def test_a_paused_call_delivers_nothing_more_until_it_is_resumed(transport: InprocTransport) -> None:
    await transport.serve(7, COUNT, up_to)
    sink = Recorder()
    source = await transport.call(HERE, COUNT, -1, EngineContext("r"), sink)
    await sink.began.wait()

    source.pause()
    await asyncio.sleep(0)
    held = len(sink.items)
    for _ in range(20):
        await asyncio.sleep(0)
    still = len(sink.items)
    source.resume()
    sink.began.clear()
    await sink.began.wait()

    assert still <= held + 1
    assert len(sink.items) > still
    await source.aclose()


async def test_a_draining_endpoint_refuses_and_waits_for_what_runs(transport: InprocTransport) -> None:
    served = await transport.serve(7, COUNT, up_to)
    sink, ctx = Recorder(), EngineContext("r")
    await transport.call(HERE, COUNT, -1, ctx, sink)

    draining = asyncio.ensure_future(served.drain(5))
    await asyncio.sleep(0)
    with pytest.raises(EngineShutdown):
        await transport.call(HERE, COUNT, 1, EngineContext("s"), Recorder())
    ctx.stop_generating()

    assert await draining
    assert sink.events == [Annotated.from_complete_final()]


async def test_closing_an_endpoint_cuts_its_calls_without_the_flag(transport: InprocTransport) -> None:
    served = await transport.serve(7, COUNT, up_to)
    sink = Recorder()
    await transport.call(HERE, COUNT, -1, EngineContext("r"), sink)
    await sink.began.wait()

    await served.aclose()

    assert sink.events == []
    assert [type(error) for error in sink.ends] == [Disconnected]


async def test_an_endpoint_is_served_once(transport: InprocTransport) -> None:
    await transport.serve(7, COUNT, up_to)

    with pytest.raises(ValueError, match="count"):
        await transport.serve(7, COUNT, up_to)
