"""Checks of refusals and errors: typed from end to end, and raised at the right place."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from dynamo_core.contracts.transports.call import Endpoint, ServedContext
from dynamo_core.errors import CannotConnect, DynamoError, EngineShutdown, Unknown, WireError, from_wire, to_wire
from dynamo_core.protocol.records import Instance

from dynamo_testing.optional_packages import pytest
from dynamo_testing.transport.harness import COUNT, INSTANCE, Ask, Recorder, Stage, Tick, TransportHarness
from dynamo_testing.waiting import turns

#: Errors in the form that travels: fresh exceptions are made of them for every check.
ERRORS = [
    WireError("InvalidArgument", "top_k must be at least 1", field="top_k"),
    WireError("Backend(InvalidArgument)", "the engine rejects größe", field="sampling_options.top_k"),
    WireError("ServiceOverloaded", "busy", retry_after=7.5),
    WireError("WorkerOverloaded", "the queue is full"),
    WireError("NotSupported", "no embeddings here"),
    WireError("EngineShutdown", "the engine stops"),
    WireError("Backend(EngineShutdown)", "the engine crashed"),
    WireError("Backend(Unknown)", "RuntimeError: CUDA out of memory"),
    WireError("Unavailable", "nobody is there"),
    WireError("Cancelled", "the caller gave up"),
    WireError(
        "Unknown",
        "it failed",
        [
            WireError("Disconnected", "a lower part lost its peer"),
            WireError("Backend(CannotConnect)", "the store is away"),
            WireError("Unknown", "[Errno 111] Connection refused"),
        ],
    ),
]

each_error = pytest.mark.parametrize("wire", ERRORS, ids=lambda wire: wire.kind)


class ErrorChecks(TransportHarness):
    """Calls that are refused, and streams that go wrong inside the handler."""

    @each_error
    async def test_a_refusal_keeps_its_type_its_details_and_its_causes(self, stage: Stage, wire: WireError) -> None:
        await stage.serve(door=_refuse(lambda: from_wire(wire)))

        error = await _refused(stage)

        assert _shape(error) == _shape(from_wire(wire))

    async def test_a_refused_call_leaves_the_sink_untouched(self, stage: Stage) -> None:
        await stage.serve(door=_refuse(lambda: EngineShutdown("no")))
        sink = Recorder(stage.wait)

        await _refused(stage, sink=sink)
        await turns()

        assert sink.log == []

    async def test_a_foreign_exception_instead_of_an_acceptance_is_an_unknown_refusal(self, stage: Stage) -> None:
        await stage.serve(door=_refuse(lambda: KeyError("no such slot")))

        error = await _refused(stage)

        assert isinstance(error, Unknown), f"the refusal is {type(error).__name__}"
        _tells_no_internals(error)

    async def test_after_a_refusal_the_next_call_is_served(self, stage: Stage) -> None:
        async def door(ask: Ask, ctx: ServedContext) -> None:
            if ask.limit == 13:
                raise EngineShutdown("no")

        await stage.serve(door=door)
        await _refused(stage, Ask(limit=13))

        sink = await stage.collect(Ask(limit=2))

        assert [item.number for item in sink.items] == [0, 1]

    async def test_deferred_callbacks_of_a_refused_call_run_once(self, stage: Stage) -> None:
        await stage.serve(door=_refuse(lambda: EngineShutdown("no")))

        await _refused(stage)
        visit = await stage.visit()
        await stage.happens(visit.over, "what was deferred")
        await turns()

        assert visit.deferred == 1

    @each_error
    async def test_an_error_in_mid_stream_keeps_its_type_its_details_and_its_causes(
        self, stage: Stage, wire: WireError
    ) -> None:
        await stage.serve(_fail(lambda: from_wire(wire)))

        sink = await stage.collect(Ask())

        errors = [event.to_error() for event in sink.events if event.is_error()]
        assert [_shape(error) for error in errors] == [_shape(from_wire(wire))]

    async def test_items_before_an_error_arrive_before_it(self, stage: Stage) -> None:
        await stage.serve(_fail(lambda: EngineShutdown("now")))

        sink = await stage.collect(Ask())

        place = next(number for number, (kind, what) in enumerate(sink.log) if kind == "event" and what.is_error())
        assert [what for kind, what in sink.log[:place] if kind == "data"] == [Tick(0), Tick(1)]

    async def test_the_flag_follows_an_error_item_too(self, stage: Stage) -> None:
        await stage.serve(_fail(lambda: EngineShutdown("now")))

        sink = await stage.collect(Ask())

        kinds = [event.event for event in sink.events]
        assert kinds[:2] == ["error", "complete_final"]

    async def test_a_foreign_exception_in_mid_stream_is_an_unknown_error_with_its_text(self, stage: Stage) -> None:
        await stage.serve(_fail(lambda: RuntimeError("the tensor is ragged")))

        sink = await stage.collect(Ask())

        errors = [event.to_error() for event in sink.events if event.is_error()]
        assert [type(error) for error in errors] == [Unknown]
        assert "the tensor is ragged" in errors[0].message
        _tells_no_internals(errors[0])

    async def test_an_instance_that_is_not_there_cannot_be_connected_to(self, stage: Stage) -> None:
        await stage.serve()
        gone = msgspec.structs.replace(stage.instance(), instance_id=INSTANCE + 1)

        error = await _refused(stage, instance=gone)

        assert isinstance(error, CannotConnect), f"the error is {type(error).__name__}"
        assert stage.visits == [], "another instance took the call"

    async def test_an_endpoint_that_is_not_served_cannot_be_connected_to(self, stage: Stage) -> None:
        await stage.serve()

        error = await _refused(stage, endpoint=Endpoint("other", Ask, Tick))

        assert isinstance(error, CannotConnect), f"the error is {type(error).__name__}"
        assert stage.visits == [], "another endpoint took the call"


def _refuse(make: Callable[[], Exception]) -> Any:
    async def door(request: Any, ctx: ServedContext) -> None:
        raise make()

    return door


def _fail(make: Callable[[], Exception]) -> Any:
    async def body(request: Any, ctx: ServedContext) -> AsyncGenerator[Tick, None]:
        yield Tick(0)
        yield Tick(1)
        raise make()

    return body


async def _refused(
    stage: Stage,
    request: Any = None,
    *,
    sink: Recorder | None = None,
    instance: Instance | None = None,
    endpoint: Endpoint = COUNT,
) -> DynamoError:
    try:
        call = await stage.call(request, sink=sink, instance=instance, endpoint=endpoint)
    except DynamoError as error:
        return error
    await stage.close(call.source)
    raise AssertionError("the call was accepted")


def _shape(error: DynamoError) -> tuple[str, WireError]:
    return type(error).__name__, to_wire(error)


def _tells_no_internals(error: DynamoError) -> None:
    for word in ("Traceback", ".py", "object at 0x"):
        assert word not in error.message, f"the message tells {word!r}: {error.message}"
