"""Token ids beside their text, for clients that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dynamo_generation.answers.render import BodyRenderer, ChunkRenderer, Collected, Pieces, encode
from dynamo_generation.choices.choice import Choice, Piece

#: About how many bytes of memory a token takes.
_TOKEN = 36
_END = b"}]}\n\n"


class Inner(ChunkRenderer, BodyRenderer, Protocol):
    """The wrapped renderer."""

    def around(self, choice: Choice) -> tuple[bytes, bytes]:
        """Return what stands before and after the escaped text of a piece that is only text."""

    def extension(self, values: dict[str, Any]) -> bytes:
        """Return a chunk without choices that holds annotations."""


class TokenIds:
    """Adds `token_ids` to the choices of another renderer, and the prompt's tokens to the first of each.

    `prompts` are those of the request. The prompt's tokens stand in the choice, or, `beside`, next to the choices.
    There is no short way for such chunks: tokens that show no text have a chunk as well.
    """

    def __init__(self, inner: Inner, prompts: Sequence[Sequence[int]], *, beside: bool) -> None:
        self._inner = inner
        self._prompts = prompts
        self._beside = beside
        #: Choices whose first chunk has been written.
        self._begun: set[int] = set()

    def leading_events(self, choice: Choice) -> bytes:
        """Return what comes before the first text of a choice."""
        return self._with_ids(self._inner.leading_events(choice), choice, ())

    def around(self, choice: Choice) -> None:
        """Return None: nothing around the text stays the same."""

    def piece(self, piece: Piece) -> bytes:
        """Return a piece of a choice."""
        chunks = self._inner.piece(piece)
        if not chunks and piece.tokens:
            chunks = b"".join(self._inner.around(piece.choice))
        return self._with_ids(chunks, piece.choice, piece.tokens)

    def finish(self, choice: Choice) -> bytes:
        """Return the end of a choice."""
        return self._with_ids(self._inner.finish(choice), choice, ())

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the last chunk, without choices."""
        return self._inner.usage(usage)

    def extension(self, values: dict[str, Any]) -> bytes:
        """Return a chunk without choices that holds annotations."""
        return self._inner.extension(values)

    def add(self, collected: Collected, piece: Piece) -> int:
        """Add a piece to what there is of its choice. Give about how many bytes that takes."""
        if collected.token_ids is None:
            collected.token_ids = []
            collected.prompt_token_ids = self._prompts[collected.choice.prompt]
        collected.token_ids += piece.tokens
        return self._inner.add(collected, piece) + _TOKEN * len(piece.tokens)

    def body(self, collected: Sequence[Collected], usage: dict[str, Any], nvext: dict[str, Any] | None) -> Pieces:
        """Return the whole answer as JSON, in pieces."""
        return self._inner.body(collected, usage, nvext)

    def _with_ids(self, chunks: bytes, choice: Choice, tokens: Sequence[int]) -> bytes:
        # JSON holds no line break, so that this end is that of a chunk, wherever it stands.
        heads = chunks.split(_END)[:-1]
        out: list[bytes] = []
        for head in heads:
            out += (head, b',"token_ids":', encode(tokens))
            tokens = ()
            prompt = b""
            if choice.index not in self._begun:
                self._begun.add(choice.index)
                prompt = b',"prompt_token_ids":' + encode(self._prompts[choice.prompt])
            out += (b"}]", prompt, b"}\n\n") if self._beside else (prompt, _END)
        return b"".join(out)
