"""A cache of token ids of earlier texts, whole or in pieces.

A short text is cached whole. A long one is cut where the tokenizer cuts it anyway (see `dynamo_text.text_splitter`),
and each piece is cached by itself. The cuts depend only on the text before them. So texts with the same beginning share
their first pieces, and the earlier turns of a long conversation are not tokenized again. Pieces are found by their
whole content, never by a digest. Their ids put together are exactly the ids that the tokenizer gives for the text. A
long text whose pieces were all known is cached whole too, since it is likely to come again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from operator import itemgetter
from sys import getsizeof
from typing import Protocol

from dynamo_text.encode_limit import EncodeLimit
from dynamo_text.piecewise_encoding import PieceEncoder, Span
from dynamo_text.utf8 import to_utf8

#: Up to this many characters a text is looked up at once: cutting it up and finding the pieces takes milliseconds.
LOOK_UP = 1 << 18
#: Bytes of an entry beside its text and ids: its place in the table, two tuples and a tuple's head.
_ENTRY = 300
#: Bytes of an id: its place in the tuple, and the number, if no other entry has it too.
_SHARED_ID, _OWN_ID = 8, 36
#: The largest share of the memory that one text may take.
_SHARE = 4


def _ignore(_: float) -> None:
    """Ignore the count: the default where no metric is kept."""


class TokenCacheStore:
    """An LRU cache of the ids of texts, up to `limit` bytes, for any number of tokenizers.

    Safe from any thread. `hits` and `misses` count texts and pieces, `size` is in bytes. `hit` and `miss` are called
    with how many more there are, `level` with the new size, one call at a time.
    """

    def __init__(
        self,
        limit: int,
        *,
        hit: Callable[[float], None] = _ignore,
        miss: Callable[[float], None] = _ignore,
        level: Callable[[float], None] = _ignore,
    ) -> None:
        self.limit = limit
        self.hits = 0
        self.misses = 0
        self.size = 0
        self._hit = hit
        self._miss = miss
        self._level = level
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[int, str], tuple[tuple[int, ...], int]] = OrderedDict()
        self._owners = count()

    def owner(self) -> int:
        """Return a number that keeps the entries of one tokenizer apart from those of all others."""
        return next(self._owners)

    def get(self, owner: int, text: str, *, whole: bool = True) -> tuple[int, ...] | None:
        """Return the ids of one text.

        Without `whole` its pieces are looked up next, so that it does not count if it is not known.
        """
        key = (owner, text)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                if whole:
                    self.misses += 1
                    self._miss(1)
                return None
            self._entries.move_to_end(key)
            self.hits += 1
            self._hit(1)
            return entry[0]

    def get_many(self, owner: int, texts: Sequence[str]) -> list[tuple[int, ...] | None]:
        """Return the ids of each text, or None."""
        found: list[tuple[int, ...] | None] = []
        entries = self._entries
        missed = 0
        with self._lock:
            for text in texts:
                key = (owner, text)
                entry = entries.get(key)
                if entry is None:
                    missed += 1
                    found.append(None)
                else:
                    entries.move_to_end(key)
                    found.append(entry[0])
            self.hits += len(texts) - missed
            self.misses += missed
            self._hit(len(texts) - missed)
            self._miss(missed)
        return found

    def put(self, owner: int, text: str, ids: tuple[int, ...], *, shared: bool = False) -> int:
        """Cache ids, and return the number of bytes that they take. `shared`: the numbers are in other entries too.

        An entry that would take more than a fourth of the memory is not cached.
        """
        # After encoding, so that the UTF-8 which Python keeps beside a text is counted too.
        size = getsizeof(text) + _ENTRY + len(ids) * (_SHARED_ID if shared else _OWN_ID)
        if size * _SHARE > self.limit:
            return size
        entries = self._entries
        key = (owner, text)
        with self._lock:
            total = self.size + size
            if key in entries:  # another thread was faster
                total -= entries.pop(key)[1]
            entries[key] = (ids, size)
            while total > self.limit:
                total -= entries.popitem(last=False)[1][1]
            self.size = total
            self._level(total)
        return size


class EncodeJob(Protocol):
    """The remaining work for a text of which some ids are cached."""

    @property
    def left(self) -> int:
        """The number of characters still to be tokenized."""

    def finish(self, limit: EncodeLimit | None = None) -> list[int]:
        """Return all ids. Takes long if much is left. Raise as `PieceEncoder.encode` does."""


class TokenCache:
    """The cache of one tokenizer, around its encoder of text parts."""

    def __init__(self, memory: TokenCacheStore, encoder: PieceEncoder) -> None:
        self._memory = memory
        self._encoder = encoder
        #: Without special tokens, and with them. Pieces are texts without.
        self._owners = (memory.owner(), memory.owner())
        self._numbers = _InternedIds()

    def encode(self, text: str, add_special_tokens: bool, limit: EncodeLimit | None = None) -> list[int]:
        """Return the ids of a text. The list is the caller's own. Raise as `PieceEncoder.encode` does."""
        if len(text) > self._encoder.splitter.piece:
            return self._begin(text, add_special_tokens, limit).finish(limit)
        owner = self._owners[add_special_tokens]
        known = self._memory.get(owner, text)
        if known is not None:
            return list(known)
        to_utf8(text)
        ids = self._encoder.encode_many((text,), add_special_tokens)[0]
        self._memory.put(owner, text, tuple(ids))
        return ids

    def begin(self, text: str, add_special_tokens: bool) -> EncodeJob:
        """Look a text up in the cache."""
        return self._begin(text, add_special_tokens)

    def _begin(self, text: str, add_special_tokens: bool, limit: EncodeLimit | None = None) -> EncodeJob:
        owner, encoder = self._owners[add_special_tokens], self._encoder
        whole = encoder.affixes(add_special_tokens) is None or not encoder.splitter
        # Before it is cut up, which takes longer than all the rest if everything is known.
        if len(text) <= self.room and (known := self._memory.get(owner, text, whole=whole)) is not None:
            return _CachedJob(known)
        if whole:
            return _WholeJob(self, encoder, text, add_special_tokens)
        spans = encoder.splitter.spans(text, None if limit is None else limit.stretch)
        return _PartialJob(self, encoder, text, add_special_tokens, spans)

    def look_up(self, pieces: Sequence[str]) -> list[tuple[int, ...] | None]:
        """Return the ids of each piece, or None."""
        return self._memory.get_many(self._owners[False], pieces)

    def store(self, text: str, ids: list[int], add_special_tokens: bool, *, shared: bool) -> None:
        """Remember a whole text. `shared`: the numbers are those of its pieces already."""
        self._memory.put(self._owners[add_special_tokens], text, tuple(ids), shared=shared)

    def encode_pieces(self, pieces: Sequence[str], room: int) -> tuple[dict[str, tuple[int, ...]], int]:
        """Encode pieces and remember them, up to so many bytes. Return what is left of these, too."""
        new: dict[str, tuple[int, ...]] = {}
        for piece, ids in zip(pieces, self._encoder.encode_many(pieces, False), strict=True):
            shared = new[piece] = self._numbers.share(ids)
            if room > 0:
                room -= self._memory.put(self._owners[False], piece, shared, shared=True)
        return new, room

    @property
    def room(self) -> int:
        """The bytes that the pieces of one text may take."""
        return self._memory.limit // _SHARE


class _CachedJob:
    """See `EncodeJob`: a text that is remembered whole."""

    __slots__ = ("_ids",)

    left = 0

    def __init__(self, ids: tuple[int, ...]) -> None:
        self._ids = ids

    def finish(self, limit: EncodeLimit | None = None) -> list[int]:
        """Return all ids."""
        if limit is not None:
            limit.check(len(self._ids))
        return list(self._ids)


class _WholeJob:
    """See `EncodeJob`: a text that cannot be cut, and is not known."""

    __slots__ = ("_add", "_cache", "_encoder", "_text")

    def __init__(self, cache: TokenCache, encoder: PieceEncoder, text: str, add_special_tokens: bool) -> None:
        self._cache = cache
        self._encoder = encoder
        self._text = text
        self._add = add_special_tokens

    @property
    def left(self) -> int:
        """The whole."""
        return len(self._text)

    def finish(self, limit: EncodeLimit | None = None) -> list[int]:
        """Return all ids."""
        ids = self._encoder.encode(self._text, self._add, limit)
        self._cache.store(self._text, ids, self._add, shared=False)
        return ids


class _PartialJob:
    """See `EncodeJob`. A text of several pieces that are all known is remembered whole."""

    __slots__ = ("_add", "_all_known", "_cache", "_encoder", "_found", "_pieces", "_room", "_spans", "_text", "left")

    def __init__(
        self, cache: TokenCache, encoder: PieceEncoder, text: str, add_special_tokens: bool, spans: Iterable[Span]
    ) -> None:
        self._cache = cache
        self._encoder = encoder
        self._text = text
        self._add = add_special_tokens
        self._room = cache.room
        self._pieces = 0
        self._all_known = True
        self.left = len(text)
        self._spans = spans
        #: The ids of each piece, in their order, as far as they have been looked up.
        self._found: Iterator[tuple[int, ...] | None] | None = None
        if len(text) <= LOOK_UP:
            self._spans = spans = list(spans)
            found = cache.look_up([text[start:end] for start, end in spans])
            self._found = iter(found)
            self.left = sum([end - start for (start, end), ids in zip(spans, found, strict=True) if ids is None])

    def finish(self, limit: EncodeLimit | None = None) -> list[int]:
        """Return all ids."""
        result = self._encoder.join(self._text, self._add, self._resolve, self._spans, limit)
        if self._all_known and self._pieces > 1:
            self._cache.store(self._text, result, self._add, shared=True)
        return result

    def _resolve(self, pieces: list[str]) -> Iterable[Sequence[int]]:
        self._pieces += len(pieces)
        found = self._cache.look_up(pieces) if self._found is None else list(islice(self._found, len(pieces)))
        if None not in found:
            return [ids or () for ids in found]
        self._all_known = False
        missing = dict.fromkeys(piece for piece, ids in zip(pieces, found, strict=True) if ids is None)
        new, self._room = self._cache.encode_pieces(list(missing), self._room)
        return [new[piece] if ids is None else ids for piece, ids in zip(pieces, found, strict=True)]


class _InternedIds(dict[int, int]):
    """One object for each number, so that entries hold references only. Grows to the vocabulary's size at most."""

    def __missing__(self, number: int) -> int:
        return self.setdefault(number, number)

    def share(self, ids: list[int]) -> tuple[int, ...]:
        """Return the same numbers, each as the object that the others use."""
        if len(ids) < 2:
            return tuple(ids)
        shared: tuple[int, ...] = itemgetter(*ids)(self)
        return shared
