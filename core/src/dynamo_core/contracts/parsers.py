"""Parsers: from the text of an answer to what the API tells apart: content, reasoning, and calls of tools.

One object parses one choice. It is fed the text as it comes and gives what that makes certain; however the text is cut
into pieces, the deltas joined are the same. The work of a `feed` must not grow with the text that came before.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import msgspec

from dynamo_core.contracts.plugin import Plugin


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    """Text for the reader of the answer."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """Text that the model wrote while thinking."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """A call begins. `index` counts the calls of a choice from 0; `id` is the one that the client answers to."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of the arguments of the call `index`: joined, a JSON object, or the beginning of one that was cut off."""

    index: int
    text: str


ParserDelta: TypeAlias = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


def new_call_id() -> str:
    """An id for a call, in the form that clients of the OpenAI API know."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolCallParser(Plugin, ABC):
    """Finds calls of tools in the text of a choice. Never raises: markup that is not sound is content.

    `tools` are the tools of the request, in the form of the OpenAI API. Parsers have no settings of their own.
    """

    #: Whether the markup is made of special tokens, so that these must be part of the text.
    NEEDS_SPECIAL_TOKENS: ClassVar[bool] = False

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.tools = tools

    def buffer_calls(self) -> None:
        """Called before the first `feed` if the client sees nothing of the answer before its end.

        A call may then wait until its arguments are complete; one that breaks off is content, as all unsound markup.
        A parser that does nothing here tells of such a call with the arguments that there are.
        """

    @abstractmethod
    def feed(self, text: str) -> list[ParserDelta]:
        """What some more text makes certain."""

    @abstractmethod
    def finish(self) -> list[ParserDelta]:
        """What is left at the end of the text. Called once, last."""


class ReasoningParser(Plugin, ABC):
    """Tells reasoning from content in the text of a choice; gives deltas of these two kinds only. Never raises.

    `prompt` is the text the model was given: a template may have opened the reasoning already, or closed it.
    """

    #: Whether the markup is made of special tokens, so that these must be part of the text.
    NEEDS_SPECIAL_TOKENS: ClassVar[bool] = False

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt

    @abstractmethod
    def feed(self, text: str) -> list[ParserDelta]:
        """What some more text makes certain."""

    @abstractmethod
    def finish(self) -> list[ParserDelta]:
        """What is left at the end of the text. Called once, last."""


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers that a model's card names; None where it names none."""

    tools: type[ToolCallParser] | None = None
    reasoning: type[ReasoningParser] | None = None


NO_PARSERS = Parsers()


class DeltaWriter:
    """Gathers deltas; neighbours of one kind are joined. `new_id` makes the ids of calls that have none."""

    __slots__ = ("_deltas", "_make", "_new_id", "_parts", "buffered", "calls")

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        #: How many calls have begun.
        self.calls = 0
        #: Whether readers are to wait with a call until its arguments are complete.
        self.buffered = False
        self._new_id = new_id
        self._deltas: list[ParserDelta] = []
        self._parts: list[str] = []
        self._make: Callable[[str], ParserDelta] = ContentDelta

    def content(self, text: str) -> None:
        """Adds content."""
        self._add(ContentDelta, text)

    def reasoning(self, text: str) -> None:
        """Adds reasoning."""
        self._add(ReasoningDelta, text)

    def begin_call(self, name: str, id: str | None = None) -> None:
        """Begins a call; `arguments` belong to it from now on."""
        self._join()
        self._deltas.append(ToolCallStart(self.calls, id or self._new_id(), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the last call."""
        self._add(self._arguments, text)

    def take(self) -> list[ParserDelta]:
        """All deltas since the last time."""
        self._join()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _arguments(self, text: str) -> ParserDelta:
        return ToolCallArguments(self.calls - 1, text)

    def _add(self, make: Callable[[str], ParserDelta], text: str) -> None:
        if not text:
            return
        if make != self._make:
            self._join()
            self._make = make
        self._parts.append(text)

    def _join(self) -> None:
        if self._parts:
            self._deltas.append(self._make("".join(self._parts)))
            self._parts.clear()
