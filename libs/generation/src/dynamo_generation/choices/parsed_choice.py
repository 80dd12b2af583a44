"""A choice whose text is parsed into reasoning, content and tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from dynamo_core import (
    ContentDelta,
    LLMEngineOutput,
    ParserDelta,
    PreprocessedRequest,
    ReasoningParser,
    Tokenizer,
    ToolCallArguments,
    ToolCallStart,
)
from dynamo_text import StopStrings

from dynamo_generation.choices.call_filter import CallFilter
from dynamo_generation.choices.choice import TokenChoice
from dynamo_generation.choices.marker_tokens import NO_MARKERS, MarkerTokens
from dynamo_generation.choices.reasoning_tokens import ReasoningCount
from dynamo_generation.choices.schema_validation import CollectedAnswer

TOOL_CALLS = "tool_calls"


class TextParser(Protocol):
    """The interface of all parsers of an answer's text."""

    #: Set before `finish` if the model did not end the answer itself.
    cut_off: bool

    def buffer_calls(self) -> None:
        """Record that a call may wait until its arguments are complete."""

    @property
    def malformed(self) -> int:
        """The number of unsound calls, which became text."""

    @property
    def repairs(self) -> Mapping[str, int]:
        """The number of repaired calls, by kinds of repairs."""

    def feed(self, text: str) -> list[ParserDelta]:
        """Return what some more text makes certain."""

    def feed_marker(self, marker: str) -> list[ParserDelta]:
        """Return what a special token of the markup makes certain."""

    def finish(self) -> list[ParserDelta]:
        """Return what is left at the end."""


class AnswerParser:
    """A parser of reasoning, then of tool calls in the content. Either may be missing.

    `calls` says which calls are told. With `whole` the client sees nothing before the end: a call that breaks off is
    text.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tools: TextParser | None, calls: CallFilter, *, whole: bool = False
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._filter = calls
        if whole and tools is not None:
            tools.buffer_calls()
        #: Whether reasoning is told apart.
        self.reasons = reasoning is not None or getattr(tools, "TELLS_REASONING", False)
        #: What is reasoning and what is not, calls included, since the last look.
        self.sorted: list[ParserDelta] = []
        #: The pieces of the arguments of each call that was told.
        self._told: list[list[str]] = []

    def feed(self, text: str) -> list[ParserDelta]:
        """Return what some more text makes certain."""
        if self._reasoning is None:
            return self._calls(text)
        return self._sorted(self._reasoning.feed(text))

    def feed_marker(self, marker: str) -> list[ParserDelta]:
        """Return what a special token makes certain. Where it is content, it is one for the parser of calls too."""
        if self._reasoning is None:
            return self._marked(marker)
        deltas = self._reasoning.feed_marker(marker)
        last = deltas[-1] if deltas else None
        if not isinstance(last, ContentDelta) or not last.text.endswith(marker):
            return self._sorted(deltas)
        deltas[-1] = ContentDelta(last.text.removesuffix(marker))
        shown = self._sorted(deltas)
        self.sorted.append(ContentDelta(marker))
        return [*shown, *self._marked(marker)]

    def finish(self, *, cut_off: bool) -> list[ParserDelta]:
        """Return what is left at the end, which was that of the model unless the answer was `cut_off`."""
        deltas = [] if self._reasoning is None else self._sorted(self._reasoning.finish())
        if self._tools is not None:
            self._tools.cut_off = cut_off
            deltas += self._kept(self._tools.finish()) + self._filter.finish()
        return deltas

    def _sorted(self, deltas: list[ParserDelta]) -> list[ParserDelta]:
        self.sorted += deltas
        if len(deltas) == 1:
            # Nearly always.
            [only] = deltas
            return self._calls(only.text) if isinstance(only, ContentDelta) else deltas
        out: list[ParserDelta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                out += self._calls(delta.text)
            else:
                out.append(delta)
        return out

    @property
    def malformed(self) -> int:
        """The number of unsound calls, which became text."""
        return 0 if self._tools is None else self._tools.malformed

    @property
    def repairs(self) -> Mapping[str, int]:
        """The number of repaired calls, by kinds of repairs."""
        return {} if self._tools is None else self._tools.repairs

    def _calls(self, text: str) -> list[ParserDelta]:
        if not text:
            return []
        return [ContentDelta(text)] if self._tools is None else self._kept(self._tools.feed(text))

    def _marked(self, marker: str) -> list[ParserDelta]:
        return [ContentDelta(marker)] if self._tools is None else self._kept(self._tools.feed_marker(marker))

    def has_called(self) -> bool:
        """Return whether a tool was called with arguments that can be read."""
        return any(is_object("".join(pieces) or "{}") for pieces in self._told)

    def _kept(self, deltas: list[ParserDelta]) -> list[ParserDelta]:
        if self._reasoning is None and self.reasons:
            self.sorted += deltas
        deltas = self._filter.feed(deltas)
        for delta in deltas:
            if isinstance(delta, ToolCallArguments):
                self._told[-1].append(delta.text)
            elif isinstance(delta, ToolCallStart):
                self._told.append([])
        return deltas


def is_object(arguments: str) -> bool:
    """Return whether arguments are JSON that clients can read: an object, with numbers of any size."""
    try:
        return isinstance(json.loads(arguments, parse_int=str, parse_float=str), dict)
    except (ValueError, RecursionError):
        return False


class ParsedChoice(TokenChoice):
    """A choice of token ids whose text goes through parsers. `parsed` is the result of the last item.

    `count_calls` gets the parser at the end, for the calls that were not sound.
    """

    __slots__ = ("_count_calls", "_early", "_fed", "_markers", "_parser", "_reasoning")

    def __init__(
        self,
        index: int,
        request: PreprocessedRequest,
        tokenizer: Tokenizer,
        parser: AnswerParser,
        stops: StopStrings | None = None,
        answered: CollectedAnswer | None = None,
        *,
        markers: MarkerTokens = NO_MARKERS,
        count_calls: Callable[[AnswerParser], None] | None = None,
    ) -> None:
        super().__init__(index, request, tokenizer, stops, frozenset() if markers.all_or_none else markers.ids)
        self._parser = parser
        self._markers = markers
        self._count_calls = count_calls
        #: Deltas that were made while an item was decoded, and how much of its text is in them.
        self._early: list[ParserDelta] = []
        self._fed = 0
        self.answered = answered
        self._reasoning = ReasoningCount(tokenizer) if parser.reasons else None
        self.reasoning_tokens = 0 if parser.reasons else None
        self.plain = False

    def feed(self, output: LLMEngineOutput) -> str:
        """Parse the text that these tokens make certain; give none of it as it is.

        Raises:
            BackendError: the engine ended with an error.
        """
        self._parse(super().feed(output))
        return ""

    def end(self) -> str:
        """End a stream that is complete without a reason."""
        self._parse(super().end())
        return ""

    def _decode(self, token_ids: Sequence[int], before: int = 0) -> tuple[str, int | None]:
        if self._markers.ids.isdisjoint(token_ids):
            return super()._decode(token_ids, before)
        texts: list[str] = []
        done = 0
        for run, marker in self._runs(token_ids):
            text, stopped = super()._decode(run, before + done)
            texts.append(text)
            self._parse_early(text, marker)
            if stopped is not None:
                return "".join(texts), done + stopped
            done += len(run)
        return "".join(texts), None

    def _runs(self, token_ids: Sequence[int]) -> Iterator[tuple[Sequence[int], str | None]]:
        """Yield the tokens in order: runs of ordinary ones, and each marker by itself, with its text."""
        texts = self._markers.texts
        start = 0
        for at, token_id in enumerate(token_ids):
            marker = texts.get(token_id)
            if marker is not None:
                if start < at:
                    yield token_ids[start:at], None
                yield token_ids[at : at + 1], marker
                start = at + 1
        if start < len(token_ids):
            yield token_ids[start:], None

    def _parse_early(self, text: str, marker: str | None) -> None:
        """Parse a part of an item's text, which ends with a marker unless that may be part of a stop string."""
        self._fed += len(text)
        bare = text
        if marker is not None and text.endswith(marker):
            bare = text.removesuffix(marker)
        if bare:
            self._early += self._parser.feed(bare)
        if bare is not text and marker is not None:
            self._early += self._parser.feed_marker(marker)

    def _parse(self, text: str) -> None:
        parser, whole = self._parser, len(text)
        if self._fed:
            text, self._fed = text[self._fed :], 0
        deltas, self._early = self._early, []
        if text:
            deltas += parser.feed(text)
        if self.finish_reason is not None:
            deltas += parser.finish(cut_off=self.finish_reason != "stop" or self.stop_string is not None)
            if self.finish_reason == "stop" and parser.has_called():
                self.finish_reason = TOOL_CALLS
            if self._count_calls is not None:
                self._count_calls(parser)
        if self.answered is not None:
            self.answered.add(deltas)
        if self._reasoning is not None:
            self._reasoning.add(self.tokens, whole, parser.sorted)
            parser.sorted.clear()
            self.reasoning_tokens = self._reasoning.total
        self.parsed = deltas
