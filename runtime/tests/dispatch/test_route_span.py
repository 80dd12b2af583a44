"""The span of each attempt at a request: who was chosen, why again, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.errors import BackendError, CannotConnect, DynamoError, InvalidArgument, WorkerOverloaded
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_core.tracing import TraceContext
from opentelemetry.trace import SpanKind, StatusCode

Record = Callable[..., Any]
MakeStage = Callable[..., Any]
NAME = "router.route_request"


def routed(recorded: Any) -> list[dict[str, Any]]:
    return [dict(span.attributes) for span in recorded.spans if span.name == NAME]


async def turns() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def test_a_request_that_goes_well_has_one(record: Record, make_stage: MakeStage) -> None:
    recorded, stage = record(), make_stage()
    caller = TraceContext.new()
    stage.ctx = EngineContext("r", metadata=caller.to_headers() | {"x-request-id": "c"})
    sent: list[dict[str, str]] = []
    call = stage.transport.call

    async def seen(instance: Any, endpoint: Any, request: Any, ctx: Any, sink: Any) -> Any:
        sent.append(ctx.metadata)
        return await call(instance, endpoint, request, ctx, sink)

    stage.transport.call = seen
    stream = await stage.generate()
    assert recorded.spans == []
    stage.transport.calls[0].complete()
    await stream.aclose()

    span = recorded.one(NAME)
    assert span.kind is SpanKind.CLIENT
    assert f"{span.context.trace_id:032x}" == caller.trace_id
    assert f"{span.parent.span_id:016x}" == caller.span_id
    assert sent[0]["traceparent"] == f"00-{caller.trace_id}-{span.context.span_id:016x}-01"
    assert sent[0]["x-request-id"] == "c"
    assert dict(span.attributes) == {
        "router_mode": "in-turn",
        "request_id": "r",
        "worker_id": f"{1:016x}",
        "request.attempt": "0",
        "request.outcome": "success",
        "migration.is_retry": False,
        "migration.tokens_completed": 0,
    }
    assert span.status.status_code is StatusCode.UNSET


async def test_each_worker_that_is_asked_has_one(record: Record, make_stage: MakeStage) -> None:
    recorded, stage = record(), make_stage()
    stage.transport.refusals = [CannotConnect("nobody there")]
    stream = await stage.generate()
    stage.lose(3)
    await turns()
    stage.transport.calls[1].complete()
    await stream.aclose()

    refused, broken, last = routed(recorded)
    assert [span["request.attempt"] for span in (refused, broken, last)] == ["0", "1", "2"]
    assert [span["worker_id"] for span in (refused, broken, last)] == [f"{n:016x}" for n in (1, 2, 3)]
    assert [span["request.outcome"] for span in (refused, broken, last)] == [
        "worker_disconnected",
        "worker_disconnected",
        "success",
    ]
    assert [span["migration.is_retry"] for span in (refused, broken, last)] == [False, True, True]
    assert [span["migration.tokens_completed"] for span in (refused, broken, last)] == [0, 0, 3]
    assert "migration.reason" not in refused
    assert (broken["migration.reason"], broken["migration.from_worker_id"]) == ("CannotConnect", f"{1:016x}")
    assert (last["migration.reason"], last["migration.from_worker_id"]) == ("Disconnected", f"{2:016x}")
    failed = [span.status.status_code is StatusCode.ERROR for span in recorded.spans]
    assert failed == [True, True, False]


@pytest.mark.parametrize("how", ["leaves", "stops"])
async def test_a_request_that_is_given_up_is_no_error(record: Record, make_stage: MakeStage, how: str) -> None:
    recorded, stage = record(), make_stage()
    stream = await stage.generate()
    stage.transport.calls[0].give(1)
    if how == "stops":
        stage.ctx.stop_generating()
        stage.transport.calls[0].complete()
    await stream.aclose()

    span = recorded.one(NAME)
    assert span.attributes["request.outcome"] == "cancelled"
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("error", [BackendError.Unknown("broken"), InvalidArgument("not so")])
async def test_engine_errors_set_no_request_outcome(record: Record, make_stage: MakeStage, error: DynamoError) -> None:
    recorded, stage = record(), make_stage()
    stream = await stage.generate()
    stage.transport.calls[0].fail(error, told=True)
    await stream.aclose()

    span = recorded.one(NAME)
    assert "request.outcome" not in span.attributes
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, f"{error.kind}: {error}")


async def test_a_worker_that_is_full_is_not_disconnected(record: Record, make_stage: MakeStage) -> None:
    recorded, stage = record(), make_stage(1)
    stage.transport.refusals = [WorkerOverloaded("full")]

    with pytest.raises(DynamoError):
        await stage.generate()

    [span] = routed(recorded)
    assert (span["worker_id"], "request.outcome" in span) == (f"{1:016x}", False)


async def test_answer_that_the_engine_ends_with_an_error_is_no_success(record: Record, make_stage: MakeStage) -> None:
    recorded, stage = record(), make_stage()
    stream = await stage.generate()
    stage.transport.calls[0].give(1)
    stage.transport.calls[0].sink.data(LLMEngineOutput.error("out of blocks"))
    stage.transport.calls[0].sink.event(Annotated.from_complete_final())
    await stream.aclose()

    span = recorded.one(NAME)
    assert "request.outcome" not in span.attributes
    assert (span.status.status_code, span.status.description) == (
        StatusCode.ERROR,
        "Backend(Unknown): out of blocks",
    )


async def test_attempts_have_different_numbers_while_a_request_waits_for_a_busy_worker(
    record: Record, make_stage: MakeStage
) -> None:
    recorded, stage = record(), make_stage(2, migration_wait=20)
    stage.pool.set_busy(2, True)
    stage.transport.refusals = [CannotConnect("dead")]
    asking = asyncio.create_task(stage.generate())
    async with asyncio.timeout(10):
        while stage.router.refused < 2:  # noqa: ASYNC110 - the wait has no event
            await asyncio.sleep(0.001)
    stage.pool.set_busy(2, False)
    stream = await asking
    stage.transport.calls[0].complete()
    await stream.aclose()

    assert [span["request.attempt"] for span in routed(recorded)] == ["0", "1"]


async def test_without_export_nothing_is_made(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: Any, **__: Any) -> Any:
        raise AssertionError("a span")

    monkeypatch.setattr("dynamo_runtime.telemetry.route_span.start_span", made)
    stage = make_stage()
    stage.ctx.metadata["traceparent"] = f"00-{'a' * 32}-{'b' * 16}-01"
    stream = await stage.generate()
    stage.transport.calls[0].complete()
    await stream.aclose()

    assert stage.transport.calls[0].request.token_ids == stage.prompt
