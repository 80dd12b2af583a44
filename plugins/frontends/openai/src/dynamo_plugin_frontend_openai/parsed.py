"""A choice whose text is told apart: reasoning, content, calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dynamo_core import (
    ContentDelta,
    LLMEngineOutput,
    ParserDelta,
    PreprocessedRequest,
    ReasoningDelta,
    ReasoningParser,
    Tokenizer,
    ToolCallArguments,
    ToolCallStart,
)
from dynamo_text import StopStrings, is_object

from dynamo_plugin_frontend_openai.choices import TokenChoice
from dynamo_plugin_frontend_openai.errors import BrokenCall

TOOL_CALLS = "tool_calls"


class TextParser(Protocol):
    """What tool call parsers of all kinds have in common."""

    def buffer_calls(self) -> None:
        """A call may wait until its arguments are complete."""

    def feed(self, text: str) -> list[ParserDelta]:
        """What some more text makes certain."""

    def finish(self) -> list[ParserDelta]:
        """What is left at the end."""


class AnswerParser:
    """Reasoning first; what of the text is content goes on to the parser of calls. Either may be missing.

    Unless `parallel`, only the first call is told. With `whole` the client sees nothing before the end: a call that
    breaks off is text.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tools: TextParser | None, *, parallel: bool = True, whole: bool = False
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel
        self._whole = whole
        if whole and tools is not None:
            tools.buffer_calls()
        #: Whether a tool was called.
        self.called = False
        #: The calls that have been told before they were complete: names, and pieces of arguments.
        self._told: list[tuple[str, list[str]]] = []
        #: Whether text came after the last of them.
        self._left = False

    def feed(self, text: str) -> list[ParserDelta]:
        """What some more text makes certain."""
        if self._reasoning is None:
            return self._calls(text)
        return self._sorted(self._reasoning.feed(text))

    def finish(self) -> list[ParserDelta]:
        """What is left at the end."""
        deltas = [] if self._reasoning is None else self._sorted(self._reasoning.finish())
        if self._tools is not None:
            deltas += self._kept(self._tools.finish())
        return deltas

    def _sorted(self, deltas: Sequence[ParserDelta]) -> list[ParserDelta]:
        out: list[ParserDelta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                out += self._calls(delta.text)
            else:
                out.append(delta)
        return out

    def _calls(self, text: str) -> list[ParserDelta]:
        return [ContentDelta(text)] if self._tools is None else self._kept(self._tools.feed(text))

    def broken(self, *, cut_off: bool) -> str | None:
        """The name of a call that was told and whose arguments are no JSON object; None if there is none.

        If the answer was `cut_off`, what was being written at its end is not broken.
        """
        sound = self._told[:-1] if cut_off and not self._left else self._told
        return next((name for name, pieces in sound if not is_object("".join(pieces))), None)

    def _kept(self, deltas: list[ParserDelta]) -> list[ParserDelta]:
        if self._tools is not None and not self._whole:
            for delta in deltas:
                self._left = isinstance(delta, ContentDelta)
                if isinstance(delta, ToolCallStart):
                    self._told.append((delta.name, []))
                elif isinstance(delta, ToolCallArguments):
                    self._told[-1][1].append(delta.text)
        self.called = self.called or any(isinstance(delta, ToolCallStart) for delta in deltas)
        if self._parallel:
            return deltas
        return [delta for delta in deltas if isinstance(delta, ContentDelta | ReasoningDelta) or delta.index == 0]


class ParsedChoice(TokenChoice):
    """A choice of an engine that gives tokens, whose text goes through parsers. `parsed` is what became of the last."""

    __slots__ = ("_parser",)

    def __init__(
        self,
        index: int,
        request: PreprocessedRequest,
        tokenizer: Tokenizer,
        parser: AnswerParser,
        stops: StopStrings | None = None,
    ) -> None:
        super().__init__(index, request, tokenizer, stops)
        self._parser = parser
        self.plain = False

    def feed(self, output: LLMEngineOutput) -> str:
        """Parses the text that these tokens make certain; gives none of it as it is.

        Raises:
            BackendError: the engine ended with an error.
        """
        self._parse(super().feed(output))
        return ""

    def end(self) -> str:
        """The stream is complete without having named a reason."""
        self._parse(super().end())
        return ""

    def _parse(self, text: str) -> None:
        parser = self._parser
        deltas = parser.feed(text) if text else []
        if self.finish_reason is not None:
            deltas += parser.finish()
            name = parser.broken(cut_off=self.finish_reason == "length")
            if name is not None:
                self.fault = BrokenCall(name, self.index)
            if parser.called and self.finish_reason == "stop":
                self.finish_reason = TOOL_CALLS
        self.parsed = deltas
