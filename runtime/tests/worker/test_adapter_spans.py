"""The spans of a served call: `handle_payload` and `engine.generate`, with every attribute at its time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from dynamo_core import (
    BackendError,
    DisaggregationMode,
    EmbedOutput,
    EmbedRequest,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    ServedContext,
    TraceLink,
    chunk,
    start_span,
)
from dynamo_core.protocol.output import FinishReason
from dynamo_runtime.worker.adapter import EngineAdapter
from dynamo_runtime.worker.generate_span import GenerateSpan, nearest_rank
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import SpanKind, StatusCode

from runtime.tests.worker.engines import Body, Items, Told, adapter_over

Record = Callable[..., Any]

TRACE, CALLER = "a" * 32, "b" * 16
REQUEST = PreprocessedRequest(model="m", token_ids=[1, 2, 3])


class Engine(Told):
    """With embeddings."""

    async def embed(self, request: EmbedRequest, ctx: GenerateContext) -> EmbedOutput:
        return EmbedOutput(embeddings=[[1.0]])


def serving(
    body: Body, mode: DisaggregationMode = DisaggregationMode.AGGREGATED, limit: int | None = None
) -> EngineAdapter:
    return adapter_over(Engine(body, mode, namespace="space", component="backend"), limit=limit)


def context(sampled: bool = True) -> ServedContext:
    return ServedContext("r1", metadata={"traceparent": f"00-{TRACE}-{CALLER}-0{int(sampled)}"})


async def run(body: Body, *, request: PreprocessedRequest = REQUEST, ctx: ServedContext | None = None) -> None:
    async for _ in await serving(body).generate(request, ctx or context()):
        pass


async def tokens(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
    yield LLMEngineOutput()
    yield chunk.token(1)
    yield chunk.tokens([2, 3])
    yield LLMEngineOutput.length().with_tokens([4])


async def endless(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
    yield chunk.token(1)
    await ctx.stopped()
    yield LLMEngineOutput.cancelled()


async def test_a_served_call_is_two_spans_below_the_callers(record: Record) -> None:
    recorded = record()
    await run(tokens)

    payload, generate = recorded.one("handle_payload"), recorded.one("engine.generate")
    assert f"{payload.context.trace_id:032x}" == f"{generate.context.trace_id:032x}" == TRACE
    assert f"{payload.parent.span_id:016x}" == CALLER
    assert generate.parent.span_id == payload.context.span_id
    assert (payload.kind, generate.kind) == (SpanKind.SERVER, SpanKind.INTERNAL)
    assert dict(payload.attributes) == {
        "component": "backend",
        "namespace": "space",
        "endpoint": "generate",
        "instance_id": "00000000000000ab",
        "request_id": "r1",
    }


async def test_a_whole_stream_leaves_all_attributes(record: Record) -> None:
    recorded = record()
    await run(tokens)

    span = recorded.one("engine.generate")
    attributes = dict(span.attributes)
    times = {key: attributes.pop(key) for key in list(attributes) if key.endswith("_ms")}
    assert attributes == {
        "model": "m",
        "input_tokens": 3,
        "disagg_role": "agg",
        "request_id": "r1",
        "output_tokens": 4,
        "finish_reason": "Length",
        "cancelled": False,
    }
    assert set(times) == {"ttft_ms", "avg_itl_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms"}
    assert all(value == round(value, 2) >= 0 for value in times.values())
    assert span.status.status_code is StatusCode.UNSET
    assert not span.links


@pytest.mark.parametrize("mode", list(DisaggregationMode))
async def test_the_role_is_the_workers(record: Record, mode: DisaggregationMode) -> None:
    recorded = record()
    async for _ in await serving(tokens, mode).generate(REQUEST, context()):
        pass

    assert recorded.one("engine.generate").attributes["disagg_role"] == mode.value


async def test_a_single_item_has_ttft_but_no_itl(record: Record) -> None:
    async def body(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        yield LLMEngineOutput.stop().with_tokens([1])

    recorded = record()
    await run(body)

    times = {key for key in recorded.one("engine.generate").attributes if key.endswith("_ms")}
    assert times == {"ttft_ms"}


class Clock:
    """Seconds, one tick of a list for each look."""

    def __init__(self, *ticks: float) -> None:
        self._ticks = list(ticks)

    def __call__(self) -> float:
        return self._ticks.pop(0)


def test_times_are_milliseconds_from_the_call_and_between_items_that_are_not_empty(record: Record) -> None:
    recorded = record()

    with start_span("engine.generate") as span:
        watch = GenerateSpan(span, REQUEST, "agg", context(), Clock(10.0, 10.0123456, 10.1, 10.4, 10.6))
        watch.item(LLMEngineOutput())
        for _ in range(3):
            watch.item(chunk.token(1))
        watch.item(LLMEngineOutput.stop().with_tokens([1]))
        watch.ended()

    found = recorded.one("engine.generate").attributes
    assert {key: value for key, value in found.items() if key.endswith("_ms")} == {
        "ttft_ms": 12.35,
        "avg_itl_ms": 195.88,
        "itl_p50_ms": 200.0,
        "itl_p99_ms": 300.0,
        "itl_max_ms": 300.0,
    }


@given(st.lists(st.floats(0, 1e3), min_size=1), st.floats(0, 1))
def test_the_nearest_rank_is_a_value_of_the_list_in_its_order(values: list[float], share: float) -> None:
    ordered = sorted(values)
    index = (len(ordered) - 1) * share

    assert nearest_rank(ordered, share) in (ordered[math.floor(index)], ordered[math.ceil(index)])
    assert nearest_rank(ordered, 0) == ordered[0]
    assert nearest_rank(ordered, 1) == ordered[-1]


@pytest.mark.parametrize(("n", "rank"), [(2, 1), (3, 1), (4, 2), (5, 2)])
def test_nearest_rank_rounds_halves_up(n: int, rank: int) -> None:
    assert nearest_rank([float(index) for index in range(n)], 0.5) == rank


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (FinishReason.EOS, "EoS"),
        (FinishReason.STOP, "Stop"),
        (FinishReason.LENGTH, "Length"),
        (FinishReason.CANCELLED, "Cancelled"),
        (FinishReason.CONTENT_FILTER, "ContentFilter"),
        (FinishReason.ERROR, "Error"),
    ],
)
async def test_every_finish_reason_has_its_name(record: Record, reason: FinishReason, name: str) -> None:
    async def body(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        yield LLMEngineOutput(finish_reason=reason)

    recorded = record()
    await run(body)

    assert recorded.one("engine.generate").attributes["finish_reason"] == name


async def test_a_request_with_a_predecessor_links_to_it(record: Record) -> None:
    recorded = record()
    await run(tokens, request=PreprocessedRequest(token_ids=[1], migration_link=TraceLink("c" * 32, "d" * 16)))

    span = recorded.one("engine.generate")
    (link,) = span.links
    assert (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") == ("c" * 32, "d" * 16)
    assert span.attributes["migration_trace_id"] == "c" * 32
    assert span.attributes["migration_span_id"] == "d" * 16


async def test_a_cancelled_request_is_cancelled_and_no_error(record: Record) -> None:
    recorded = record()
    ctx = context()
    async for _ in await serving(endless).generate(REQUEST, ctx):
        ctx.stop_generating()

    span = recorded.one("engine.generate")
    assert (span.attributes["cancelled"], span.attributes["finish_reason"]) == (True, "Cancelled")
    assert span.attributes["output_tokens"] == 1
    assert span.status.status_code is StatusCode.UNSET


async def test_a_closed_stream_has_the_outcome_dropped(record: Record) -> None:
    recorded = record()
    items = await serving(tokens).generate(REQUEST, context())
    await anext(items)
    await anext(items)
    await items.aclose()

    span = recorded.one("engine.generate")
    assert (span.attributes["cancelled"], span.attributes["finish_reason"]) == (True, "Dropped")
    assert span.attributes["output_tokens"] == 1
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "stream dropped before terminal")
    assert recorded.one("handle_payload").status.status_code is StatusCode.UNSET


async def test_a_cancelled_stream_has_the_outcome_dropped(record: Record) -> None:
    waiting = asyncio.Event()

    async def body(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        waiting.set()
        await asyncio.Event().wait()
        yield LLMEngineOutput.stop()

    recorded = record()
    task = asyncio.create_task(run(body))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert recorded.one("engine.generate").attributes["finish_reason"] == "Dropped"


async def test_a_stream_left_after_its_terminal_was_not(record: Record) -> None:
    recorded = record()
    items = await serving(tokens).generate(REQUEST, context())
    for _ in range(4):
        await anext(items)
    await items.aclose()

    assert recorded.one("engine.generate").attributes["finish_reason"] == "Length"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BackendError.InvalidArgument("too long"), "Backend(InvalidArgument)"),
        (BackendError.EngineShutdown("too long"), "Backend(EngineShutdown)"),
        (ValueError("too long"), "Backend(Unknown)"),
    ],
)
@pytest.mark.parametrize("after", [0, 1])
async def test_a_typed_error_has_its_kind(record: Record, error: Exception, kind: str, after: int) -> None:
    async def body(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        for _ in range(after):
            yield chunk.token(1)
        raise error

    recorded = record()
    with pytest.raises(BackendError):
        await run(body)

    span = recorded.one("engine.generate")
    assert span.attributes["error_kind"] == kind
    assert "finish_reason" not in span.attributes
    assert (span.attributes["output_tokens"], span.attributes["cancelled"]) == (after, False)
    assert span.status.status_code is StatusCode.ERROR
    assert "too long" in span.status.description
    assert recorded.one("handle_payload").status.status_code is StatusCode.ERROR


async def test_a_generate_call_that_raises_has_the_outcome_setup_failed(record: Record) -> None:
    def body(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        raise BackendError.InvalidArgument("no")

    recorded = record()
    with pytest.raises(BackendError.InvalidArgument):
        await run(body)

    span = recorded.one("engine.generate")
    assert span.attributes["error_kind"] == "setup_failed"
    assert span.status.status_code is StatusCode.ERROR


async def test_a_text_error_sets_the_span_status_without_a_kind(record: Record) -> None:
    async def body(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        yield chunk.token(1)
        yield LLMEngineOutput.error("the GPU is gone")

    recorded = record()
    await run(body)

    span = recorded.one("engine.generate")
    assert "error_kind" not in span.attributes
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "the GPU is gone")
    assert recorded.one("handle_payload").status.description == "the GPU is gone"


async def test_spans_of_the_engine_are_below_engine_generate_also_in_tasks_that_it_makes(record: Record) -> None:
    recorded = record()
    tracer = recorded.provider.get_tracer("engine")

    async def helper() -> None:
        with start_span("in a task"):
            await asyncio.sleep(0)

    async def body(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        with start_span("prefill", attributes={"blocks": 3}):
            yield chunk.token(1)
            await asyncio.create_task(helper())
        with tracer.start_as_current_span("decode"):
            yield LLMEngineOutput.stop()

    await run(body)

    generate = recorded.one("engine.generate").context.span_id
    prefill = recorded.one("prefill")
    assert prefill.parent.span_id == generate
    assert dict(prefill.attributes) == {"blocks": 3}
    assert recorded.one("in a task").parent.span_id == prefill.context.span_id
    assert recorded.one("decode").parent.span_id == generate


async def test_an_earlier_task_has_no_parent_span_unless_given(record: Record) -> None:
    recorded = record()
    jobs: asyncio.Queue[tuple[Any, asyncio.Future[None]]] = asyncio.Queue()

    async def loop_of_the_engine() -> None:
        while True:
            parent, done = await jobs.get()
            with start_span("step", parent=parent):
                pass
            done.set_result(None)

    async def body(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        for parent in (None, request.extra_args):
            with start_span("asked") as span:
                done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                jobs.put_nowait((span.context if parent else None, done))
                await done
        yield LLMEngineOutput.stop()

    engine_loop = asyncio.create_task(loop_of_the_engine())
    await run(body, request=PreprocessedRequest(token_ids=[1], extra_args={"told": True}))
    engine_loop.cancel()

    lost, found = [span for span in recorded.spans if span.name == "step"]
    assert lost.parent is None
    assert f"{found.context.trace_id:032x}" == TRACE


async def test_a_call_that_is_not_sampled_is_not_recorded(record: Record) -> None:
    recorded = record()
    await run(tokens, ctx=context(sampled=False))

    assert recorded.spans == []


async def test_a_request_cancelled_in_the_queue_records_no_engine_span(record: Record) -> None:
    recorded = record()
    adapter = serving(endless, limit=1)
    running = await adapter.generate(REQUEST, context())
    await anext(running)
    ctx = context()
    waiting = await adapter.generate(REQUEST, ctx)
    ctx.stop_generating()
    assert [item.finish_reason async for item in waiting] == ["cancelled"]

    assert [span.name for span in recorded.spans] == ["handle_payload"]
    await running.aclose()


async def test_embeddings_are_a_served_call_too(record: Record) -> None:
    recorded = record()
    async for _ in await serving(tokens).embed(EmbedRequest(token_ids=[[1]]), context()):
        pass

    (span,) = recorded.spans
    assert (span.name, span.attributes["endpoint"]) == ("handle_payload", "embed")
