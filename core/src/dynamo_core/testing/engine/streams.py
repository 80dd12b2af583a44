"""Reading the stream of one request, and judging what came."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from dynamo_core.contracts.context import EngineContext, GenerateContext
from dynamo_core.contracts.engine import DisaggregationMode, LLMEngine
from dynamo_core.protocol.output import FinishReason, LLMEngineOutput
from dynamo_core.protocol.request import PreprocessedRequest
from dynamo_core.testing.engine.deadline import Escaped, Overdue, told, within
from dynamo_core.testing.engine.failures import (
    ChunkAfterTerminal,
    GenerateFailed,
    NoChunksYielded,
    NoDisaggregatedParams,
    NoTerminalChunk,
    StreamYieldedError,
)

#: A stream without a terminal is read no further than this.
MOST_ITEMS = 100_000


class Reading:
    """One stream, as its reader saw it."""

    def __init__(self, *, most: int = MOST_ITEMS) -> None:
        """Closes the stream after `most` items."""
        self._most = most
        #: Called before the first item is asked for.
        self.on_open: Callable[[], None] | None = None
        #: Called after each item that came.
        self.on_item: Callable[[], None] | None = None
        self.items: list[LLMEngineOutput] = []
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
        """The item that carries a finish reason."""
        return self.items[-1] if self.items and self.items[-1].finish_reason is not None else None

    @property
    def tokens(self) -> int:
        """How many tokens came."""
        return sum(len(item.token_ids) for item in self.items)

    async def read(self, engine: LLMEngine, request: PreprocessedRequest, ctx: EngineContext, seconds: float) -> None:
        """Reads until the stream ends, breaks a rule that ends it for every reader, or is overdue; then closes it."""
        try:
            await within(self.run(engine, request, ctx), seconds)
        except Overdue:
            self.overdue = seconds
        except Escaped as error:
            self.error = error

    async def run(self, engine: LLMEngine, request: PreprocessedRequest, ctx: EngineContext) -> None:
        """As `read`, without an end of the patience."""
        items: Any = None
        try:
            items = engine.generate(request, GenerateContext(ctx))
            if not self._is_stream(items):
                return
            if self.on_open is not None:
                self.on_open()
            async for item in items:
                if not self._take(item):
                    return
                # Gives other streams their turn, and deadlines theirs, though the engine may never wait.
                await asyncio.sleep(0)
            self.ended_at = asyncio.get_running_loop().time()
        except Exception as error:
            self.error = error
        finally:
            await self._close(items)

    def _is_stream(self, items: Any) -> bool:
        if hasattr(items, "__aiter__"):
            return True
        if inspect.iscoroutine(items):
            items.close()
        self.misuse = f"generate returned {_name(items)}, not an async generator"
        return False

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
        """Whether to read on."""
        if self.terminal is not None:
            self.extra = item
            return False
        if not isinstance(item, LLMEngineOutput):
            self.misuse = f"generate yielded {_name(item)}, not LLMEngineOutput"
            return False
        self.items.append(item)
        if self.on_item is not None:
            self.on_item()
        return len(self.items) < self._most


def check_parts(reading: Reading) -> None:
    """Refuses what no stream may be, however it was asked to end.

    Raises:
        GenerateFailed, ChunkAfterTerminal, StreamYieldedError: what came is not a stream, or not a clean one.
    """
    if reading.misuse:
        raise GenerateFailed(reading.misuse)
    if reading.extra is not None:
        raise ChunkAfterTerminal(f"{_item(reading.extra)} came after {_item(reading.items[-1])}")
    if reading.error is not None:
        if not reading.items:
            raise GenerateFailed(f"generate {told(reading.error)}") from reading.error
        raise StreamYieldedError(f"generate {told(reading.error)}, after {_count(reading)}") from reading.error


def check_answer(reading: Reading, mode: DisaggregationMode) -> str:
    """What a whole answer to a plain request looked like.

    Raises:
        ConformanceFailure: it was none.
    """
    check_parts(reading)
    terminal = reading.terminal
    if reading.overdue is not None:
        if reading.items and terminal is None:
            raise NoTerminalChunk(f"{_count(reading)} and no terminal within {reading.overdue:g} s")
        what = "the terminal item came, but the stream did not end" if terminal else "no item came"
        raise GenerateFailed(f"{what} within {reading.overdue:g} s")
    if not reading.items:
        raise NoChunksYielded("the stream ended without any item")
    if terminal is None:
        raise NoTerminalChunk(f"the stream had {_count(reading)}, none with a finish_reason")
    if terminal.finish_reason is FinishReason.ERROR:
        raise StreamYieldedError(f"the terminal item is an error: {terminal.error_message or 'without a message'}")
    if terminal.finish_reason is FinishReason.CANCELLED:
        raise GenerateFailed("the stream ended with 'cancelled', though nobody had stopped it")
    if mode is DisaggregationMode.PREFILL and terminal.disaggregated_params is None:
        raise NoDisaggregatedParams(f"{_item(terminal)} carries none, in mode prefill")
    return f"{_count(reading)}, {counted(reading.tokens, 'token')}, ended with {str(terminal.finish_reason)!r}"


def counted(number: int, thing: str) -> str:
    """How many of something there are, in words."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _count(reading: Reading) -> str:
    return counted(len(reading.items), "item")


def _item(item: Any) -> str:
    if not isinstance(item, LLMEngineOutput):
        return _name(item)
    if item.finish_reason is not None:
        return f"the terminal item {str(item.finish_reason)!r}"
    return f"an item with tokens {item.token_ids[:8]}"


def _name(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
