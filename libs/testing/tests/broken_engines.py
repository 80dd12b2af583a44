"""Engines that break one promise each, and the failure that the kit must name for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, ClassVar

from dynamo_core import (
    EMBED,
    PROGRESS,
    RERANK,
    SCORE,
    BackendError,
    DisaggregationMode,
    EmbedOutput,
    EmbedRequest,
    EngineConfig,
    EngineContext,
    GenerateContext,
    KvBlock,
    KvEvent,
    KvEventSource,
    KvStored,
    LLMEngine,
    LLMEngineOutput,
    LoadSource,
    MetricsScope,
    PluginConfig,
    PreprocessedRequest,
    ScoreOutput,
    ScoreRequest,
    WorkerConfig,
    chunk,
    usage,
)


class Engine(LLMEngine):
    """An engine without a fault: counts up to the limit, 4 tokens without one."""

    NAME = "sound"
    #: The failure that must be named, by the check that must find it.
    FAILS: ClassVar[dict[str, str]] = {}
    #: The timeout of the kit that runs out for it.
    RUNS_OUT: ClassVar[str] = ""

    def __init__(self, mode: DisaggregationMode = DisaggregationMode.AGGREGATED) -> None:
        super().__init__(PluginConfig(), WorkerConfig(model_name="a-model", disaggregation_mode=mode))

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model=self.worker.model_name)

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        for token in range(request.stop_conditions.max_tokens or 4):
            if ctx.is_stopped():
                break
            yield chunk.token(token % 256)
            await asyncio.sleep(0)
        yield LLMEngineOutput.cancelled() if ctx.is_stopped() else self.last()

    def last(self) -> LLMEngineOutput:
        output = LLMEngineOutput.length()
        if self.worker.disaggregation_mode is DisaggregationMode.PREFILL:
            output.disaggregated_params = {}
        return output

    async def cleanup(self) -> None:
        pass


async def place_in(places: asyncio.Semaphore, ctx: GenerateContext) -> bool:
    """Waits for a place, and for the stop of the request; whether there is a place."""
    place = asyncio.ensure_future(places.acquire())
    stopped = asyncio.ensure_future(ctx.stopped())
    try:
        await asyncio.wait({place, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        place.cancel()
        await asyncio.wait({place})
    return not place.cancelled()


class Rich(Engine):
    """An engine without a fault that has everything an engine may have."""

    async def start(self, worker_id: int) -> EngineConfig:
        self.listeners: dict[int, Callable[[KvEvent], None]] = {}
        self.numbers = {rank: count() for rank in (0, 1)}
        self.places = asyncio.Semaphore(2)
        self.steps = 0
        return EngineConfig(
            model="rich",
            capabilities=frozenset({EMBED, PROGRESS, RERANK, SCORE}),
            max_num_seqs=2,
            context_length=100,
            kv_cache_block_size=16,
            data_parallel_size=2,
        )

    async def setup_metrics(self, metrics: MetricsScope) -> None:
        metrics.counter("rich_requests", "Requests.").labels()

    async def kv_event_sources(self) -> Sequence[KvEventSource]:
        return [KvEventSource(rank, partial(self.listen, rank)) for rank in (0, 1)]

    def listen(self, rank: int, hear: Callable[[KvEvent], None]) -> None:
        self.listeners[rank] = hear

    async def load_sources(self) -> Sequence[LoadSource]:
        return [LoadSource(0, lambda hear: None)]

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        assert len(request.token_ids) + (request.stop_conditions.max_tokens or 0) <= 100
        placed = await place_in(self.places, ctx)
        try:
            for rank, hear in self.listeners.items():
                hear(self.event(rank))
            async for item in super().generate(request, ctx):
                self.steps += 1
                yield item
        finally:
            if placed:
                self.places.release()

    def progress(self) -> int:
        return self.steps

    def event(self, rank: int) -> KvEvent:
        return KvEvent(next(self.numbers[rank]), KvStored([KvBlock(1, 2)]), rank)

    async def health_check_payload(self) -> dict[str, Any] | None:
        return {"token_ids": [7], "stop_conditions": {"max_tokens": 1}}

    async def embed(self, request: EmbedRequest, ctx: GenerateContext) -> EmbedOutput:
        return EmbedOutput(
            embeddings=[[0.5, 1.0] for _ in request.token_ids], prompt_tokens=sum(map(len, request.token_ids))
        )

    async def score(self, request: ScoreRequest, ctx: GenerateContext) -> ScoreOutput:
        return ScoreOutput(
            scores=[float(len(document)) for document in request.documents], prompt_tokens=len(request.documents)
        )

    async def abort(self, ctx: EngineContext) -> None:
        pass


# Starting.


class StartRaises(Engine):
    async def start(self, worker_id: int) -> EngineConfig:
        raise BackendError.CannotConnect("no accelerator")

    FAILS: ClassVar = {"start": "StartFailed"}


class StartHangs(Engine):
    async def start(self, worker_id: int) -> EngineConfig:
        await asyncio.Event().wait()
        raise AssertionError

    RUNS_OUT = "start_timeout"
    FAILS: ClassVar = {"start": "StartFailed"}


class StartIgnoresBeingCancelled(Engine):
    """For longer than the kit waits for last words, though not for ever: the loop of the test has to end."""

    async def start(self, worker_id: int) -> EngineConfig:
        loop = asyncio.get_running_loop()
        until = loop.time() + 2.5
        while loop.time() < until:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(until - loop.time())
        return EngineConfig(model="late")

    RUNS_OUT = "start_timeout"
    FAILS: ClassVar = {"start": "StartFailed"}


class StartBlocksTooLong(Engine):
    async def start(self, worker_id: int) -> EngineConfig:
        time.sleep(0.7)  # noqa: ASYNC251 - the fault
        return EngineConfig(model="late")

    RUNS_OUT = "start_timeout"
    FAILS: ClassVar = {"start": "StartFailed"}


class StartExits(Engine):
    async def start(self, worker_id: int) -> EngineConfig:
        raise SystemExit(3)

    FAILS: ClassVar = {"start": "StartFailed"}


class StartReturnsNothing(Engine):
    async def start(self, worker_id: int) -> EngineConfig:
        return None  # type: ignore[return-value]

    FAILS: ClassVar = {"start": "StartFailed"}


class StartIsNotAsync(Engine):
    def start(self, worker_id: int) -> EngineConfig:  # type: ignore[override]
        return EngineConfig(model="sync")

    FAILS: ClassVar = {"start": "StartFailed"}


class NamesNoModel(Engine):
    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="")

    FAILS: ClassVar = {"start": "EmptyModelInConfig"}


class ConstructorRaises(Engine):
    def __init__(self, mode: DisaggregationMode = DisaggregationMode.AGGREGATED) -> None:
        raise RuntimeError("no such device")

    FAILS: ClassVar = {"start": "StartFailed"}


# Metrics and sources.


class MetricsRaise(Engine):
    async def setup_metrics(self, metrics: MetricsScope) -> None:
        metrics.counter("not a name", "…")

    FAILS: ClassVar = {"metrics": "MetricsFailed"}


class ScrapingRaises(Engine):
    async def setup_metrics(self, metrics: MetricsScope) -> None:
        class Collector:
            described = False

            def describe(self) -> list[Any]:
                return []

            def collect(self) -> list[Any]:
                raise RuntimeError("the engine is gone")

        metrics.registry.register(Collector())

    FAILS: ClassVar = {"metrics": "MetricsFailed"}


class KvSourcesRaise(Engine):
    async def kv_event_sources(self) -> Sequence[KvEventSource]:
        raise RuntimeError("no publisher")

    FAILS: ClassVar = {"kv_event_sources": "KvEventSourcesFailed", "kv_events": "KvEventSourcesFailed"}


class KvSubscribingRaises(Engine):
    async def kv_event_sources(self) -> Sequence[KvEventSource]:
        def subscribe(listener: Callable[[KvEvent], None]) -> None:
            raise RuntimeError("asked twice")

        return [KvEventSource(0, subscribe)]

    FAILS: ClassVar = {"kv_event_sources": "KvEventSourcesFailed", "kv_events": "KvEventSourcesFailed"}


class KvRanksTwice(Engine):
    async def kv_event_sources(self) -> Sequence[KvEventSource]:
        return [KvEventSource(0, lambda hear: None)] * 2

    FAILS: ClassVar = {"kv_event_sources": "KvEventSourcesFailed", "kv_events": "KvEventSourcesFailed"}


class KvRanksChange(Engine):
    async def kv_event_sources(self) -> Sequence[KvEventSource]:
        self.asked = getattr(self, "asked", 0) + 1
        return [KvEventSource(rank, lambda hear: None) for rank in range(self.asked)]

    FAILS: ClassVar = {"kv_event_sources": "KvEventSourcesNotIdempotent", "kv_events": "KvEventSourcesNotIdempotent"}


class LoadSourcesAreNone(Engine):
    async def load_sources(self) -> Sequence[LoadSource]:
        return None  # type: ignore[return-value]

    FAILS: ClassVar = {"load_sources": "LoadSourcesFailed"}


class LoadSourcesAreOfAnotherKind(Engine):
    async def load_sources(self) -> Sequence[LoadSource]:
        return [KvEventSource(0, lambda hear: None)]  # type: ignore[list-item]

    FAILS: ClassVar = {"load_sources": "LoadSourcesFailed"}


class LoadRanksAreUsedUp(Engine):
    async def start(self, worker_id: int) -> EngineConfig:
        self.sources = [LoadSource(0, lambda hear: None)]
        return EngineConfig(model="m")

    async def load_sources(self) -> Sequence[LoadSource]:
        sources, self.sources = self.sources, []
        return sources

    FAILS: ClassVar = {"load_sources": "LoadSourcesNotIdempotent"}


class SkipsAnEvent(Rich):
    def event(self, rank: int) -> KvEvent:
        next(self.numbers[rank])
        return super().event(rank)

    FAILS: ClassVar = {"kv_events": "KvEventsFailed"}


class TellsOfAnotherRank(Rich):
    def event(self, rank: int) -> KvEvent:
        return super().event(1 - rank)

    FAILS: ClassVar = {"kv_events": "KvEventsFailed"}


class TellsNoEvents(Rich):
    def event(self, rank: int) -> KvEvent:
        return {"event_id": 0}  # type: ignore[return-value]

    FAILS: ClassVar = {"kv_events": "KvEventsFailed"}


class TellsFromAThread(Rich):
    def listen(self, rank: int, hear: Callable[[KvEvent], None]) -> None:
        def elsewhere(event: KvEvent) -> None:
            thread = threading.Thread(target=hear, args=(event,))
            thread.start()
            thread.join()

        super().listen(rank, elsewhere)

    FAILS: ClassVar = {"kv_events": "KvEventsFailed"}


# Answering. What breaks every answer is found by every check that asks for one.

STREAM_CHECKS = ("generate", "max_tokens", "event_loop")


STOP_CHECKS = ("cancel_at_once", "cancel_midway", "cancel_at_end", "cancel_queued")


def every_answer(failure: str, *, cancelled: str | None = None) -> dict[str, str]:
    """The failures of an engine none of whose answers is sound; `cancelled`: that of a stopped stream."""
    alone = dict.fromkeys((*STREAM_CHECKS, "close_midway"), failure)
    stopped = dict.fromkeys(STOP_CHECKS, cancelled or failure)
    return alone | stopped | {"concurrent": "ConcurrentGenerateFailed"}


def alone(failure: str) -> dict[str, str]:
    """The failures of an engine none of whose answers is sound, unless they are cut short."""
    whole = dict.fromkeys(STREAM_CHECKS, failure)
    return whole | {"concurrent": "ConcurrentGenerateFailed", "close_midway": "RequestLeaked"}


class GenerateRaises(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        if request.token_ids:
            raise RuntimeError("out of memory")
        yield LLMEngineOutput.stop()

    FAILS: ClassVar = every_answer("GenerateFailed") | {"cancel_at_once": "StreamYieldedError"}


class GenerateIsNoGenerator(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Any:  # type: ignore[override]
        return [LLMEngineOutput.stop()]

    FAILS: ClassVar = every_answer("GenerateFailed")


class YieldsMaps(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Any:
        yield {"token_ids": [1], "finish_reason": "stop"}

    FAILS: ClassVar = every_answer("GenerateFailed")


class NeverAnswers(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        await asyncio.Event().wait()
        yield LLMEngineOutput.stop()

    RUNS_OUT = "request_timeout"
    FAILS: ClassVar = every_answer("GenerateFailed") | {
        "cancel_at_once": "CancellationNotObserved",
        "cancel_queued": "QueuedStopIgnored",
    }


class HangsAfterTheTerminal(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        async for item in super().generate(request, ctx):
            yield item
        await asyncio.Event().wait()

    RUNS_OUT = "request_timeout"
    FAILS: ClassVar = {
        **dict.fromkeys(STREAM_CHECKS, "GenerateFailed"),
        **dict.fromkeys(STOP_CHECKS, "CancellationNotObserved"),
        "concurrent": "ConcurrentGenerateFailed",
        "close_midway": "RequestLeaked",
    }


class SaysCancelledUnasked(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        yield LLMEngineOutput.cancelled()

    FAILS: ClassVar = {
        **dict.fromkeys((*STREAM_CHECKS, *STOP_CHECKS[1:]), "GenerateFailed"),
        "concurrent": "ConcurrentGenerateFailed",
        "close_midway": "RequestLeaked",
    }


class YieldsNothing(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        for item in list[LLMEngineOutput]():
            yield item

    FAILS: ClassVar = every_answer("NoChunksYielded")


class RaisesInTheMiddle(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        yield chunk.token(1)
        raise BackendError.StreamIncomplete("lost the accelerator")

    FAILS: ClassVar = every_answer("StreamYieldedError") | {"close_midway": "RequestLeaked"}


class EndsWithAnError(Engine):
    def last(self) -> LLMEngineOutput:
        return LLMEngineOutput.error("lost the accelerator")

    FAILS: ClassVar = {
        **dict.fromkeys(STREAM_CHECKS, "StreamYieldedError"),
        "concurrent": "ConcurrentGenerateFailed",
        "close_midway": "RequestLeaked",
    }


class HasNoTerminal(Engine):
    def last(self) -> LLMEngineOutput:
        return chunk.token(0)

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        if request.stop_conditions.max_tokens == 2:
            yield chunk.token(1)
            yield LLMEngineOutput.stop()
            return
        async for item in super().generate(request, ctx):
            yield item

    FAILS: ClassVar = {
        "generate": "NoTerminalChunk",
        "event_loop": "NoTerminalChunk",
        "concurrent": "ConcurrentGenerateFailed",
        "close_midway": "RequestLeaked",
    }


class NeverEnds(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        while not ctx.is_stopped():
            yield LLMEngineOutput()
        yield LLMEngineOutput.cancelled()

    RUNS_OUT = "request_timeout"
    FAILS: ClassVar = {
        **dict.fromkeys((*STREAM_CHECKS, "cancel_at_end"), "NoTerminalChunk"),
        "concurrent": "ConcurrentGenerateFailed",
        "close_midway": "RequestLeaked",
    }


class GoesOnAfterTheTerminal(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        async for item in super().generate(request, ctx):
            yield item
        yield chunk.token(7)

    FAILS: ClassVar = every_answer("ChunkAfterTerminal") | {"close_midway": "RequestLeaked"}


class HandsNothingOver(Engine):
    """In mode prefill."""

    def __init__(self, mode: DisaggregationMode = DisaggregationMode.PREFILL) -> None:
        super().__init__(mode)

    def last(self) -> LLMEngineOutput:
        return LLMEngineOutput.length()

    FAILS: ClassVar = {
        **dict.fromkeys(STREAM_CHECKS, "NoDisaggregatedParams"),
        "concurrent": "ConcurrentGenerateFailed",
        "close_midway": "RequestLeaked",
    }


class TalksTooMuch(Engine):
    def last(self) -> LLMEngineOutput:
        return super().last().with_tokens([8])

    FAILS: ClassVar = {"max_tokens": "MaxTokensExceeded"}


class ProbeIsNoRequest(Engine):
    async def health_check_payload(self) -> dict[str, Any] | None:
        return {"token_ids": "hello"}

    FAILS: ClassVar = {"health_check_payload": "HealthCheckPayloadFailed"}


class ProbeIsNotAnswered(Engine):
    async def health_check_payload(self) -> dict[str, Any] | None:
        return {"token_ids": []}

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        if not request.token_ids:
            raise BackendError.InvalidArgument("the prompt is empty")
        async for item in super().generate(request, ctx):
            yield item

    FAILS: ClassVar = {"health_check_payload": "HealthCheckPayloadFailed"}


class OneAtATime(Engine):
    busy = False

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        if self.busy:
            raise RuntimeError("there is a request already")
        self.busy = True
        try:
            async for item in super().generate(request, ctx):
                yield item
        finally:
            self.busy = False

    FAILS: ClassVar = {"concurrent": "ConcurrentGenerateFailed", "cancel_queued": "GenerateFailed"}


class SendsIdsOfAnotherLibrary(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        async for item in super().generate(request, ctx):
            item.token_ids = [float(token) for token in item.token_ids]  # type: ignore[misc]
            yield item

    FAILS: ClassVar = alone("InvalidTokens")


class YieldsOneItemAgainAndAgain(Engine):
    """Changes what it has yielded."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        output = LLMEngineOutput()
        async for item in super().generate(request, ctx):
            output.token_ids, output.finish_reason = item.token_ids, item.finish_reason
            yield output

    FAILS: ClassVar = alone("InvalidItem")


class CountsWrongly(Engine):
    def last(self) -> LLMEngineOutput:
        return super().last().with_usage(usage(3, 0))

    FAILS: ClassVar = alone("WrongUsage")


class SaysItAllAgain(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        said: list[int] = []
        async for item in super().generate(request, ctx):
            said += item.token_ids
            yield item.with_tokens(said)

    FAILS: ClassVar = {"max_tokens": "AnswerRepeated"}


class SharesItsCount(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        self.sent = 0
        while self.sent < (request.stop_conditions.max_tokens or 4) and not ctx.is_stopped():
            self.sent += 1
            yield chunk.token(self.sent % 256)
        yield LLMEngineOutput.cancelled() if ctx.is_stopped() else self.last()

    FAILS: ClassVar = {"concurrent": "RequestsMixed"}


class Sleeps(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        async for item in super().generate(request, ctx):
            time.sleep(0.0001)  # noqa: ASYNC251 - the fault
            yield item

    FAILS: ClassVar = {"event_loop": "EventLoopBlocked"}


# Stopping.


class DoesNotLook(Engine):
    """Goes on for some time, and ends as if nothing were."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        for token in range(min(request.stop_conditions.max_tokens or 4, 5)):
            yield chunk.token(token)
        yield LLMEngineOutput.length()

    FAILS: ClassVar = dict.fromkeys(STOP_CHECKS, "CancellationIgnored")


class GoesOnForEver(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        long = (request.stop_conditions.max_tokens or 0) > 10
        for token in range(request.stop_conditions.max_tokens or 4):
            yield chunk.token(token)
            await asyncio.sleep(0.01 if long else 0)
        yield LLMEngineOutput.length()

    RUNS_OUT = "cancel_timeout"
    FAILS: ClassVar = dict.fromkeys(STOP_CHECKS, "CancellationNotObserved") | {"cancel_at_end": "CancellationIgnored"}


class LooksTooLate(Engine):
    """Blocks the event loop for longer than a stop may take."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        async for item in super().generate(request, ctx):
            if ctx.is_stopped():
                time.sleep(0.7)  # noqa: ASYNC251 - the fault
            yield item

    RUNS_OUT = "cancel_timeout"
    FAILS: ClassVar = dict.fromkeys(STOP_CHECKS, "CancellationNotObserved")


class RaisesWhenStopped(Engine):
    error: ClassVar[BaseException] = BackendError.Cancelled("the request was stopped")

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        async for item in super().generate(request, ctx):
            if ctx.is_stopped():
                raise self.error
            yield item

    FAILS: ClassVar = dict.fromkeys(STOP_CHECKS, "StreamYieldedError")


class CancelsItselfWhenStopped(RaisesWhenStopped):
    error = asyncio.CancelledError()


class SaysNothingWhenStopped(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        async for item in super().generate(request, ctx):
            if ctx.is_stopped():
                return
            yield item

    FAILS: ClassVar = dict.fromkeys(STOP_CHECKS, "CancellationIgnored") | {"cancel_at_once": "NoChunksYielded"}


class DoesNotLookAtItsEnd(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        for token in range(request.stop_conditions.max_tokens or 4):
            if ctx.is_stopped():
                yield LLMEngineOutput.cancelled()
                return
            yield chunk.token(token % 256)
        yield self.last()

    FAILS: ClassVar = {"cancel_at_end": "CancellationIgnored"}


class WaitsForItsPlaceRegardless(Engine):
    async def start(self, worker_id: int) -> EngineConfig:
        self.places = asyncio.Semaphore(2)
        return EngineConfig(model="m", max_num_seqs=2)

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        async with self.places:
            async for item in super().generate(request, ctx):
                yield item

    RUNS_OUT = "cancel_timeout"
    FAILS: ClassVar = {"cancel_queued": "QueuedStopIgnored"}


class AbortRaises(Engine):
    async def abort(self, ctx: EngineContext) -> None:
        raise KeyError(ctx.id)

    FAILS: ClassVar = dict.fromkeys(STOP_CHECKS, "AbortFailed")


class CannotBeClosed(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        try:
            async for item in super().generate(request, ctx):
                yield item
        except GeneratorExit:
            yield LLMEngineOutput.cancelled()

    FAILS: ClassVar = {"close_midway": "CloseFailed"}


class ClosingHangs(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        async for item in super().generate(request, ctx):
            try:
                yield item
            except GeneratorExit:
                await asyncio.Event().wait()

    RUNS_OUT = "request_timeout"
    FAILS: ClassVar = {"close_midway": "CloseFailed"}


class HasNothingToClose(Engine):
    def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        return Bare(super().generate(request, ctx))

    FAILS: ClassVar = {"close_midway": "CloseFailed"}


class Bare(AsyncIterator[LLMEngineOutput]):
    """An iterator without `aclose`."""

    def __init__(self, items: AsyncIterator[LLMEngineOutput]) -> None:
        self.items = items

    async def __anext__(self) -> LLMEngineOutput:
        return await anext(self.items)


class LeaksItsPlaces(Engine):
    """Gives a place back at the end of a stream only."""

    async def start(self, worker_id: int) -> EngineConfig:
        self.places = asyncio.Semaphore(3)
        return EngineConfig(model="m", max_num_seqs=3)

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        placed = await place_in(self.places, ctx)
        async for item in super().generate(request, ctx):
            if item.finish_reason is not None and placed:
                self.places.release()
            yield item

    RUNS_OUT = "request_timeout"
    FAILS: ClassVar = {"close_midway": "RequestLeaked"}


# Progress.


class ReportsNoProgress(Engine):
    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="m", capabilities=frozenset({PROGRESS}))

    FAILS: ClassVar = {"progress": "ProgressFailed"}


class MakesNoProgress(Rich):
    def progress(self) -> int:
        return 7

    FAILS: ClassVar = {"progress": "ProgressFailed"}


class CountsInHalves(Rich):
    def progress(self) -> Any:
        return self.steps / 2

    FAILS: ClassVar = {"progress": "ProgressFailed"}


# Embeddings.


class EmbedsNothing(Engine):
    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="m", capabilities=frozenset({EMBED}))

    FAILS: ClassVar = {"embed": "EmbeddingFailed"}


class EmbedsOnlyOne(Rich):
    async def embed(self, request: EmbedRequest, ctx: GenerateContext) -> EmbedOutput:
        return EmbedOutput(embeddings=[[1.0]], prompt_tokens=4)

    FAILS: ClassVar = {"embed": "EmbeddingFailed"}


class EmbedsUnevenly(Rich):
    async def embed(self, request: EmbedRequest, ctx: GenerateContext) -> EmbedOutput:
        return EmbedOutput(embeddings=[[1.0], [1.0, 2.0]], prompt_tokens=4)

    FAILS: ClassVar = {"embed": "EmbeddingFailed"}


class EmbedsNoNumbers(Rich):
    async def embed(self, request: EmbedRequest, ctx: GenerateContext) -> EmbedOutput:
        return EmbedOutput(embeddings=[[1.0], [float("nan")]], prompt_tokens=4)

    FAILS: ClassVar = {"embed": "EmbeddingFailed"}


class CountsNoTokens(Rich):
    async def embed(self, request: EmbedRequest, ctx: GenerateContext) -> EmbedOutput:
        return EmbedOutput(embeddings=[[1.0], [2.0]])

    FAILS: ClassVar = {"embed": "EmbeddingFailed"}


# Scores.


class ScoresNothing(Engine):
    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="m", capabilities=frozenset({RERANK}))

    FAILS: ClassVar = {"score": "ScoringFailed"}


class ScoresOnlyOneQuery(Rich):
    async def score(self, request: ScoreRequest, ctx: GenerateContext) -> ScoreOutput:
        if len(request.queries) > 1:
            raise BackendError.InvalidArgument("one query at a time")
        return await super().score(request, ctx)

    FAILS: ClassVar = {"score": "ScoringFailed"}


class ScoresOnlyTheBest(Rich):
    async def score(self, request: ScoreRequest, ctx: GenerateContext) -> ScoreOutput:
        return ScoreOutput(scores=[1.0], prompt_tokens=9)

    FAILS: ClassVar = {"score": "ScoringFailed"}


class ScoresByRank(Rich):
    async def score(self, request: ScoreRequest, ctx: GenerateContext) -> ScoreOutput:
        scores = sorted((float(len(document)) for document in request.documents), reverse=True)
        return ScoreOutput(scores=scores, prompt_tokens=9)

    FAILS: ClassVar = {"score": "ScoringFailed"}


class ScoresNoNumbers(Rich):
    async def score(self, request: ScoreRequest, ctx: GenerateContext) -> ScoreOutput:
        return ScoreOutput(scores=[float("nan")] * len(request.documents), prompt_tokens=9)

    FAILS: ClassVar = {"score": "ScoringFailed"}


class CountsNoTokensOfPairs(Rich):
    async def score(self, request: ScoreRequest, ctx: GenerateContext) -> ScoreOutput:
        return ScoreOutput(scores=[0.5] * len(request.documents))

    FAILS: ClassVar = {"score": "ScoringFailed"}


# Ending.


class DrainRaises(Engine):
    async def drain(self) -> None:
        raise RuntimeError("nothing to drain")

    FAILS: ClassVar = {"drain": "DrainFailed"}


class CleanupRaises(Engine):
    started = False

    async def start(self, worker_id: int) -> EngineConfig:
        self.started = True
        return await super().start(worker_id)

    async def cleanup(self) -> None:
        if self.started:
            raise RuntimeError("a process did not end")

    FAILS: ClassVar = {"cleanup": "CleanupFailed"}


class CleanupHangs(CleanupRaises):
    async def cleanup(self) -> None:
        if self.started:
            await asyncio.Event().wait()

    RUNS_OUT = "cleanup_timeout"
    FAILS: ClassVar = {"cleanup": "CleanupFailed"}


class CleansUpOnce(Engine):
    async def start(self, worker_id: int) -> EngineConfig:
        self.cache: dict[int, int] | None = {}
        return await super().start(worker_id)

    async def cleanup(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache is not None, "cleaned up before"
            self.cache = None

    FAILS: ClassVar = {"cleanup": "SecondCleanupFailed"}


class CleanupNeedsAStart(Engine):
    async def start(self, worker_id: int) -> EngineConfig:
        self.cache: dict[int, int] = {}
        return await super().start(worker_id)

    async def cleanup(self) -> None:
        self.cache.clear()

    FAILS: ClassVar = {"cleanup_without_start": "CleanupWithoutStartFailed"}


BROKEN = [
    engine
    for engine in list(vars().values())
    if isinstance(engine, type) and issubclass(engine, Engine) and engine.FAILS
]
