"""Engines that break one promise each, and the failure that the kit must name for it.

Where a line must be named too, it bears the comment `here`.
"""

from __future__ import annotations

import asyncio
import subprocess
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
    FinishReason,
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

from libs.testing.tests.planted import first, items, maps, mutant

Items = AsyncIterator[LLMEngineOutput]


class Engine(LLMEngine):
    """An engine without a fault: counts up to the limit, 4 tokens without one."""

    NAME = "sound"
    #: The failure that must be named, by the check that must find it.
    FAILS: ClassVar[dict[str, str]] = {}
    #: Words of what was seen or of the remedy that must be said.
    SAYS: ClassVar[str] = ""
    #: The timeout of the kit that runs out for it.
    RUNS_OUT: ClassVar[str] = ""

    def __init__(self, mode: DisaggregationMode = DisaggregationMode.AGGREGATED) -> None:
        super().__init__(PluginConfig(), WorkerConfig(model_name="a-model", disaggregation_mode=mode))

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model=self.worker.model_name)

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
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

    @classmethod
    def failing(cls, fails: dict[str, str], says: str = "", runs_out: str = "", **changes: Any) -> type[Any]:
        """Return the engine with changes, as `mutant` takes them."""
        return mutant(cls, FAILS=fails, SAYS=says, RUNS_OUT=runs_out, **changes)


async def place_in(places: asyncio.Semaphore, ctx: GenerateContext) -> bool:
    """Wait for a place, and for the stop of the request; whether there is a place."""
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

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
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


class Repeats(Engine):
    """An engine without a fault that says the prompt again."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        answer = self.answer(request)
        for token in answer:
            if ctx.is_stopped():
                break
            yield chunk.token(token)
            await asyncio.sleep(0)
        last = LLMEngineOutput.cancelled() if ctx.is_stopped() else LLMEngineOutput.stop()
        yield last if ctx.is_stopped() else last.with_usage(usage(len(request.token_ids), len(answer)))

    @staticmethod
    def answer(request: PreprocessedRequest) -> list[int]:
        limit = request.stop_conditions.max_tokens
        # A long answer where one is asked for, so that it can be stopped.
        return (request.token_ids * (1 if limit is None else limit))[:limit]


def fault(fails: dict[str, str], says: str, runs_out: str = "") -> Callable[[type[Engine]], type[Engine]]:
    """Return a decorator that gives an engine what the kit must find."""

    def decorated(engine: type[Engine]) -> type[Engine]:
        engine.FAILS, engine.SAYS, engine.RUNS_OUT = fails, says, runs_out
        return engine

    return decorated


def raises(error: BaseException) -> Callable[..., Any]:
    """Return what raises an error in place of an async method."""

    async def raising(real: Any, self: Any, *args: Any) -> None:
        raise error

    return raising


def returns(value: Any) -> Callable[..., Any]:
    """Return what returns a value in place of an async method."""

    async def returning(real: Any, self: Any, *args: Any) -> Any:
        return value

    return returning


def yields(*outputs: Callable[[PreprocessedRequest], LLMEngineOutput]) -> Callable[..., Any]:
    """Return what yields these outputs for every request, whether it is stopped or not."""

    async def yielding(real: Any, self: Any, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        for output in outputs:
            yield output(request)

    return yielding


async def hangs(real: Any, self: Any, *args: Any) -> None:
    """Hang in place of an async method."""
    await asyncio.Event().wait()


# What breaks every answer is found by every check that asks for one.

STREAM_CHECKS = ("generate", "max_tokens", "event_loop")
STOP_CHECKS = ("cancel_at_once", "cancel_midway", "cancel_at_end", "cancel_queued")
#: Of an engine whose answers are all the same: it says nothing wrong when it is stopped at once.
CUT_SHORT = {"cancel_at_once": "CancellationIgnored", "close_midway": "RequestLeaked"}
#: Of an engine none of whose answers is sound, beside the checks of a stream.
NO_ANSWER = {"concurrent": "ConcurrentGenerateFailed", "close_midway": "RequestLeaked"}


def every_answer(failure: str, *, cancelled: str | None = None) -> dict[str, str]:
    """Return the failures of an engine none of whose answers is sound; `cancelled`: that of a stopped stream."""
    alone = dict.fromkeys((*STREAM_CHECKS, "close_midway"), failure)
    stopped = dict.fromkeys(STOP_CHECKS, cancelled or failure)
    return alone | stopped | {"concurrent": "ConcurrentGenerateFailed"}


def alone(failure: str) -> dict[str, str]:
    """Return the failures of an engine none of whose answers is sound, unless they are cut short."""
    return dict.fromkeys(STREAM_CHECKS, failure) | NO_ANSWER


def unstopped(failure: str, **others: str) -> dict[str, str]:
    """Return the failures of an engine whose answers are all the same, also those of requests that are stopped."""
    return alone(failure) | dict.fromkeys(STOP_CHECKS, "CancellationIgnored") | others


# Starting.


@fault({"start": "StartFailed"}, "start raised Backend(CannotConnect): no accelerator")
class StartRaises(Engine):
    async def start(self, worker_id: int) -> EngineConfig:
        raise BackendError.CannotConnect("no accelerator")  # here


async def ignore_being_cancelled(real: Any, self: Any, worker_id: int) -> Any:
    """Last longer than the kit waits for last words, though not for ever: the loop of the test has to end."""
    loop = asyncio.get_running_loop()
    until = loop.time() + 2.5
    while loop.time() < until:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(until - loop.time())
    return await real(worker_id)


StartHangs = Engine.failing({"start": "StartFailed"}, runs_out="start_timeout", start=hangs)
StartIgnoresBeingCancelled = Engine.failing(
    {"start": "StartFailed"}, runs_out="start_timeout", start=ignore_being_cancelled
)
StartBlocksTooLong = Engine.failing(
    {"start": "StartFailed"}, runs_out="start_timeout", start=first(lambda self, worker_id: time.sleep(0.7))
)
StartExits = Engine.failing({"start": "StartFailed"}, start=raises(SystemExit(3)))


@fault({"start": "StartFailed"}, "ForgetsToReturnItsConfig.start returned None, expected an EngineConfig")
class ForgetsToReturnItsConfig(Engine):
    async def start(self, worker_id: int) -> Any:  # here
        self.ready = True


@fault({"start": "StartFailed"}, "Expected `int | null`, got `str` - at `EngineConfig.context_length`")
class ReadsItsContextLengthFromTheEnvironment(Engine):
    async def start(self, worker_id: int) -> EngineConfig:  # here
        return EngineConfig(model="a-model", context_length="4096")  # type: ignore[arg-type]


@fault({"start": "StartFailed"}, "and must be async: write `async def start`")
class StartIsNotAsync(Engine):
    def start(self, worker_id: int) -> Any:  # here
        return EngineConfig(model="a-model")


@fault({"start": "EmptyModelInConfig"}, "return `EngineConfig(model=self.worker.model_name)`")
class NamesNoModel(Engine):
    async def start(self, worker_id: int) -> EngineConfig:  # here
        return EngineConfig(model="")


class ConstructorRaises(Engine):
    FAILS: ClassVar = {"start": "StartFailed"}

    def __init__(self, mode: DisaggregationMode = DisaggregationMode.AGGREGATED) -> None:
        raise RuntimeError("no such device")


# Metrics and sources.


class Unscrapable:
    """A collector of metrics whose engine is gone."""

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> list[Any]:
        raise RuntimeError("the engine is gone")


def refuse_subscribing(hear: Callable[[KvEvent], None]) -> None:
    raise RuntimeError("asked twice")


def silent(rank: int) -> KvEventSource:
    return KvEventSource(rank, lambda hear: None)


NO_KV_SOURCES = {"kv_event_sources": "KvEventSourcesFailed", "kv_events": "KvEventSourcesFailed"}

MetricsRaise = Engine.failing(
    {"metrics": "MetricsFailed"},
    setup_metrics=first(lambda self, metrics: metrics.counter("not a name", "…") and None),
)
ScrapingRaises = Engine.failing(
    {"metrics": "MetricsFailed"}, setup_metrics=first(lambda self, metrics: metrics.registry.register(Unscrapable()))
)
KvSourcesRaise = Engine.failing(NO_KV_SOURCES, kv_event_sources=raises(RuntimeError("no publisher")))
KvSubscribingRaises = Engine.failing(NO_KV_SOURCES, kv_event_sources=returns([KvEventSource(0, refuse_subscribing)]))
KvRanksTwice = Engine.failing(NO_KV_SOURCES, kv_event_sources=returns([silent(0), silent(0)]))


class KvRanksChange(Engine):
    FAILS: ClassVar = {
        "kv_event_sources": "KvEventSourcesNotIdempotent",
        "kv_events": "KvEventSourcesNotIdempotent",
    }
    asked = 0

    async def kv_event_sources(self) -> Sequence[KvEventSource]:
        self.asked += 1
        return [silent(rank) for rank in range(self.asked)]


LoadSourcesAreNone = Engine.failing({"load_sources": "LoadSourcesFailed"}, load_sources=returns(None))
LoadSourcesAreOfAnotherKind = Engine.failing({"load_sources": "LoadSourcesFailed"}, load_sources=returns([silent(0)]))


class LoadRanksAreUsedUp(Engine):
    FAILS: ClassVar = {"load_sources": "LoadSourcesNotIdempotent"}
    sources: Sequence[LoadSource] = (LoadSource(0, lambda hear: None),)

    async def load_sources(self) -> Sequence[LoadSource]:
        sources, self.sources = self.sources, []
        return sources


def hear_elsewhere(real: Any, self: Any, rank: int, hear: Callable[[KvEvent], None]) -> None:
    def elsewhere(event: KvEvent) -> None:
        thread = threading.Thread(target=hear, args=(event,))
        thread.start()
        thread.join()

    real(rank, elsewhere)


SkipsAnEvent = Rich.failing(
    {"kv_events": "KvEventsFailed"}, event=lambda real, self, rank: (next(self.numbers[rank]), real(rank))[1]
)
TellsOfAnotherRank = Rich.failing({"kv_events": "KvEventsFailed"}, event=maps(lambda rank: 1 - rank))
TellsNoEvents = Rich.failing({"kv_events": "KvEventsFailed"}, event=lambda real, self, rank: {"event_id": 0})
TellsFromAThread = Rich.failing({"kv_events": "KvEventsFailed"}, listen=hear_elsewhere)


# Answering.


class GenerateRaises(Engine):
    FAILS: ClassVar = every_answer("GenerateFailed") | {"cancel_at_once": "StreamYieldedError"}

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        if request.token_ids:
            raise RuntimeError("out of memory")
        yield LLMEngineOutput.stop()


@fault(every_answer("GenerateFailed"), "returned a coroutine, expected an async generator: write `async def generate`")
class GenerateIsNoGenerator(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Any:  # type: ignore[override]  # here
        return [LLMEngineOutput.stop()]


@fault(every_answer("GenerateFailed"), "YieldsBareTokens.generate yielded an int, expected an LLMEngineOutput")
class YieldsBareTokens(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Any:
        for token in request.token_ids:
            yield token  # here


class NeverAnswers(Engine):
    RUNS_OUT = "request_timeout"
    FAILS: ClassVar = every_answer("GenerateFailed") | {
        "cancel_at_once": "CancellationNotObserved",
        "cancel_queued": "QueuedStopIgnored",
    }

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        await asyncio.Event().wait()
        yield LLMEngineOutput.stop()


async def hang_at_the_end(real: Any, self: Any, *request: Any) -> Items:
    async for item in real(*request):
        yield item
    await asyncio.Event().wait()


async def raise_in_the_middle(real: Any, self: Any, *request: Any) -> Items:
    yield chunk.token(1)
    raise BackendError.StreamIncomplete("lost the accelerator")


async def never_end(real: Any, self: Any, request: Any, ctx: GenerateContext) -> Items:
    while not ctx.is_stopped():
        yield LLMEngineOutput()
    yield LLMEngineOutput.cancelled()


HangsAfterTheTerminal = Engine.failing(
    {
        **dict.fromkeys(STREAM_CHECKS, "GenerateFailed"),
        **dict.fromkeys(STOP_CHECKS, "CancellationNotObserved"),
        **NO_ANSWER,
    },
    runs_out="request_timeout",
    generate=hang_at_the_end,
)
SaysCancelledUnasked = Engine.failing(
    dict.fromkeys((*STREAM_CHECKS, *STOP_CHECKS[1:]), "GenerateFailed") | NO_ANSWER,
    generate=yields(lambda request: LLMEngineOutput.cancelled()),
)
YieldsNothing = Engine.failing(every_answer("NoChunksYielded"), generate=yields())
RaisesInTheMiddle = Engine.failing(
    every_answer("StreamYieldedError") | {"close_midway": "RequestLeaked"}, generate=raise_in_the_middle
)
EndsWithAnError = Engine.failing(
    alone("StreamYieldedError"), last=lambda real, self: LLMEngineOutput.error("lost the accelerator")
)
NeverEnds = Engine.failing(
    dict.fromkeys((*STREAM_CHECKS, "cancel_at_end"), "NoTerminalChunk") | NO_ANSWER,
    runs_out="request_timeout",
    generate=never_end,
)


class HandsNothingOver(Engine):
    """In mode prefill."""

    FAILS: ClassVar = alone("NoDisaggregatedParams")

    def __init__(self, mode: DisaggregationMode = DisaggregationMode.PREFILL) -> None:
        super().__init__(mode)

    def last(self) -> LLMEngineOutput:
        return LLMEngineOutput.length()


@fault(alone("InvalidTokens"), "token id 1.0 is a float, not an integer")
class YieldsFloats(Repeats):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        async for item in super().generate(request, ctx):
            item.token_ids = [token / 1 for token in item.token_ids]  # type: ignore[misc]
            yield item  # here


YieldsOneTokenWithoutAList = Repeats.failing(
    unstopped("InvalidTokens", cancel_at_end="InvalidTokens"),
    "token_ids is an int, not a list of integers",
    generate=yields(lambda request: LLMEngineOutput(token_ids=7)),  # type: ignore[arg-type]
)
YieldsItsPadding = Repeats.failing(
    unstopped("InvalidTokens", cancel_at_end="InvalidTokens"),
    "token id -100 is negative",
    generate=yields(lambda request: chunk.token(-100)),
)
HasAnotherVocabulary = Repeats.failing(
    unstopped("InvalidTokens", cancel_at_end="InvalidTokens"),
    "token id 50256 is beyond the vocabulary, whose ids end at 257",
    generate=yields(lambda request: chunk.token(50256)),
)
WritesItsReasonAsText = Repeats.failing(
    every_answer("InvalidItem") | CUT_SHORT,
    "finish_reason is a str, not a FinishReason: end with LLMEngineOutput.stop()",
    generate=yields(lambda request: LLMEngineOutput(request.token_ids, finish_reason="stop")),  # type: ignore[arg-type]
)
WritesItsUsageAsAMap = Repeats.failing(
    every_answer("InvalidItem") | CUT_SHORT,
    "completion_usage is a dict: make it with usage(prompt, completion)",
    generate=yields(lambda request: LLMEngineOutput.stop().with_usage({"prompt_tokens": 3})),  # type: ignore[arg-type]
)


@fault(alone("InvalidItem"), "make a new item for every yield")
class YieldsOneItemAgainAndAgain(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:  # here
        output = LLMEngineOutput()
        async for item in super().generate(request, ctx):
            output.token_ids, output.finish_reason = item.token_ids, item.finish_reason
            yield output


@fault(unstopped("NoTerminalChunk"), "end with `LLMEngineOutput.stop()`, `.length()` or `.cancelled()`")
class HasNoTerminal(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        for token in request.token_ids:
            yield chunk.token(token)  # here


@fault(every_answer("ChunkAfterTerminal") | {"close_midway": "RequestLeaked"}, "put usage and last tokens into it")
class TellsItsUsageAfterTheTerminal(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        yield LLMEngineOutput.stop().with_tokens(request.token_ids)
        yield LLMEngineOutput().with_usage(usage(3, 3))  # here


@fault(unstopped("WrongUsage"), "usage says 5 completion tokens, 3 came")
class CountsTheTerminal(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        yield chunk.tokens(request.token_ids)
        yield LLMEngineOutput.stop().with_usage(usage(len(request.token_ids), len(request.token_ids) + 2))  # here


CountsPromptAndAnswerTheWrongWay = Repeats.failing(
    every_answer("WrongUsage") | CUT_SHORT,
    "usage says 1 prompt tokens, the prompt had 3",
    generate=yields(
        lambda request: LLMEngineOutput.length().with_tokens([7]).with_usage(usage(1, len(request.token_ids)))
    ),
)
TalksTooMuch = Engine.failing(
    {"max_tokens": "MaxTokensExceeded"},
    "3 tokens came, max_tokens was 2",
    last=lambda real, self: real().with_tokens([8]),
)
TellsTheWholeAnswerEachTime = Repeats.failing(
    alone("AnswerRepeated"),
    "yield `tokens[sent:]` of a library that tells the whole answer each time",
    generate=items(lambda seen, item: [item.with_tokens([*(seen[-1].token_ids if seen else ()), *item.token_ids])]),
)
TellsTheAnswerAgainAtItsEnd = Repeats.failing(
    alone("AnswerRepeated"),
    "usage says 3 completion tokens, 6 came",
    generate=items(
        lambda seen, item: [
            item.with_tokens([t for one in seen for t in one.token_ids]) if item.finish_reason else item
        ]
    ),
)
TellsItsTextAgainAtItsEnd = Engine.failing(
    {check: name for check, name in unstopped("AnswerRepeated").items() if check != "cancel_at_end"},
    "the text that had come was sent again: 'Hello!'",
    start=returns(EngineConfig(model="a-model", model_input="text")),
    generate=yields(
        lambda request: LLMEngineOutput(text="Hel"),
        lambda request: LLMEngineOutput(text="lo!"),
        lambda request: LLMEngineOutput(text="Hello!", finish_reason=FinishReason.STOP),
    ),
)

ProbeIsNoRequest = Engine.failing(
    {"health_check_payload": "HealthCheckPayloadFailed"}, health_check_payload=returns({"token_ids": "hello"})
)


class ProbeIsNotAnswered(Engine):
    FAILS: ClassVar = {"health_check_payload": "HealthCheckPayloadFailed"}

    async def health_check_payload(self) -> dict[str, Any] | None:
        return {"token_ids": []}

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        if not request.token_ids:
            raise BackendError.InvalidArgument("the prompt is empty")
        async for item in super().generate(request, ctx):
            yield item


# The event loop.


@fault({"event_loop": "EventLoopBlocked"}, "await asyncio.sleep(...)")
class SleepsInAHelper(Repeats):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        self.warm_up()
        async for item in super().generate(request, ctx):
            yield item

    def warm_up(self) -> None:
        time.sleep(0.001)  # here


@fault({"event_loop": "EventLoopBlocked"}, "await asyncio.to_thread(...)")
class WaitsForAnotherProcess(Repeats):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        if request.stop_conditions.max_tokens is None:
            subprocess.run(["sleep", "0.7"], check=True)  # noqa: ASYNC221  # here
        async for item in super().generate(request, ctx):
            yield item


# Many requests at once.


@fault({"concurrent": "RequestsMixed"}, "usage says")
class CountsOnItself(Repeats):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        self.sent = 0
        async for item in super().generate(request, ctx):
            self.sent += len(item.token_ids)
            yield item.with_usage(usage(len(request.token_ids), self.sent)) if item.finish_reason else item


@fault({"concurrent": "RequestsMixed"}, "answers have other tokens than those to the same requests alone")
class GoesOnFromTheTokenOfAnother(Repeats):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:  # here
        self.last_token = request.token_ids[-1]
        async for item in super().generate(request, ctx):
            self.last_token = (self.last_token * 31 + 7) % 256
            yield item if item.finish_reason else item.with_tokens([self.last_token])


@fault(
    {"concurrent": "ConcurrentGenerateFailed", "cancel_queued": "GenerateFailed"},
    "let requests beyond its capacity wait",
)
class RefusesASecondRequest(Repeats):
    busy = False

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        if self.busy:
            raise BackendError.EngineShutdown("there is a request already")  # here
        self.busy = True
        try:
            async for item in super().generate(request, ctx):
                yield item
        finally:
            self.busy = False


# Stopping.


@fault(
    dict.fromkeys(STOP_CHECKS, "CancellationNotObserved") | {"cancel_at_end": "CancellationIgnored"},
    "look at `ctx.is_stopped()` before the first yield and between yields",
    "cancel_timeout",
)
class NeverLooks(Repeats):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        for token in self.answer(request):
            yield chunk.token(token)
            await asyncio.sleep(0 if len(self.answer(request)) < 100 else 0.05)  # here
        yield LLMEngineOutput.stop()


@fault(dict.fromkeys(STOP_CHECKS, "CancellationIgnored"), "end with `LLMEngineOutput.cancelled()`")
class EndsWithStopWhenStopped(Repeats):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        tokens = iter(self.answer(request))
        while not ctx.is_stopped() and (token := next(tokens, None)) is not None:
            yield chunk.token(token)
        yield LLMEngineOutput.stop()  # here


@fault({"cancel_at_end": "CancellationIgnored"}, "before every yield, also that of the last item")
class DoesNotLookAfterItsLastToken(Repeats):
    """As an engine whose loop looks before every token, and not before the terminal."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        for token in self.answer(request):
            if ctx.is_stopped():
                yield LLMEngineOutput.cancelled()
                return
            yield chunk.token(token)
        yield LLMEngineOutput.stop()  # here


class LooksTooLate(Engine):
    """Blocks the event loop for longer than a stop may take."""

    RUNS_OUT = "cancel_timeout"
    FAILS: ClassVar = dict.fromkeys(STOP_CHECKS, "CancellationNotObserved")

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        async for item in super().generate(request, ctx):
            if ctx.is_stopped():
                time.sleep(0.7)  # noqa: ASYNC251 - the fault
            yield item


@fault(dict.fromkeys(STOP_CHECKS, "StreamYieldedError"), "end a stopped request with `LLMEngineOutput.cancelled()`")
class RaisesWhenStopped(Engine):
    error: ClassVar[BaseException] = BackendError.Cancelled("the client has left")

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        async for item in super().generate(request, ctx):
            if ctx.is_stopped():
                raise self.error  # here
            yield item


CancelsItselfWhenStopped = mutant(RaisesWhenStopped, error=asyncio.CancelledError(), SAYS="")


class SaysNothingWhenStopped(Engine):
    FAILS: ClassVar = dict.fromkeys(STOP_CHECKS, "CancellationIgnored") | {"cancel_at_once": "NoChunksYielded"}

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        async for item in super().generate(request, ctx):
            if ctx.is_stopped():
                return
            yield item


@fault({"cancel_queued": "QueuedStopIgnored"}, "wait for the place and for `ctx.stopped()` at once", "cancel_timeout")
class WaitsForAPlaceWhateverHappens(Repeats):
    async def start(self, worker_id: int) -> EngineConfig:
        self.places = asyncio.Semaphore(2)
        return EngineConfig(model="a-model", max_num_seqs=2)

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        async with self.places:  # here
            async for item in super().generate(request, ctx):
                yield item


AbortRaises = Engine.failing(dict.fromkeys(STOP_CHECKS, "AbortFailed"), abort=raises(KeyError("7")))


@fault({"close_midway": "CloseFailed"}, "yield nothing in a `finally`, and never catch `GeneratorExit`")
class CannotBeClosed(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        try:
            async for item in super().generate(request, ctx):
                yield item
        except GeneratorExit:
            yield LLMEngineOutput.cancelled()


class ClosingHangs(Engine):
    RUNS_OUT = "request_timeout"
    FAILS: ClassVar = {"close_midway": "CloseFailed"}

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        async for item in super().generate(request, ctx):
            try:
                yield item
            except GeneratorExit:
                await asyncio.Event().wait()


class Bare(AsyncIterator[LLMEngineOutput]):
    """An iterator without `aclose`."""

    def __init__(self, items: Items) -> None:
        self.items = items

    async def __anext__(self) -> LLMEngineOutput:
        return await anext(self.items)


HasNothingToClose = Engine.failing(
    {"close_midway": "CloseFailed"}, generate=lambda real, self, *request: Bare(real(*request))
)


@fault(
    {"close_midway": "RequestLeaked"},
    "release slots, blocks and map entries in a `finally` inside `generate`",
    "request_timeout",
)
class LeaksItsPlaces(Engine):
    """Gives a place back at the end of a stream only."""

    async def start(self, worker_id: int) -> EngineConfig:
        self.places = asyncio.Semaphore(3)
        return EngineConfig(model="m", max_num_seqs=3)

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        placed = await place_in(self.places, ctx)
        async for item in super().generate(request, ctx):
            if item.finish_reason is not None and placed:
                self.places.release()
            yield item


# Progress, embeddings and scores.


def able(capability: str) -> Any:
    """Return the start of an engine that says it can do something."""
    return returns(EngineConfig(model="m", capabilities=frozenset({capability})))


def embeds(*embeddings: list[float], tokens: int = 4) -> Any:
    return returns(EmbedOutput(embeddings=list(embeddings), prompt_tokens=tokens))


def scores(score: Callable[[ScoreRequest], list[float]], tokens: int = 9) -> Any:
    async def scored(real: Any, self: Any, request: ScoreRequest, ctx: GenerateContext) -> ScoreOutput:
        return ScoreOutput(scores=score(request), prompt_tokens=tokens)

    return scored


ReportsNoProgress = Engine.failing({"progress": "ProgressFailed"}, start=able(PROGRESS))
MakesNoProgress = Rich.failing({"progress": "ProgressFailed"}, progress=lambda real, self: 7)
CountsInHalves = Rich.failing({"progress": "ProgressFailed"}, progress=lambda real, self: self.steps / 2)

EmbedsNothing = Engine.failing({"embed": "EmbeddingFailed"}, start=able(EMBED))
EmbedsOnlyOne = Rich.failing({"embed": "EmbeddingFailed"}, embed=embeds([1.0]))
EmbedsUnevenly = Rich.failing({"embed": "EmbeddingFailed"}, embed=embeds([1.0], [1.0, 2.0]))
EmbedsNoNumbers = Rich.failing({"embed": "EmbeddingFailed"}, embed=embeds([1.0], [float("nan")]))
CountsNoTokens = Rich.failing({"embed": "EmbeddingFailed"}, embed=embeds([1.0], [2.0], tokens=0))


async def score_one_query(real: Any, self: Any, request: ScoreRequest, ctx: GenerateContext) -> Any:
    if len(request.queries) > 1:
        raise BackendError.InvalidArgument("one query at a time")
    return await real(request, ctx)


ScoresNothing = Engine.failing({"score": "ScoringFailed"}, start=able(RERANK))
ScoresOnlyOneQuery = Rich.failing({"score": "ScoringFailed"}, score=score_one_query)
ScoresOnlyTheBest = Rich.failing({"score": "ScoringFailed"}, score=scores(lambda request: [1.0]))
ScoresByRank = Rich.failing(
    {"score": "ScoringFailed"},
    score=scores(lambda request: sorted((float(len(document)) for document in request.documents), reverse=True)),
)
ScoresNoNumbers = Rich.failing(
    {"score": "ScoringFailed"}, score=scores(lambda request: [float("nan")] * len(request.documents))
)
CountsNoTokensOfPairs = Rich.failing(
    {"score": "ScoringFailed"}, score=scores(lambda request: [0.5] * len(request.documents), tokens=0)
)


# Ending.


class CleanupRaises(Engine):
    FAILS: ClassVar = {"cleanup": "CleanupFailed"}
    started = False

    async def start(self, worker_id: int) -> EngineConfig:
        self.started = True
        return await super().start(worker_id)

    async def cleanup(self) -> None:
        if self.started:
            await self.release()

    async def release(self) -> None:
        raise RuntimeError("a process did not end")


DrainRaises = Engine.failing({"drain": "DrainFailed"}, drain=raises(RuntimeError("nothing to drain")))
CleanupHangs = mutant(CleanupRaises, RUNS_OUT="cleanup_timeout", release=hangs)


@fault({"cleanup": "SecondCleanupFailed"}, "take things out of their attributes before releasing them")
class ReleasesTwice(Engine):
    blocks: list[int] | None = None

    async def start(self, worker_id: int) -> EngineConfig:
        self.blocks = [1]
        return await super().start(worker_id)

    async def cleanup(self) -> None:
        if self.blocks is not None:
            self.blocks.remove(1)  # here


@fault({"cleanup_without_start": "CleanupWithoutStartFailed"}, "set everything that `cleanup` uses in the constructor")
class ReleasesWhatItNeverHad(Engine):
    async def start(self, worker_id: int) -> EngineConfig:
        self.blocks: list[int] = []
        return await super().start(worker_id)

    async def cleanup(self) -> None:
        self.blocks.clear()  # here


#: The broken engines by name.
BROKEN: dict[str, Any] = {
    name: engine
    for name, engine in list(vars().items())
    if isinstance(engine, type) and issubclass(engine, Engine) and engine.FAILS
}
