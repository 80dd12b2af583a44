"""What the two ways of writing an answer ask of a kind of answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from dynamo_core.contracts.parsers import ParserDelta

from dynamo_plugin_frontend_openai.choices import Choice, Piece

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Identity:
    """What all chunks of an answer share. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str


class ChunkRenderer(Protocol):
    """Makes the items of a stream."""

    def opening(self, choice: Choice) -> bytes:
        """What comes before the first text of a choice; may be empty."""

    def around(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """What stands before and after the escaped text of a piece that is only text; None if that keeps changing."""

    def piece(self, piece: Piece) -> bytes:
        """A piece of a choice, with its log-probabilities if there are any; empty if there is nothing to show."""

    def finish(self, choice: Choice) -> bytes:
        """The end of a choice."""

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk, without choices."""


@dataclass(slots=True)
class Collected:
    """All that one choice of a unary answer became."""

    choice: Choice
    parts: list[str]
    logprobs: list[Any]
    deltas: list[dict[str, Any]]
    parsed: list[ParserDelta] = field(default_factory=list)
    #: Of each token that was told, where something needs them.
    log_probs: list[float] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.parts)


class BodyRenderer(Protocol):
    """Makes the body of a unary answer."""

    def add(self, collected: Collected, piece: Piece) -> None:
        """Adds a piece to what there is of its choice."""

    def body(self, collected: Sequence[Collected], usage: dict[str, Any], nvext: dict[str, Any] | None) -> bytes:
        """The whole answer as JSON."""


def head(identity: Identity, kind: str) -> bytes:
    """The beginning of every chunk of an answer, up to the list of choices."""
    fields = encode({"id": identity.id, "object": kind, "created": identity.created, "model": identity.model})
    return b'data: %b,"choices":[' % fields[:-1]


def usage_chunk(head_bytes: bytes, usage: dict[str, Any]) -> bytes:
    """The chunk that tells the usage."""
    return b'%b],"usage":%b}\n\n' % (head_bytes, encode(usage))
