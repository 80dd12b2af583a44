"""The parser contract: split the text of an answer into content, reasoning, and tool calls.

One object parses one choice. It takes the text piece by piece and returns the deltas that are certain by then. The
joined deltas do not depend on how the text is cut into pieces. The work of a `feed` must not grow with the text before
it.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeAlias

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
    """Return an id for a call, in the form that clients of the OpenAI API know."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class ModelText:
    """The parts of a model's folder that say how the model writes."""

    #: All chat templates of the folder, joined; or the template that the config names in their place.
    template: str
    #: The texts of all tokens that were added to the vocabulary.
    special_tokens: frozenset[str]
    tokenizer_config: Mapping[str, Any]
    model_config: Mapping[str, Any]


class _Parser(Plugin, ABC):
    """Reads the text of a choice, piece by piece."""

    #: Whether all special tokens must be part of the text.
    NEEDS_SPECIAL_TOKENS: ClassVar[bool] = False
    #: The texts of the special tokens that the format is made of. They reach the parser even if the request skips
    #: special tokens.
    MARKERS: ClassVar[tuple[str, ...]] = ()
    #: Whether a model's folder describes the format: `for_model` reads that. Such a parser goes before others that fit.
    DESCRIBED: ClassVar[bool] = False
    #: How many calls so far began and turned out not to be sound. It never falls.
    malformed: int = 0
    #: How many calls so far were repaired, by kinds of repairs: few words, such as ``trailing_comma``.
    repairs: Mapping[str, int] = MappingProxyType({})
    #: Set before `finish` if a limit or a stop string ended the answer: no end that is missing is then repaired.
    cut_off: bool = False

    @classmethod
    def recognizes(cls, model: ModelText) -> str | None:
        """Return why a model writes in this format, for a log line: "its template has '<tool_call>'".

        None if it does not.
        """
        return None

    @classmethod
    def for_model(cls, model: ModelText) -> type[Self]:
        """Return the class for one model. Called, if the class is DESCRIBED, where a model's answers are read.

        Raises:
            ValueError: the description is missing, or the parser cannot follow it.
        """
        return cls

    def has_marker_tokens(self, markers: frozenset[str]) -> None:
        """Note which of MARKERS are single tokens of the model; called before the first `feed`.

        A parser may then take such a marker for markup only where it comes by `feed_marker`.
        """

    def feed_marker(self, marker: str) -> list[ParserDelta]:
        """Return one of MARKERS, which the model wrote as one token."""
        return self.feed(marker)

    @abstractmethod
    def feed(self, text: str) -> list[ParserDelta]:
        """Return the deltas that this piece of text makes certain."""

    @abstractmethod
    def finish(self) -> list[ParserDelta]:
        """Return the remaining deltas at the end of the text. Called once, last."""


class ToolCallParser(_Parser):
    """Finds calls of tools in the text of a choice. Never raises: markup that is not sound is content.

    `tools` are the tools of the request, in the form of the OpenAI API. Parsers have no settings of their own.
    """

    #: Whether the parser separates reasoning from content, too. It then reads the answer in place of both parsers.
    TELLS_REASONING: ClassVar[bool] = False

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.tools = tools

    @classmethod
    def structural_tag(
        cls, tools: Sequence[Mapping[str, Any]], *, parallel: bool, text: bool
    ) -> Mapping[str, Any] | None:
        """Return the grammar of an answer that calls these tools, as a format of xgrammar's structural tags.

        The arguments of a call obey the schema of its tool. Unless `parallel`, there is one call at most. With `text`
        there may be text before and after calls, and no call at all; without, there is at least one, and nothing else.
        None: there is no such grammar for the format, or for these tools.
        """
        return None

    def buffer_calls(self) -> None:
        """Hold each call until it is complete.

        Called before the first `feed` if the client gets the answer in one piece. The parser may then hold a call back
        until its arguments are complete. A call that breaks off is content, as all unsound markup. A parser that does
        nothing here reports such a call with the arguments so far.
        """


class ReasoningParser(_Parser):
    """Separates reasoning from content in the text of a choice; returns deltas of these two kinds only. Never raises.

    `prompt` is the model's prompt as text: a template may have opened the reasoning already, or closed it.
    """

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt

    def structural_tag(self) -> Mapping[str, Any] | None:
        """Return the grammar of the reasoning before the content, as a format of xgrammar's structural tags.

        None: there is no such grammar, so that an answer with reasoning cannot be guided.
        """
        return None


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers that a model's card names; None where it names none."""

    tools: type[ToolCallParser] | None = None
    reasoning: type[ReasoningParser] | None = None


NO_PARSERS = Parsers()


class DeltaWriter:
    """Collects deltas and joins neighbours of one kind. `new_id` makes the ids of calls that have none of their own."""

    __slots__ = ("_deltas", "_ids", "_make", "_mended", "_new_id", "_parts", "buffered", "calls", "repairs")

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        #: How many calls have begun.
        self.calls = 0
        #: Whether readers hold a call back until its arguments are complete.
        self.buffered = False
        #: How many calls were repaired, by kinds of repairs.
        self.repairs: dict[str, int] = {}
        self._mended: set[tuple[int, str]] = set()
        self._new_id = new_id
        self._ids: set[str] = set()
        self._deltas: list[ParserDelta] = []
        self._parts: list[str] = []
        self._make: Callable[[str], ParserDelta] = ContentDelta

    def content(self, text: str) -> None:
        """Add content."""
        self._add(ContentDelta, text)

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        self._add(ReasoningDelta, text)

    def begin_call(self, name: str, id: str | None = None) -> None:
        """Begin a call; `arguments` belong to it from now on. An `id` that another call has is replaced."""
        self._join()
        call_id = self._new_id() if not id or id in self._ids else id
        self._ids.add(call_id)
        self._deltas.append(ToolCallStart(self.calls, call_id, name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        self._add(self._arguments, text)

    def repaired(self, kind: str) -> None:
        """Count the last call among those with this kind of repairs, once."""
        if (self.calls, kind) not in self._mended:
            self._mended.add((self.calls, kind))
            self.repairs[kind] = self.repairs.get(kind, 0) + 1

    def take(self) -> list[ParserDelta]:
        """Return all deltas since the last call."""
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
