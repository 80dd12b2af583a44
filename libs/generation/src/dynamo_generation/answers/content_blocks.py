"""An answer as a list of content blocks, for APIs that send text, reasoning and each tool call as separate blocks."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dynamo_core import ContentDelta, ParserDelta, ReasoningDelta, ToolCallArguments, ToolCallStart, new_call_id
from dynamo_core.protocol import Unreadable

from dynamo_generation.answers.render import Collected, Identity, weight
from dynamo_generation.bodies.decode import object_of
from dynamo_generation.choices.choice import Choice, Piece


class Kind(enum.Enum):
    """The kind of a content block."""

    TEXT = enum.auto()
    REASONING = enum.auto()
    CALL = enum.auto()


@dataclass(slots=True, eq=False)
class Block:
    """One part. `index` counts the parts from 0; `call` says which tool a call is of, its text is the arguments."""

    index: int
    kind: Kind
    call: ToolCallStart | None = None
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it that there is."""
        return "".join(self.parts)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call; none if they are not an object, as when the limit of tokens cut them off."""
        try:
            return object_of(self.text or "{}")
        except Unreadable:
            return {}


class Change(enum.Enum):
    """The kind of change to a content block."""

    BEGUN = enum.auto()
    MORE = enum.auto()
    ENDED = enum.auto()


class Step(NamedTuple):
    """A change of one content block; `text` came with `MORE`."""

    change: Change
    block: Block
    text: str = ""


class Blocks:
    """Gathers the parts of one choice. Parts follow each other: the next begins when the one before has ended."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._calls: dict[int, Block] = {}

    def begin_text(self) -> list[Step]:
        """Begin a part of text, before it is known what it says."""
        return self._begin(Kind.TEXT)

    def feed(self, deltas: Iterable[ParserDelta]) -> list[Step]:
        """Return what some deltas change."""
        steps: list[Step] = []
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    steps += self._more(Kind.TEXT, text)
                case ReasoningDelta(text):
                    steps += self._more(Kind.REASONING, text)
                case ToolCallStart(index):
                    if index not in self._calls:
                        steps += self._begin(Kind.CALL, delta)
                        self._calls[index] = self.all[-1]
                case ToolCallArguments(index, text):
                    block = self._calls.get(index)
                    if block is not None and text:
                        steps.append(_grown(block, text))
        return steps

    def end(self) -> list[Step]:
        """End the choice. One that said nothing has one part, an empty text."""
        steps = [] if self.all else self.begin_text()
        return steps + self._close()

    def _more(self, kind: Kind, text: str) -> list[Step]:
        if not text:
            return []
        steps = [] if self._open is not None and self._open.kind is kind else self._begin(kind)
        steps.append(_grown(self.all[-1], text))
        return steps

    def _begin(self, kind: Kind, call: ToolCallStart | None = None) -> list[Step]:
        steps = self._close()
        self._open = Block(len(self.all), kind, call)
        self.all.append(self._open)
        steps.append(Step(Change.BEGUN, self._open))
        return steps

    def _close(self) -> list[Step]:
        block, self._open = self._open, None
        return [] if block is None else [Step(Change.ENDED, block)]


def _grown(block: Block, text: str) -> Step:
    block.parts.append(text)
    return Step(Change.MORE, block, text)


def deltas_of(piece: Piece) -> Sequence[ParserDelta]:
    """Return what a piece says, told apart by the parsers here, by the engine, or not at all."""
    if piece.parsed is not None:
        return piece.parsed
    if piece.delta is not None:
        return list(_from_chat(piece.delta))
    return [ContentDelta(piece.text)] if piece.text else []


def _from_chat(delta: Mapping[str, Any]) -> Iterator[ParserDelta]:
    """Yield a delta in the form of a chat chunk, as engines that take text make it.

    What is not understood is left out.
    """
    for name, make in (("reasoning_content", ReasoningDelta), ("content", ContentDelta), ("refusal", ContentDelta)):
        text = delta.get(name)
        if isinstance(text, str):
            yield make(text)
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        index, called, arguments = call.get("index", 0), function.get("name"), function.get("arguments")
        if isinstance(called, str) and called:
            yield ToolCallStart(index, call.get("id") or new_call_id(), called)
        if isinstance(arguments, str):
            yield ToolCallArguments(index, arguments)


class BlockRenderer(ABC):
    """Makes the events and the body of one answer out of its parts."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._blocks = Blocks()
        self._choice: Choice | None = None

    def piece(self, piece: Piece) -> bytes:
        """Return the events of what is new."""
        return self._written(self._blocks.feed(deltas_of(piece)))

    def extension(self, values: dict[str, Any]) -> bytes:
        """Return nothing: these APIs have no annotations."""
        return b""

    def add(self, collected: Collected, piece: Piece) -> int:
        """Add a piece to the one answer. Give about how many bytes that takes."""
        self._blocks.feed(deltas_of(piece))
        return weight(piece)

    def _written(self, steps: Iterable[Step]) -> bytes:
        return b"".join([self._event_of(*step) for step in steps])

    def _event_of(self, change: Change, block: Block, text: str) -> bytes:
        match change:
            case Change.BEGUN:
                return self._begun(block)
            case Change.MORE:
                return self._more(block, text)
            case Change.ENDED:
                return self._ended(block)

    @abstractmethod
    def _begun(self, block: Block) -> bytes: ...

    @abstractmethod
    def _more(self, block: Block, text: str) -> bytes: ...

    @abstractmethod
    def _ended(self, block: Block) -> bytes: ...
