"""What the adapter does between a served call and the engine: cancelling, the trace link, the two kinds of errors."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import pytest
from dynamo_core import (
    BackendError,
    DisaggregationMode,
    EngineConfig,
    EngineContext,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    ServedContext,
    TraceLink,
    WorkerConfig,
    chunk,
    get_distributed_tracing_context,
    inject_trace_headers_into_map,
    tracing,
)
from dynamo_core.tracing import TraceContext
from dynamo_runtime.worker.adapter import EngineAdapter
from dynamo_runtime.worker.gate import CapacityGate
from dynamo_runtime.worker.metrics import WorkerMetrics
from dynamo_telemetry import logs
from dynamo_telemetry.metrics import Metrics

AGGREGATED, PREFILL, DECODE = DisaggregationMode.AGGREGATED, DisaggregationMode.PREFILL, DisaggregationMode.DECODE

Body = Callable[[PreprocessedRequest, GenerateContext], AsyncIterator[LLMEngineOutput]]

REQUEST = PreprocessedRequest(model="m", token_ids=[1, 2, 3])


class Engine(LLMEngine):
    """Runs the body that a test gives it, and counts its `abort` calls."""

    NAME = "test"

    def __init__(self, body: Body, mode: DisaggregationMode) -> None:
        super().__init__(PluginConfig(), WorkerConfig(model_name="m", worker="w", disaggregation_mode=mode))
        self._body = body
        self.aborted: list[str] = []

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="m")

    def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        return self._body(request, ctx)

    async def abort(self, ctx: EngineContext) -> None:
        self.aborted.append(ctx.id)

    async def cleanup(self) -> None:
        return None


class Bench:
    """An adapter over an engine with a given body."""

    def __init__(self, body: Body, mode: DisaggregationMode = AGGREGATED) -> None:
        self.engine = Engine(body, mode)
        self.metrics = Metrics()
        self.adapter = EngineAdapter(
            self.engine,
            EngineConfig(model="m"),
            CapacityGate(self.metrics, limit=None, queue=16),
            WorkerMetrics(self.metrics),
            config=self.engine.worker,
            worker_id=0xAB,
        )
        self.ctx = ServedContext("r1", metadata={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "x-request-id": "x1"})

    async def call(self) -> AsyncGenerator[LLMEngineOutput, None]:
        return await self.adapter.generate(REQUEST, self.ctx)

    async def all(self) -> list[LLMEngineOutput]:
        return [item async for item in await self.call()]

    async def aborted(self) -> list[str]:
        """The requests that were aborted, once every call under way has been made."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return self.engine.aborted

    def cancellations(self) -> float | None:
        return self.metrics.registry.get_sample_value("dynamo_component_cancellation_total")


async def three(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
    yield LLMEngineOutput()
    yield chunk.token(1)
    yield chunk.token(2)
    yield LLMEngineOutput.stop()


async def obedient(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
    """Tokens until it is stopped."""
    while not ctx.is_stopped():
        yield chunk.token(1)
    yield LLMEngineOutput.cancelled()


async def receiving(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
    """A decode engine whose KV cache arrives, and which yields two tokens although it is stopped."""
    yield LLMEngineOutput()
    yield chunk.token(1)
    yield chunk.token(2)
    yield LLMEngineOutput.cancelled()


class TestAbort:
    async def test_it_is_not_called_for_a_stream_that_ends(self) -> None:
        bench = Bench(three)
        await bench.all()
        bench.ctx.stop_generating()

        assert await bench.aborted() == []
        assert bench.cancellations() == 0

    async def test_it_is_not_called_for_a_stream_that_is_dropped(self) -> None:
        bench = Bench(obedient)
        items = await bench.call()
        await anext(items)
        await items.aclose()
        bench.ctx.stop_generating()

        assert await bench.aborted() == []

    async def test_it_is_not_called_for_a_stream_that_failed(self) -> None:
        async def failing(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
            yield chunk.token(1)
            raise BackendError.Disconnected("gone")

        bench = Bench(failing)
        with pytest.raises(BackendError.Disconnected):
            await bench.all()
        bench.ctx.stop_generating()

        assert await bench.aborted() == []

    @pytest.mark.parametrize("mode", [AGGREGATED, PREFILL])
    async def test_it_is_called_once_and_at_once_when_the_caller_gives_up(self, mode: DisaggregationMode) -> None:
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

    async def test_a_decode_engine_is_told_only_when_there_is_a_first_token(self) -> None:
        bench = Bench(receiving, DECODE)
        items = await bench.call()
        await anext(items)
        bench.ctx.kill()

        assert await bench.aborted() == []
        assert bench.cancellations() == 1
        await anext(items)
        assert await bench.aborted() == ["r1"]
        assert len([item async for item in items]) == 2
        assert await bench.aborted() == ["r1"]

    async def test_after_the_first_token_it_is_told_at_once(self) -> None:
        bench = Bench(obedient, DECODE)
        items = await bench.call()
        await anext(items)
        bench.ctx.stop_generating()

        assert await bench.aborted() == ["r1"]
        await items.aclose()

    async def test_an_engine_can_say_itself_that_there_is_a_first_token(self) -> None:
        told = asyncio.Event()

        async def batching(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
            yield LLMEngineOutput()
            ctx.notify_first_token()
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

    async def test_saying_so_after_the_caller_gave_up_lets_the_abort_through(self) -> None:
        async def batching(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
            yield LLMEngineOutput()
            ctx.notify_first_token()
            yield LLMEngineOutput.cancelled()

        bench = Bench(batching, DECODE)
        items = await bench.call()
        await anext(items)
        bench.ctx.stop_generating()
        assert await bench.aborted() == []
        await anext(items)

        assert await bench.aborted() == ["r1"]

    async def test_a_first_token_that_is_told_and_then_yielded_aborts_once(self) -> None:
        async def batching(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
            yield LLMEngineOutput()
            ctx.notify_first_token()
            yield chunk.token(1)
            yield LLMEngineOutput.cancelled()

        bench = Bench(batching, DECODE)
        items = await bench.call()
        await anext(items)
        bench.ctx.stop_generating()
        await anext(items)

        assert await bench.aborted() == ["r1"]
        await items.aclose()

    @pytest.mark.parametrize("last", [LLMEngineOutput.cancelled(), LLMEngineOutput.cancelled().with_tokens([1])])
    async def test_a_decode_stream_that_ends_first_is_never_aborted(self, last: LLMEngineOutput) -> None:
        async def ending(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
            yield LLMEngineOutput()
            yield last

        bench = Bench(ending, DECODE)
        items = await bench.call()
        await anext(items)
        bench.ctx.stop_generating()
        await anext(items)
        await items.aclose()

        assert await bench.aborted() == []

    async def test_nor_is_one_that_fails_first(self) -> None:
        async def failing(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
            yield LLMEngineOutput()
            raise BackendError.Disconnected("the prefill worker is gone")

        bench = Bench(failing, DECODE)
        items = await bench.call()
        await anext(items)
        bench.ctx.stop_generating()
        with pytest.raises(BackendError.Disconnected):
            await anext(items)

        assert await bench.aborted() == []


class TestTraceLink:
    async def test_the_first_item_that_is_not_empty_says_where_the_span_is(self) -> None:
        inside: list[TraceLink] = []

        async def body(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
            context = get_distributed_tracing_context()
            inside.append(TraceLink(context["trace_id"], context["span_id"]))
            async for item in three(request, ctx):
                yield item

        items = await Bench(body).all()

        assert [item.worker_trace_link for item in items] == [None, *inside, None, None]
        assert inside[0].trace_id == "a" * 32

    async def test_text_alone_is_not_empty(self) -> None:
        async def texts(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
            yield LLMEngineOutput(text="")
            yield LLMEngineOutput(text="a")
            yield LLMEngineOutput.stop()

        items = await Bench(texts).all()

        assert [item.worker_trace_link is not None for item in items] == [False, True, False]

    @pytest.mark.parametrize(("mode", "stamped"), [(PREFILL, True), (AGGREGATED, False), (DECODE, False)])
    async def test_a_prefill_worker_says_it_on_an_empty_terminal_too(
        self, mode: DisaggregationMode, stamped: bool
    ) -> None:
        async def empty(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
            yield LLMEngineOutput.length()

        (item,) = await Bench(empty, mode).all()

        assert (item.worker_trace_link is not None) is stamped

    async def test_an_item_that_an_engine_yields_to_many_is_left_as_it_is(self) -> None:
        shared = chunk.token(1)

        async def body(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
            yield shared
            yield LLMEngineOutput.stop()

        first, second = await Bench(body).all(), await Bench(body).all()

        assert shared.worker_trace_link is None
        assert first[0].worker_trace_link != second[0].worker_trace_link


class TestContext:
    async def test_log_lines_and_headers_of_an_engine_carry_the_ids_of_the_request(self) -> None:
        stream = io.StringIO()
        sent: dict[str, str] = {}

        async def body(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
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

        async def body(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
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

        async def body(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
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
        async def unfinished(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
            yield chunk.token(1)

        monkeypatch.setenv("DYN_STREAM_VALIDATOR", validate)
        items = await Bench(unfinished).call()

        assert (await anext(items)).token_ids == [1]
        with pytest.raises(BackendError.StreamIncomplete, match="without a terminal item"):
            await anext(items)
