"""The renderer interface between an API and the two ways of sending an answer, streamed and whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import msgspec
from dynamo_core import ParserDelta

from dynamo_generation.choices.choice import Choice, Piece
from dynamo_generation.choices.logprob_buffer import Scored
from dynamo_generation.choices.packed_logprobs import PackedLogprobs

#: A whole answer in pieces. An iterator makes those of a large one while they are written.
Pieces: TypeAlias = list[bytes] | Iterator[bytes]

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode

#: About how many bytes of memory each piece of an answer takes beside its text, and one that the engine made itself.
PIECE = 64
_DELTA = 512
#: Stands for the log-probabilities of a choice until they are put in.
_GAP = b"\0"
SCORES = msgspec.Raw(_GAP)
#: Bytes of JSON up to which the log-probabilities of a choice are kept as such.
_KEPT_AS_JSON = 64 * 1024


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields shared by all chunks of an answer. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str

    def of(self, kind: str) -> dict[str, Any]:
        """Return the fields that an object of this kind begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class ChunkRenderer(Protocol):
    """Makes the items of a stream."""

    def leading_events(self, choice: Choice) -> bytes:
        """Return what comes before the first text of a choice; may be empty."""

    def around(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """Return what stands before and after the escaped text of a piece that is only text.

        None if that keeps changing.
        """

    def piece(self, piece: Piece) -> bytes:
        """Return a piece of a choice, with its log-probabilities if there are any.

        Empty if there is nothing to show.
        """

    def finish(self, choice: Choice) -> bytes:
        """Return the end of a choice."""

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the last chunk, without choices."""


class ScoreLists(Protocol):
    """Makes the lists of a `logprobs` object."""

    def fields(self, scored: Scored) -> Mapping[str, bytes]:
        """Return the values of all lists by name, joined."""

    def field(self, name: str, scored: Scored) -> bytes:
        """Return the values of the list of this name, joined."""


@dataclass(slots=True)
class Collected:
    """All that one choice of a unary answer became."""

    choice: Choice
    parts: list[str] = field(default_factory=list)
    deltas: list[dict[str, Any]] = field(default_factory=list)
    parsed: list[ParserDelta] = field(default_factory=list)
    #: By name, the values of the lists of `logprobs`, as JSON in pieces; None if there were no log-probabilities.
    scores: dict[str, list[bytes]] | None = None
    #: The bytes of these, and the log-probabilities behind them, if there are many.
    score_bytes: int = 0
    packed: PackedLogprobs | None = None
    #: How many tokens there were log-probabilities of, and the sum of those.
    scored: int = 0
    #: Its tokens and those of its prompt, if the client wants them.
    token_ids: list[int] | None = None
    prompt_token_ids: Sequence[int] | None = None
    likelihood: float = 0.0

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.parts)

    def add_scores(self, fields: Mapping[str, bytes]) -> int:
        """Add values to the lists of `logprobs`; the first to come names them. Give the bytes that it takes."""
        if self.scores is None:
            self.scores = {name: [] for name in fields}
        size = 0
        for name, pieces in self.scores.items():
            values = fields.get(name)
            if values:
                pieces.append(b"," + values if pieces else values)
                size += len(values) + PIECE
        self.score_bytes += size
        return size

    def add_scored(self, scored: Scored, lists: ScoreLists) -> int:
        """Add the scores of some tokens, as JSON or packed. Return the bytes that they take."""
        if self.packed is None:
            if self.score_bytes < _KEPT_AS_JSON:
                return self.add_scores(lists.fields(scored))
            self.packed = PackedLogprobs()
        return self.packed.add(scored)


class BodyRenderer(Protocol):
    """Makes the body of a unary answer."""

    def add(self, collected: Collected, piece: Piece) -> int:
        """Add a piece to what there is of its choice. Give about how many bytes that takes."""

    def body(self, collected: Sequence[Collected], usage: dict[str, Any], nvext: dict[str, Any] | None) -> Pieces:
        """Return the whole answer as JSON, in pieces."""


def weight(piece: Piece) -> int:
    """Return about how many bytes of memory the text of a piece takes, in whatever form it is."""
    size = PIECE + len(piece.text)
    if piece.parsed is not None:
        size += sum(2 * PIECE + len(getattr(delta, "text", "")) for delta in piece.parsed)
    if piece.delta is not None:
        size += _DELTA + sum(len(value) for value in piece.delta.values() if isinstance(value, str))
    return size


def body_of(
    whole: dict[str, Any], collected: Sequence[Collected], lists: ScoreLists | None, more: bytes = b""
) -> Pieces:
    """Return a body as JSON, in pieces. In place of each `SCORES` stand the log-probabilities of a choice, in order.

    `more` stands at the end of their object.
    """
    body = encode(whole)
    scored = [item for item in collected if item.scores is not None]
    if not scored:
        return [body]
    pieces = _with_scores(body, scored, lists, more)
    return list(pieces) if all(item.packed is None for item in scored) else pieces


def _with_scores(body: bytes, scored: Sequence[Collected], lists: ScoreLists | None, more: bytes) -> Iterator[bytes]:
    # In JSON this byte is always written as an escape.
    first, *others = body.split(_GAP)
    yield first
    for item, other in zip(scored, others, strict=True):
        begun = False
        for name, pieces in (item.scores or {}).items():
            yield b"%b%b:[" % (b"]," if begun else b"{", encode(name))
            begun = True
            yield from pieces
            if item.packed is not None and lists is not None:
                for few in item.packed.slices():
                    yield b"," + lists.field(name, few)
        yield b"]%b}" % more if begun else b"{%b}" % more.removeprefix(b",")
        yield other


def verdict_of(choice: Choice) -> dict[str, Any]:
    """Return what the client is told of a choice that is not what it asked for: ``structured_output``."""
    return {} if choice.verdict is None else {"structured_output": choice.verdict}


def head(identity: Identity, kind: str) -> bytes:
    """Return the beginning of every chunk of an answer, up to the list of choices."""
    return b'data: %b,"choices":[' % encode(identity.of(kind))[:-1]


def extension_chunk(head_bytes: bytes, values: dict[str, Any]) -> bytes:
    """Return a chunk without choices that holds annotations; empty if there are none."""
    return b'%b],"nvext":%b}\n\n' % (head_bytes, encode(values)) if values else b""


def usage_chunk(head_bytes: bytes, usage: dict[str, Any]) -> bytes:
    """Return the chunk that tells the usage."""
    return b'%b],"usage":%b}\n\n' % (head_bytes, encode(usage))
