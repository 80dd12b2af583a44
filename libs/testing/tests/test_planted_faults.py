"""Mistakes that authors of engines make: the kit, run as its page says, names each with its line or the right remedy.

The line that must be named bears the comment `here`.
"""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest
from dynamo_core import (
    BackendError,
    EngineConfig,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    WorkerConfig,
    chunk,
    usage,
)
from dynamo_testing import ConformanceFailure, run_conformance

#: For faults that only show when time has run out, in seconds. Other engines have plenty, as on a busy machine.
HURRY: dict[str, Any] = {"cancel_timeout": 0.4}
PLENTY: dict[str, Any] = {"cancel_timeout": 20.0}

Items = AsyncIterator[LLMEngineOutput]


class Sound(LLMEngine):
    """Says the prompt again. What the engines below are made from, each with one mistake."""

    NAME = "planted"
    #: What must be named: the failure, and words of what was seen or of the remedy.
    FAILURE: ClassVar[str] = ""
    SAYS: ClassVar[str] = ""

    def __init__(self) -> None:
        super().__init__(PluginConfig(), WorkerConfig(model_name="a-model"))

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model=self.worker.model_name)

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        prompt, sent = request.token_ids, 0
        answer = self.answer(request)
        while not ctx.is_stopped():
            if sent == len(answer):
                yield LLMEngineOutput.stop().with_usage(usage(len(prompt), sent))
                return
            yield chunk.token(answer[sent])
            sent += 1
            await asyncio.sleep(0)
        yield LLMEngineOutput.cancelled().with_usage(usage(len(prompt), sent))

    @staticmethod
    def answer(request: PreprocessedRequest) -> list[int]:
        limit = request.stop_conditions.max_tokens
        # A long answer where one is asked for, so that it can be stopped.
        return (request.token_ids * (1 if limit is None else limit))[:limit]

    async def cleanup(self) -> None:
        """Nothing to release."""


# Starting and ending.


class ForgetsToReturnItsConfig(Sound):
    FAILURE, SAYS = "StartFailed", "ForgetsToReturnItsConfig.start returned None, expected an EngineConfig"

    async def start(self, worker_id: int) -> Any:  # here
        self.ready = True


class ReturnsAMapFromStart(Sound):
    FAILURE, SAYS = "StartFailed", "ReturnsAMapFromStart.start returned a dict, expected an EngineConfig"

    async def start(self, worker_id: int) -> Any:  # here
        return {"model": "a-model"}


class ReadsItsContextLengthFromTheEnvironment(Sound):
    FAILURE, SAYS = "StartFailed", "Expected `int | null`, got `str` - at `EngineConfig.context_length`"

    async def start(self, worker_id: int) -> EngineConfig:  # here
        return EngineConfig(model="a-model", context_length="4096")  # type: ignore[arg-type]


class StartsWithoutBeingAsync(Sound):
    FAILURE, SAYS = "StartFailed", "and must be async: write `async def start`"

    def start(self, worker_id: int) -> Any:  # here
        return EngineConfig(model="a-model")


class NamesNoModel(Sound):
    FAILURE, SAYS = "EmptyModelInConfig", "return `EngineConfig(model=self.worker.model_name)`"

    async def start(self, worker_id: int) -> EngineConfig:  # here
        return EngineConfig(model="")


class ReleasesWhatItNeverHad(Sound):
    FAILURE, SAYS = "CleanupWithoutStartFailed", "set everything that `cleanup` uses in the constructor"

    async def start(self, worker_id: int) -> EngineConfig:
        self.blocks: list[int] = []
        return await super().start(worker_id)

    async def cleanup(self) -> None:
        self.blocks.clear()  # here


class ReleasesTwice(Sound):
    FAILURE, SAYS = "SecondCleanupFailed", "take things out of their attributes before releasing them"

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[int] | None = None

    async def start(self, worker_id: int) -> EngineConfig:
        self.blocks = [1]
        return await super().start(worker_id)

    async def cleanup(self) -> None:
        if self.blocks is not None:
            self.blocks.remove(1)  # here


# What is yielded.


class IsNoGenerator(Sound):
    FAILURE, SAYS = "GenerateFailed", "returned a coroutine, expected an async generator: write `async def generate`"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Any:  # type: ignore[override]  # here
        return [LLMEngineOutput.stop()]


class YieldsBareTokens(Sound):
    FAILURE, SAYS = "GenerateFailed", "YieldsBareTokens.generate yielded an int, expected an LLMEngineOutput"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Any:
        for token in request.token_ids:
            yield token  # here


class YieldsTokensAsText(Sound):
    FAILURE, SAYS = "InvalidTokens", "token id '1' is a str, not an integer"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        yield chunk.tokens([str(token) for token in request.token_ids])  # type: ignore[misc]  # here
        yield LLMEngineOutput.stop()


class YieldsFloats(Sound):
    FAILURE, SAYS = "InvalidTokens", "token id 1.0 is a float, not an integer"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        for token in request.token_ids:
            yield LLMEngineOutput([token / 1])  # type: ignore[list-item]  # here
        yield LLMEngineOutput.stop()


class YieldsOneTokenWithoutAList(Sound):
    FAILURE, SAYS = "InvalidTokens", "token_ids is an int, not a list of integers"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        for token in request.token_ids:
            yield LLMEngineOutput(token_ids=token)  # type: ignore[arg-type]  # here
        yield LLMEngineOutput.stop()


class YieldsItsPadding(Sound):
    FAILURE, SAYS = "InvalidTokens", "token id -100 is negative"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        yield chunk.tokens([*request.token_ids, -100])  # here
        yield LLMEngineOutput.stop()


class HasAnotherVocabulary(Sound):
    FAILURE, SAYS = "InvalidTokens", "token id 50256 is beyond the vocabulary, whose ids end at 257"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        yield chunk.token(50256)  # here
        yield LLMEngineOutput.stop()


class WritesItsReasonAsText(Sound):
    FAILURE, SAYS = "InvalidItem", "finish_reason is a str, not a FinishReason: end with LLMEngineOutput.stop()"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        yield LLMEngineOutput(request.token_ids, finish_reason="stop")  # type: ignore[arg-type]  # here


class WritesItsUsageAsAMap(Sound):
    FAILURE, SAYS = "InvalidItem", "completion_usage is a dict: make it with usage(prompt, completion)"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        last = LLMEngineOutput.stop().with_tokens(request.token_ids)
        last.completion_usage = {"prompt_tokens": 3, "completion_tokens": 3}  # type: ignore[assignment]
        yield last  # here


class YieldsOneItemAgainAndAgain(Sound):
    FAILURE, SAYS = "InvalidItem", "make a new item for every yield"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:  # here
        output = LLMEngineOutput()
        for token in request.token_ids:
            output.token_ids = [token]
            yield output
        yield LLMEngineOutput.stop()


class HasNoTerminal(Sound):
    FAILURE, SAYS = "NoTerminalChunk", "end with `LLMEngineOutput.stop()`, `.length()` or `.cancelled()`"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        for token in request.token_ids:
            yield chunk.token(token)  # here


class TellsItsUsageAfterTheTerminal(Sound):
    FAILURE, SAYS = "ChunkAfterTerminal", "put usage and last tokens into it"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        yield LLMEngineOutput.stop().with_tokens(request.token_ids)
        yield LLMEngineOutput().with_usage(usage(3, 3))  # here


class CountsTheTerminal(Sound):
    FAILURE, SAYS = "WrongUsage", "usage says 5 completion tokens, 3 came"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        yield chunk.tokens(request.token_ids)
        yield LLMEngineOutput.stop().with_usage(usage(len(request.token_ids), len(request.token_ids) + 2))  # here


class CountsPromptAndAnswerTheWrongWay(Sound):
    FAILURE, SAYS = "WrongUsage", "usage says 1 prompt tokens, the prompt had 3"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        yield LLMEngineOutput.length().with_tokens([7]).with_usage(usage(1, len(request.token_ids)))  # here


class IgnoresTheLimit(Sound):
    FAILURE, SAYS = "MaxTokensExceeded", "3 tokens came, max_tokens was 2"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        yield chunk.tokens(request.token_ids)
        yield LLMEngineOutput.stop()  # here


class TellsTheWholeAnswerEachTime(Sound):
    """As libraries do whose outputs are cumulative."""

    FAILURE, SAYS = "AnswerRepeated", "yield `tokens[sent:]` of a library that tells the whole answer each time"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        answer = self.answer(request)
        for sent in range(len(answer)):
            yield chunk.tokens(answer[: sent + 1])  # here
        yield LLMEngineOutput.stop()


class TellsTheAnswerAgainAtItsEnd(Sound):
    FAILURE, SAYS = "AnswerRepeated", "usage says 3 completion tokens, 6 came"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        answer = self.answer(request)
        for token in answer:
            yield chunk.token(token)
        told = usage(len(request.token_ids), len(answer))
        yield LLMEngineOutput.stop().with_tokens(answer).with_usage(told)  # here


class TellsItsTextAgainAtItsEnd(Sound):
    FAILURE, SAYS = "AnswerRepeated", "the text that had come was sent again: 'Hello!'"

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="a-model", model_input="text")

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        for text in ("Hel", "lo!"):
            yield LLMEngineOutput(text=text)
        last = LLMEngineOutput.stop()
        last.text = "Hello!"
        yield last  # here


# The event loop.


class SleepsBetweenTokens(Sound):
    FAILURE, SAYS = "EventLoopBlocked", "time.sleep is called in the event loop"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        async for item in super().generate(request, ctx):
            time.sleep(0.001)  # noqa: ASYNC251  # here
            yield item


class SleepsInAHelper(Sound):
    FAILURE, SAYS = "EventLoopBlocked", "await asyncio.sleep(...)"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        self.warm_up()
        async for item in super().generate(request, ctx):
            yield item

    def warm_up(self) -> None:
        time.sleep(0.001)  # here


class WaitsForAnotherProcess(Sound):
    FAILURE, SAYS = "EventLoopBlocked", "await asyncio.to_thread(...)"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        if request.stop_conditions.max_tokens is None:
            subprocess.run(["sleep", "0.7"], check=True)  # noqa: ASYNC221  # here
        async for item in super().generate(request, ctx):
            yield item


# Many requests at once.


class KeepsThePromptOnItself(Sound):
    FAILURE, SAYS = "RequestsMixed", "keep prompt, counters and output in local variables of `generate`"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        self.prompt = self.answer(request)
        sent = 0
        while not ctx.is_stopped():
            if sent >= len(self.prompt):
                yield LLMEngineOutput.stop()
                return
            yield chunk.token(self.prompt[sent])
            sent += 1
        yield LLMEngineOutput.cancelled()


class CountsOnItself(Sound):
    FAILURE, SAYS = "RequestsMixed", "usage says"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        self.sent = 0
        for token in self.answer(request):
            if ctx.is_stopped():
                break
            yield chunk.token(token)
            self.sent += 1
        last = LLMEngineOutput.cancelled() if ctx.is_stopped() else LLMEngineOutput.length()
        yield last.with_usage(usage(len(request.token_ids), self.sent))


class GoesOnFromTheTokenOfAnother(Sound):
    FAILURE, SAYS = "RequestsMixed", "answers have other tokens than those to the same requests alone"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:  # here
        self.last = request.token_ids[-1]
        for _ in self.answer(request):
            if ctx.is_stopped():
                break
            self.last = (self.last * 31 + 7) % 256
            yield chunk.token(self.last)
        yield LLMEngineOutput.cancelled() if ctx.is_stopped() else LLMEngineOutput.length()


class RefusesASecondRequest(Sound):
    FAILURE, SAYS = "ConcurrentGenerateFailed", "let requests beyond its capacity wait"

    async def start(self, worker_id: int) -> EngineConfig:
        self.busy = asyncio.Lock()
        return EngineConfig(model="a-model")

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        if self.busy.locked():
            raise BackendError.EngineShutdown("there is a request already")  # here
        async with self.busy:
            async for item in super().generate(request, ctx):
                yield item


# Stopping.


class NeverLooks(Sound):
    FAILURE, SAYS = "CancellationNotObserved", "look at `ctx.is_stopped()` before the first yield and between yields"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        for token in self.answer(request):
            yield chunk.token(token)
            await asyncio.sleep(0 if len(self.answer(request)) < 100 else 0.05)  # here
        yield LLMEngineOutput.stop()


class EndsWithStopWhenStopped(Sound):
    FAILURE, SAYS = "CancellationIgnored", "end with `LLMEngineOutput.cancelled()`"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        tokens = iter(self.answer(request))
        while not ctx.is_stopped() and (token := next(tokens, None)) is not None:
            yield chunk.token(token)
        yield LLMEngineOutput.stop()  # here


class RaisesWhenStopped(Sound):
    FAILURE, SAYS = "StreamYieldedError", "end a stopped request with `LLMEngineOutput.cancelled()`"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        async for item in super().generate(request, ctx):
            if ctx.is_stopped():
                raise BackendError.Cancelled("the client has left")  # here
            yield item


class DoesNotLookAfterItsLastToken(Sound):
    """As an engine whose loop looks before every token, and not before the terminal."""

    FAILURE, SAYS = "CancellationIgnored", "before every yield, also that of the last item"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        for token in self.answer(request):
            if ctx.is_stopped():
                yield LLMEngineOutput.cancelled()
                return
            yield chunk.token(token)
        yield LLMEngineOutput.stop()  # here


class WaitsForAPlaceWhateverHappens(Sound):
    FAILURE, SAYS = "QueuedStopIgnored", "wait for the place and for `ctx.stopped()` at once"

    async def start(self, worker_id: int) -> EngineConfig:
        self.places = asyncio.Semaphore(2)
        return EngineConfig(model="a-model")

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        async with self.places:  # here
            async for item in super().generate(request, ctx):
                yield item


class KeepsItsPlaceWhenItIsClosed(Sound):
    FAILURE, SAYS = "RequestLeaked", "release slots, blocks and map entries in a `finally` inside `generate`"

    async def start(self, worker_id: int) -> EngineConfig:
        self.running = 0
        return EngineConfig(model="a-model")

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        if self.running > 8:
            raise BackendError.EngineShutdown("no place is free")  # here
        self.running += 1
        async for item in super().generate(request, ctx):
            if item.finish_reason is not None:
                self.running -= 1
            yield item


class SpeaksWhenItIsClosed(Sound):
    FAILURE, SAYS = "CloseFailed", "yield nothing in a `finally`, and never catch `GeneratorExit`"

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        ended = False
        try:
            async for item in super().generate(request, ctx):
                ended = item.finish_reason is not None
                yield item
        finally:
            if not ended:
                yield LLMEngineOutput.cancelled()


#: Those for which time has to run out.
LATE = (NeverLooks, WaitsForAPlaceWhateverHappens)

PLANTED = [cls for cls in list(vars().values()) if isinstance(cls, type) and issubclass(cls, Sound) and cls.FAILURE]


def line_of(planted: type[Sound]) -> int | None:
    """The line that must be named."""
    lines, first = inspect.getsourcelines(planted)
    marked = [first + at for at, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return marked[0] if marked else None


async def test_the_engine_that_they_are_made_from_is_sound() -> None:
    assert (await run_conformance(Sound)).passed


def test_there_are_many_of_them() -> None:
    assert len(PLANTED) >= 20


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__)
async def test_a_planted_fault_is_named_with_its_line_or_the_right_remedy(planted: Any) -> None:
    with pytest.raises(ConformanceFailure) as caught:
        await run_conformance(planted, **(HURRY if planted in LATE else PLENTY))

    said, line = str(caught.value), line_of(planted)
    assert caught.value.name == planted.FAILURE, said
    assert planted.SAYS in said
    if line is not None:
        assert f"(test_planted_faults.py, line {line})" in said
