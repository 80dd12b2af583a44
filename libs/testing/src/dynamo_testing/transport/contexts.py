"""Checks of the logging context of calls: each request logs its own ids, whichever opened the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from typing import Any

from dynamo_core.contracts.transports.call import ServedContext
from dynamo_core.protocol.annotated import Annotated

from dynamo_testing.optional_packages import pytest
from dynamo_testing.transport.harness import Ask, Call, Planes, Recorder, Stage, Tick, TransportHarness

UNSET = "no request"

_whose: ContextVar[str] = ContextVar("whose", default=UNSET)


class _Noting(Recorder):
    """A sink that notes the context of its calls."""

    def __init__(self, wait: float) -> None:
        super().__init__(wait)
        self.of_data: set[str] = set()
        self.of_events: set[str] = set()
        self.of_ends: set[str] = set()

    def data(self, item: Any) -> None:
        self.of_data.add(_whose.get())
        super().data(item)

    def event(self, item: Annotated[Any]) -> None:
        self.of_events.add(_whose.get())
        super().event(item)

    def closed(self, error: Any) -> None:
        self.of_ends.add(_whose.get())
        super().closed(error)


class ContextChecks(TransportHarness):
    """Log lines carry the ids that are bound in a request's context, and no other request's."""

    async def test_callbacks_of_a_call_run_in_its_own_context(self, stage: Stage) -> None:
        served: dict[int, str] = {}

        async def body(ask: Ask, ctx: ServedContext) -> AsyncGenerator[Any, None]:
            served[ask.stream] = _whose.get()
            for number in range(3):
                yield Tick(number)
                await asyncio.sleep(0)
            yield Annotated.from_error(ValueError("an error in mid-stream"))

        await stage.serve(body)

        calls = [await _called(stage, number) for number in range(3)]
        for call in calls:
            await call.sink.end()

        for number, call in enumerate(calls):
            sink, own = call.sink, f"request {number}"
            assert isinstance(sink, _Noting)
            assert sink.of_events == sink.of_ends == {own}
            # Nothing is done per item that is not needed: so its context may be empty, but not another request's.
            assert sink.of_data <= {own, UNSET}
            assert served[number] in (own, UNSET)

    async def test_a_broken_connection_ends_each_call_in_its_own_context(self, planes: Planes, stage: Stage) -> None:
        if not self.CAN_BREAK_CONNECTION:
            pytest.skip("CAN_BREAK_CONNECTION is False")
        await stage.serve()
        calls = [await _called(stage, number) for number in range(3)]
        for call in calls:
            await call.sink.arrived()

        await self.break_connection(planes)

        for number, call in enumerate(calls):
            await call.sink.end()
            assert isinstance(call.sink, _Noting)
            assert call.sink.of_ends == {f"request {number}"}


async def _called(stage: Stage, number: int) -> Call:
    """Return a call that was made in a context of its own."""

    async def make() -> Call:
        _whose.set(f"request {number}")
        return await stage.call(Ask(stream=number), sink=_Noting(stage.wait))

    async with asyncio.TaskGroup() as group:
        # A task has a copy of the context, to which it may do what it likes.
        making = group.create_task(make())
    return making.result()
