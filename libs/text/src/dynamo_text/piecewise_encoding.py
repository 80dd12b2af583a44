"""Encoding in pieces, with bounded memory and a limit on the text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TypeAlias

from dynamo_text.encode_limit import EncodeLimit
from dynamo_text.text_splitter import TextSplitter
from dynamo_text.token_bound import TokenBound
from dynamo_text.utf8 import to_utf8

#: Encodes texts, each to its ids.
EncodeMany: TypeAlias = Callable[[Sequence[str], bool], list[list[int]]]
#: Where a part begins and ends.
Span: TypeAlias = tuple[int, int]

#: Characters that are encoded at once, unless they cannot be cut apart.
BATCH = 1 << 16
#: Of texts with more characters in one part, one is encoded at a time, whatever the tokenizer.
_LARGE = 1 << 18
_one_large = threading.Lock()


class PieceEncoder:
    """Encodes the texts of one tokenizer in parts.

    `affixes` are the ids that the tokenizer puts before and after a text if special tokens are wanted; None if they are
    not known. Then such a text is not cut.
    """

    def __init__(
        self,
        encode: EncodeMany,
        splitter: TextSplitter,
        affixes: tuple[list[int], list[int]] | None,
        bound: TokenBound | None,
    ) -> None:
        self.splitter = splitter
        self.bound = bound
        self._encode = encode
        self._affixes = affixes

    def affixes(self, add_special_tokens: bool) -> tuple[list[int], list[int]] | None:
        """Return the ids around a text; None if it must not be cut."""
        return self._affixes if add_special_tokens else ([], [])

    def encode(self, text: str, add_special_tokens: bool, limit: EncodeLimit | None = None) -> list[int]:
        """Return the ids of a text.

        Raises:
            InvalidArgument: the text holds a lone surrogate.
            TextTooLong: it has more tokens than `limit` allows, or cannot be cut.
            EncodingCancelled: the ids are not wanted any more.
        """
        return self.join(text, add_special_tokens, lambda pieces: self.encode_many(pieces, False), limit=limit)

    def encode_many(self, pieces: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of each piece. Of very long ones, one is encoded at a time."""
        with _one_large if any(len(piece) > _LARGE for piece in pieces) else nullcontext():
            return self._encode(pieces, add_special_tokens)

    def join(
        self,
        text: str,
        add_special_tokens: bool,
        resolve: Callable[[list[str]], Iterable[Sequence[int]]],
        spans: Iterable[Span] | None = None,
        limit: EncodeLimit | None = None,
    ) -> list[int]:
        """Return the ids of a text whose parts have those that `resolve` gives; as `encode`."""
        affixes, longest = self.affixes(add_special_tokens), None if limit is None else limit.stretch
        if affixes is None:
            spans = TextSplitter().spans(text, longest)
            affixes, resolve = ([], []), lambda pieces: self.encode_many(pieces, True)
        elif spans is None:
            spans = self.splitter.spans(text, longest)
        if limit is not None and self.bound is not None and not self.bound.is_instant(text):
            limit.check(self.bound.at_least(self.bound.weight(text)))
        result = affixes[0].copy()
        for batch in _batches(spans):
            begin, pieces = batch[0][0], [text[start:end] for start, end in batch]
            self._check(len(result), text, begin, pieces, limit)
            for piece, (start, _) in zip(pieces, batch, strict=True):
                to_utf8(piece, start)  # the library refuses with a puzzling TypeError
            for ids in resolve(pieces):
                result += ids
        result += affixes[1]
        if limit is not None:
            limit.check(len(result))
        return result

    def beginning(self, text: str, limit: EncodeLimit) -> str:
        """Return the beginning of a text, cut where its tokens end, that has as many as `limit` allows, or more.

        Raises:
            InvalidArgument: the text holds a lone surrogate.
            TextTooLong: it cannot be cut.
        """
        tokens = limit.tokens
        for batch in _batches(self.splitter.spans(text, limit.stretch)):
            for start, end in batch:
                to_utf8(text[start:end], start)
            found = self.encode_many([text[start:end] for start, end in batch], False)
            for (_, end), ids in zip(batch, found, strict=True):
                tokens -= len(ids)
                if tokens <= 0:
                    return text[:end]
        return text

    def _check(self, tokens: int, text: str, begin: int, pieces: Sequence[str], limit: EncodeLimit | None) -> None:
        """Check the tokens so far, and the least number of those from `begin` on."""
        if limit is None:
            return
        bound = self.bound
        if bound is not None:
            weight = bound.weight(pieces[0]) if len(pieces) == 1 else 0
            if bound.is_instant(text):
                weight = len(text) - begin
            tokens += bound.at_least(weight)
        limit.check(tokens)


def _batches(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Yield parts of about `BATCH` characters, all together."""
    batch: list[Span] = []
    size = 0
    for span in spans:
        length = span[1] - span[0]
        if batch and size + length > BATCH:
            yield batch
            batch, size = [], 0
        batch.append(span)
        size += length
    if batch:
        yield batch
