"""Usage so far in every chunk, for clients that ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynamo_generation.answers.render import ChunkRenderer, encode
from dynamo_generation.choices.choice import Choice, Piece

_END = b"]}\n\n"


class ContinuousUsage:
    """Adds `usage` to the chunks of another renderer. There is no short way for such chunks: each differs."""

    def __init__(self, inner: ChunkRenderer, usage: Callable[[], dict[str, Any]]) -> None:
        self._inner = inner
        self._usage = usage

    def leading_events(self, choice: Choice) -> bytes:
        """Return what comes before the first text of a choice."""
        return self._with_usage(self._inner.leading_events(choice))

    def around(self, choice: Choice) -> None:
        """Return None: nothing around the text stays the same."""

    def piece(self, piece: Piece) -> bytes:
        """Return a piece of a choice."""
        return self._with_usage(self._inner.piece(piece))

    def finish(self, choice: Choice) -> bytes:
        """Return the end of a choice."""
        return self._with_usage(self._inner.finish(choice))

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the last chunk, without choices."""
        return self._inner.usage(usage)

    def _with_usage(self, chunks: bytes) -> bytes:
        # JSON holds no line break, so that this end is that of a chunk, wherever it stands.
        return chunks.replace(_END, b'],"usage":%b}\n\n' % encode(self._usage())) if chunks else b""
