"""Streaming with the tokenizer library's own decoder, for vocabularies that cannot be decoded token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dynamo_text.panics import raise_panics

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library


class LibraryStream:
    """Decodes one stream with ``tokenizers.decoders.DecodeStream``.

    The library gives text only up to the last complete character and has no way to ask for the rest, so the ids since
    the last text are kept here. `wanted` says which ids are decoded at all: ids that the library would skip make it
    keep, and decode again, everything before them.
    """

    __slots__ = ("_context", "_library", "_pending", "_step", "_wanted")

    def __init__(self, library: Library, wanted: Callable[[int], bool]) -> None:
        self._library = library
        self._wanted = wanted
        #: The ids of the last text, with which what follows is decoded: a token may look different after another.
        self._context: list[int] = []
        self._pending: list[int] = []
        self._step = _new_stream()

    @raise_panics
    def step(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids make certain; may be empty."""
        texts: list[str] = []
        for token_id in token_ids:
            if not self._wanted(token_id):
                continue
            self._pending.append(token_id)
            text = self._next(token_id)
            if text:
                texts.append(text)
                self._context = self._pending
                self._pending = []
        return "".join(texts)

    @raise_panics
    def flush(self) -> str:
        """Return what is left at the end; an incomplete character becomes U+FFFD."""
        pending, self._pending = self._pending, []
        if not pending:
            return ""
        decode = self._library.decode
        before = decode(self._context, skip_special_tokens=False)
        text = decode(self._context + pending, skip_special_tokens=False)
        return text[len(before) :] if text.startswith(before) else decode(pending, skip_special_tokens=False)

    def _next(self, token_id: int) -> str | None:
        try:
            return self._step(self._library, token_id)
        except Exception as error:
            # The library has no type of its own for this. The text it gave before does not begin what it would give
            # now; a new stream loses the context of one token, and no text.
            if "prefix" not in str(error).lower():
                raise
        self._step = _new_stream()
        text = ""
        for pending in self._pending:
            text += self._step(self._library, pending) or ""
        return text


def _new_stream() -> Callable[[Library, int], str | None]:
    from tokenizers.decoders import DecodeStream

    return DecodeStream(skip_special_tokens=False).step
