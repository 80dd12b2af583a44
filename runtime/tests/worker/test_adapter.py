"""What the adapter does between a served call and the engine: cancelling, the trace link, the two kinds of errors."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import AsyncGenerator
from copy import copy
from typing import Any

import pytest
from dynamo_core import (
    BackendError,
    DisaggregationMode,
    EngineContext,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    ServedContext,
    TraceLink,
    chunk,
    get_distributed_tracing_context,
    inject_trace_headers_into_map,
    tracing,
)
from dynamo_core.tracing import TraceContext
from dynamo_telemetry import logs
from dynamo_telemetry.metrics import Metrics

from runtime.tests.worker.engines import Body, Items, Told, adapter_over

AGGREGATED, PREFILL, DECODE = DisaggregationMode.AGGREGATED, DisaggregationMode.PREFILL, DisaggregationMode.DECODE

REQUEST = PreprocessedRequest(model="m", token_ids=[1, 2, 3])


class Engine(Told):
    """Counts its `abort` calls."""

    def __init__(self, body: Body, mode: DisaggregationMode) -> None:
        super().__init__(body, mode)
        self.aborted: list[str] = []

    async def abort(self, ctx: EngineContext) -> None:
        self.aborted.append(ctx.id)


class Bench:
    """An adapter over an engine with a given body."""

    def __init__(self, body: Body, mode: DisaggregationMode = AGGREGATED) -> None:
        self.engine = Engine(body, mode)
        self.metrics = Metrics()
        self.adapter = adapter_over(self.engine, metrics=self.metrics)
        self.ctx = ServedContext("r1", metadata={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "x-request-id": "x1"})

    async def call(self) -> AsyncGenerator[LLMEngineOutput, None]:
        return await self.adapter.generate(REQUEST, self.ctx)

    async def all(self) -> list[LLMEngineOutput]:
        return [item async for item in await self.call()]

    async def aborted(self) -> list[str]:
        """Return the requests that were aborted, once every call under way has been made."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return self.engine.aborted

    def cancellations(self) -> float | None:
        return self.metrics.registry.get_sample_value("dynamo_component_cancellation_total")


async def three(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
    yield LLMEngineOutput()
    yield chunk.token(1)
    yield chunk.token(2)
    yield LLMEngineOutput.stop()


async def obedient(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
    """Return tokens until it is stopped."""
    while not ctx.is_stopped():
        yield chunk.token(1)
    yield LLMEngineOutput.cancelled()


#: What an engine says in a table: items, and that there is a first token.
EMPTY, TOKEN, END, FIRST = LLMEngineOutput(), chunk.token(1), LLMEngineOutput.cancelled(), "first token"


class TestAbort:
    async def test_abort_is_not_called_for_an_ended_stream(self) -> None:
        bench = Bench(three)
        await bench.all()
        bench.ctx.stop_generating()

        assert await bench.aborted() == []
        assert bench.cancellations() == 0

    async def test_abort_is_not_called_for_a_dropped_stream(self) -> None:
        bench = Bench(obedient)
        items = await bench.call()
        await anext(items)
        await items.aclose()
        bench.ctx.stop_generating()

        assert await bench.aborted() == []

    async def test_abort_is_not_called_for_a_failed_stream(self) -> None:
        async def failing(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
            yield chunk.token(1)
            raise BackendError.Disconnected("gone")

        bench = Bench(failing)
        with pytest.raises(BackendError.Disconnected):
            await bench.all()
        bench.ctx.stop_generating()

        assert await bench.aborted() == []

    @pytest.mark.parametrize("mode", [AGGREGATED, PREFILL])
    async def test_abort_is_called_once_when_the_caller_gives_up(self, mode: DisaggregationMode) -> None:
        bench = Bench(obedient, mode)
        items = await bench.call()
        await anext(items)
        bench.ctx.stop_generating()
        bench.ctx.kill()
        bench.ctx.stop_generating()

        assert await bench.aborted() == ["r1"]
        assert [item.finish_reason async for item in items] == ["cancelled"]
        assert await bench.aborted() == ["r1"]
        assert bench.cancellations() == 1

    @pytest.mark.parametrize(
        ("says", "steps", "aborted"),
        [
            # A decode engine is told only when there is a first token: one is yielded, or it says so itself.
            ([EMPTY, TOKEN, TOKEN, END], ["item", "kill", "item", "item", "item"], [0, 0, 1, 1, 1]),
            ([TOKEN, END], ["item", "stop", "item"], [0, 1, 1]),
            ([EMPTY, FIRST, FIRST, END], ["item", "stop", "item"], [0, 0, 1]),
            ([EMPTY, FIRST, TOKEN, END], ["item", "stop", "item", "item"], [0, 0, 1, 1]),
            # One whose stream ends or fails first is never told.
            ([EMPTY, END], ["item", "stop", "item"], [0, 0, 0]),
            ([EMPTY, END.with_tokens([1])], ["item", "stop", "item"], [0, 0, 0]),
            ([EMPTY, BackendError.Disconnected("gone")], ["item", "stop", "failure"], [0, 0, 0]),
        ],
    )
    async def test_decode_engine_is_told_once_and_not_before_its_first_token(
        self, says: list[Any], steps: list[str], aborted: list[int]
    ) -> None:
        async def body(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
            for one in says:
                if isinstance(one, Exception):
                    raise one
                if one == FIRST:
                    ctx.notify_first_token()
                else:
                    yield copy(one)

        bench = Bench(body, DECODE)
        items = await bench.call()
        found = []
        for step in steps:
            if step == "failure":
                with pytest.raises(BackendError.Disconnected):
                    await anext(items)
            elif step == "item":
                await anext(items)
            else:
                (bench.ctx.kill if step == "kill" else bench.ctx.stop_generating)()
            found.append(len(await bench.aborted()))
        await items.aclose()

        assert found == aborted
        assert bench.cancellations() == 1

    async def test_decode_engine_that_has_said_its_first_token_is_told_while_it_waits(self) -> None:
        told = asyncio.Event()

        async def batching(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
            yield LLMEngineOutput()
            ctx.notify_first_token()
            told.set()
            await ctx.stopped()
            yield LLMEngineOutput.cancelled()

        bench = Bench(batching, DECODE)
        items = await bench.call()
        await anext(items)
        rest = asyncio.create_task(anext(items))
        await told.wait()
        bench.ctx.stop_generating()

        assert await bench.aborted() == ["r1"]
        await rest
        await items.aclose()


class TestTraceLink:
    async def test_the_first_non_empty_item_has_the_span_link(self) -> None:
        inside: list[TraceLink] = []

        async def body(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
            context = get_distributed_tracing_context()
            inside.append(TraceLink(context["trace_id"], context["span_id"]))
            async for item in three(request, ctx):
                yield item

        items = await Bench(body).all()

        assert [item.worker_trace_link for item in items] == [None, *inside, None, None]
        assert inside[0].trace_id == "a" * 32

    async def test_text_alone_is_not_empty(self) -> None:
        async def texts(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
            yield LLMEngineOutput(text="")
            yield LLMEngineOutput(text="a")
            yield LLMEngineOutput.stop()

        items = await Bench(texts).all()

        assert [item.worker_trace_link is not None for item in items] == [False, True, False]

    @pytest.mark.parametrize(("mode", "stamped"), [(PREFILL, True), (AGGREGATED, False), (DECODE, False)])
    async def test_a_prefill_workers_empty_terminal_has_the_span_link(
        self, mode: DisaggregationMode, stamped: bool
    ) -> None:
        async def empty(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
            yield LLMEngineOutput.length()

        (item,) = await Bench(empty, mode).all()

        assert (item.worker_trace_link is not None) is stamped

    async def test_an_item_that_an_engine_yields_to_many_is_left_as_it_is(self) -> None:
        shared = chunk.token(1)

        async def body(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
            yield shared
            yield LLMEngineOutput.stop()

        first, second = await Bench(body).all(), await Bench(body).all()

        assert shared.worker_trace_link is None
        assert first[0].worker_trace_link != second[0].worker_trace_link


class TestContext:
    async def test_log_lines_and_headers_of_an_engine_carry_the_ids_of_the_request(self) -> None:
        stream = io.StringIO()
        sent: dict[str, str] = {}

        async def body(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
            logging.getLogger("dynamo.test").info("before")
            yield chunk.token(1)
            inject_trace_headers_into_map(sent)
            logging.getLogger("dynamo.test").info("after")
            yield LLMEngineOutput.stop()

        logs.configure_logging("info", json=True, stream=stream)
        try:
            await Bench(body).all()
        finally:
            logs.shutdown_logging()

        lines = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert [line["message"] for line in lines] == ["before", "after"]
        for line in lines:
            assert (line["trace_id"], line["request_id"], line["x_request_id"]) == ("a" * 32, "r1", "x1")
            assert sent["traceparent"] == f"00-{'a' * 32}-{line['span_id']}-01"

    async def test_afterwards_nothing_of_it_is_left(self) -> None:
        await Bench(three).all()

        assert (tracing.current.get(), logs.context.get()) == (None, None)

    async def test_the_engines_own_release_still_carries_them(self) -> None:
        seen: list[TraceContext | None] = []

        async def body(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
            try:
                yield chunk.token(1)
            finally:
                seen.append(tracing.current.get())

        items = await Bench(body).call()
        await anext(items)
        await items.aclose()

        (context,) = seen
        assert context is not None
        assert context.trace_id == "a" * 32

    async def test_without_a_callers_context_a_request_is_a_trace_of_its_own(self) -> None:
        seen: list[TraceContext | None] = []

        async def body(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
            seen.append(tracing.current.get())
            yield LLMEngineOutput.stop()

        bench = Bench(body)
        bench.ctx.metadata["traceparent"] = "nonsense"
        await bench.all()

        assert seen[0] is not None


class TestUnwatched:
    async def test_without_a_span_that_is_recorded_nothing_is_measured_per_item(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("dynamo_runtime.worker.adapter.GenerateSpan", None)

        assert len(await Bench(three).all()) == 4

    async def test_without_the_validator_there_is_no_wrapper_around_the_engines_generator(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DYN_STREAM_VALIDATOR", "0")
        monkeypatch.setattr("dynamo_runtime.worker.adapter.validated", None)

        assert len(await Bench(three).all()) == 4

    @pytest.mark.parametrize("validate", ["0", "1"])
    async def test_an_answer_without_a_terminal_is_incomplete(
        self, validate: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def unfinished(request: PreprocessedRequest, ctx: GenerateContext) -> Items:
            yield chunk.token(1)

        monkeypatch.setenv("DYN_STREAM_VALIDATOR", validate)
        items = await Bench(unfinished).call()

        assert (await anext(items)).token_ids == [1]
        with pytest.raises(BackendError.StreamIncomplete, match="without a terminal item"):
            await anext(items)
