"""Reading the stream of one request, and judging the items."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from dynamo_core.contracts.engine import DisaggregationMode, LLMEngine
from dynamo_core.contracts.engine_boundary import (
    content_fault,
    defined_at,
    item_fault,
    stream_fault,
    suspended_at,
    type_name,
    usage_fault,
)
from dynamo_core.contracts.requests.context import EngineContext, GenerateContext
from dynamo_core.protocol.output import FinishReason, LLMEngineOutput
from dynamo_core.protocol.request import PreprocessedRequest
from dynamo_runtime.worker.stream_validator import sent_twice

from dynamo_testing.engine.bounded_calls import Escaped, Overdue, told, within
from dynamo_testing.engine.failures import (
    AnswerRepeated,
    ChunkAfterTerminal,
    GenerateFailed,
    InvalidItem,
    InvalidTokens,
    NoChunksYielded,
    NoDisaggregatedParams,
    NoTerminalChunk,
    StreamYieldedError,
    WrongUsage,
)

#: A stream without a terminal is read no further than this.
MOST_ITEMS = 100_000


class Reading:
    """One stream, as its reader saw it."""

    def __init__(self, *, most: int = MOST_ITEMS) -> None:
        """Close the stream after `most` items."""
        self._most = most
        #: Called before the first item is asked for.
        self.on_open: Callable[[], None] | None = None
        #: Called after each item that came.
        self.on_item: Callable[[], None] | None = None
        self.request: PreprocessedRequest | None = None
        self.items: list[LLMEngineOutput] = []
        #: The tokens of each item when it came, which it should have still.
        self._brought: list[list[Any]] = []
        self._terminal: LLMEngineOutput | None = None
        #: Where in the engine's code each item was yielded, and where `generate` is written; in brackets.
        self.places: list[str] = []
        self.method = ""
        #: All tokens, in order; and where an item began with those that had come before it.
        self.token_ids: list[Any] = []
        self.repeated = ""
        #: Where the last item was yielded; if no more came in time, what was waited for.
        self.place = ""
        #: What `generate` returned.
        self.stream: Any = None
        #: What came after the terminal.
        self.extra: Any = None
        self.error: Exception | None = None
        #: What makes it no stream of outputs.
        self.misuse = ""
        #: The seconds it was given, if they were not enough.
        self.overdue: float | None = None
        #: When the stream had ended by itself, on the loop's clock.
        self.ended_at: float | None = None
        #: Whether its closing has begun, whether it can be closed, and what that raised.
        self.closing = False
        self.closable = True
        self.close_error: Exception | None = None

    @property
    def terminal(self) -> LLMEngineOutput | None:
        """The item that carried a finish reason when it came."""
        return self._terminal

    @property
    def tokens(self) -> int:
        """The number of tokens that came."""
        return len(self.token_ids)

    @property
    def changed(self) -> bool:
        """Whether an item is not any more what it was when it came."""
        return any(item.token_ids != brought for item, brought in zip(self.items, self._brought, strict=True))

    async def read(self, engine: LLMEngine, request: PreprocessedRequest, ctx: EngineContext, seconds: float) -> None:
        """Read until the stream ends, breaks a rule that ends it for every reader, or is overdue; then close it."""
        try:
            await within(self.run(engine, request, ctx), seconds, late=self.look)
        except Overdue:
            self.overdue = seconds
        except Escaped as error:
            self.error = error

    async def run(self, engine: LLMEngine, request: PreprocessedRequest, ctx: EngineContext) -> None:
        """Read like `read`, without a deadline."""
        items: Any = None
        self.request = request
        self.method = defined_at(engine, "generate")
        try:
            items = self.stream = engine.generate(request, GenerateContext(ctx))
            if not hasattr(items, "__aiter__"):
                self.misuse = stream_fault(engine, items)
                return
            if self.on_open is not None:
                self.on_open()
            async for item in items:
                self.place = suspended_at(items) or self.method
                if not isinstance(item, LLMEngineOutput) and self.terminal is None:
                    self.misuse = item_fault(engine, items, item)
                    return
                if not self._take(item):
                    return
                # Gives other streams their turn, and deadlines theirs, though the engine may never wait.
                await asyncio.sleep(0)
            self.ended_at = asyncio.get_running_loop().time()
        except Exception as error:
            self.error = error
        finally:
            await self._close(items)

    def look(self) -> None:
        """Remember where the engine is, for it will be interrupted."""
        self.place = suspended_at(self.stream) or self.place

    async def _close(self, items: Any) -> None:
        close = getattr(items, "aclose", None)
        self.closable = close is not None
        if close is None:
            return
        self.closing = True
        try:
            await close()
        except Exception as error:
            self.close_error = error

    def _take(self, item: Any) -> bool:
        """Return whether to read on."""
        if self.terminal is not None:
            self.extra = item
            return False
        tokens = list(item.token_ids) if isinstance(item.token_ids, list) else []
        if sent_twice(self.token_ids, tokens):
            self.repeated = self.repeated or self.place
        self.items.append(item)
        self.places.append(self.place)
        self._brought.append(tokens)
        if item.finish_reason is not None:
            self._terminal = item
        self.token_ids += tokens
        if self.on_item is not None:
            self.on_item()
        return len(self.items) < self._most


def check_parts(reading: Reading) -> None:
    """Refuse what no stream may be, however it was asked to end.

    Raises:
        GenerateFailed, ChunkAfterTerminal, StreamYieldedError: what came is not a stream, or not a clean one.
    """
    if reading.misuse:
        raise GenerateFailed(reading.misuse)
    if reading.extra is not None:
        raise ChunkAfterTerminal(f"{_item(reading.extra)} came after {_item(reading.items[-1])}{reading.place}")
    if reading.error is not None:
        if not reading.items:
            raise GenerateFailed(f"generate {told(reading.error)}") from reading.error
        raise StreamYieldedError(f"generate {told(reading.error)}, after {_count(reading)}") from reading.error


def check_answer(
    reading: Reading, mode: DisaggregationMode, *, vocabulary: int | None = None, text: bool = False
) -> str:
    """Return what a whole answer to a plain request looked like.

    `vocabulary` is the number of token ids, None if it is not known; `text` is true of an engine of texts.

    Raises:
        ConformanceFailure: it was none.
    """
    check_parts(reading)
    terminal = reading.terminal
    if reading.overdue is not None:
        if reading.items and terminal is None:
            raise NoTerminalChunk(f"{_count(reading)} and no terminal within {reading.overdue:g} s{reading.place}")
        what = "the terminal item came, but the stream did not end" if terminal else "no item came"
        raise GenerateFailed(f"{what} within {reading.overdue:g} s{reading.place}")
    if not reading.items:
        raise NoChunksYielded(f"the stream ended without any item{reading.method}")
    check_contents(reading, vocabulary)
    if terminal is None:
        raise NoTerminalChunk(f"the stream had {_count(reading)}, none with a finish_reason{reading.place}")
    if terminal.finish_reason is FinishReason.ERROR:
        raise StreamYieldedError(f"the terminal item is an error: {terminal.error_message or 'without a message'}")
    if terminal.finish_reason is FinishReason.CANCELLED:
        raise GenerateFailed(f"the stream ended with 'cancelled', though no caller had stopped it{reading.place}")
    if mode is DisaggregationMode.PREFILL and terminal.disaggregated_params is None:
        raise NoDisaggregatedParams(f"{_item(terminal)} carries none, in mode prefill{reading.place}")
    _check_usage(reading, terminal, text)
    return f"{_count(reading)}, {counted(reading.tokens, 'token')}, ended with {str(terminal.finish_reason)!r}"


def check_contents(reading: Reading, vocabulary: int | None) -> None:
    """Refuse items with something in them that is of a wrong type, or no token of the model.

    Raises:
        InvalidTokens, InvalidItem: there is such an item.
    """
    for item, place in zip(reading.items, reading.places, strict=True):
        fault = content_fault(item, vocabulary)
        if fault:
            raise (InvalidTokens if fault.startswith("token") else InvalidItem)(f"{fault}{place}")
    if reading.changed:
        raise InvalidItem(f"an item was changed after it had been yielded{reading.method}")


def _check_usage(reading: Reading, terminal: LLMEngineOutput, text: bool) -> None:
    if text:
        _check_text(reading)
    if terminal.completion_usage is None or reading.request is None:
        return
    fault = usage_fault(
        terminal.completion_usage,
        prompt=None if text else len(reading.request.token_ids),
        tokens=None if text else reading.tokens,
        stopped=terminal.finish_reason in (FinishReason.STOP, FinishReason.EOS),
    )
    if fault and reading.repeated:
        raise AnswerRepeated(f"the tokens that had come were sent again, and {fault}{reading.repeated}")
    if fault:
        raise WrongUsage(f"{fault}{reading.place}")


def _check_text(reading: Reading) -> None:
    texts = [item.text for item in reading.items if item.text]
    *before, last = texts or [""]
    whole = len(before) > 1 and last == "".join(before)
    grows = len(before) > 1 and all(len(one) < len(other) and other.startswith(one) for one, other in pairwise(texts))
    if whole or grows:
        raise AnswerRepeated(f"the text that had come was sent again: {last[:40]!r}{reading.place}")


def counted(number: int, thing: str) -> str:
    """Return how many of something there are, in words."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _count(reading: Reading) -> str:
    return counted(len(reading.items), "item")


def _item(item: Any) -> str:
    if not isinstance(item, LLMEngineOutput):
        return type_name(item)
    if item.finish_reason is not None:
        return f"the terminal item {str(item.finish_reason)!r}"
    return f"an item with tokens {item.token_ids[:8]}"
