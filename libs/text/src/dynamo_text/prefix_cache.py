"""A cache of the ids of texts that were encoded before, whole or in pieces.

A short text is cached whole. A long one is cut where the tokenizer cuts it anyway (see `dynamo_text.splitting`), and
each piece is cached by itself. The cuts depend only on the text before them. So texts with the same beginning share
their first pieces, and the earlier turns of a long conversation are not tokenized again. Pieces are found by their
whole content, never by a digest. Their ids put together are exactly the ids that the tokenizer gives for the text. A
long text whose pieces were all known is cached whole too, since it is likely to come again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from operator import itemgetter
from sys import getsizeof
from typing import Protocol

from dynamo_text.splitting import TextSplitter
from dynamo_text.utf8 import to_utf8

#: Encodes texts, each to its ids.
EncodeMany = Callable[[Sequence[str], bool], list[list[int]]]

#: Bytes of an entry beside its text and ids: its place in the table, two tuples and a tuple's head.
_ENTRY = 300
#: Bytes of an id: its place in the tuple, and the number, if no other entry has it too.
_SHARED_ID, _OWN_ID = 8, 36
#: The largest share of the memory that one text may take.
_SHARE = 4


def _ignore(_: float) -> None:
    """The default where no metric is kept."""


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
        """A number that keeps the entries of one tokenizer apart from those of all others."""
        return next(self._owners)

    def get(self, owner: int, text: str, *, whole: bool = True) -> tuple[int, ...] | None:
        """The ids of one text. Without `whole` its pieces are looked up next, so that it does not count if it is not
        known."""
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
        """The ids of each text, or None."""
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
        """Caches ids, and returns the number of bytes that they take. `shared`: the numbers are in other entries too.

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
    """The rest of the work for a text of which some ids are cached."""

    @property
    def left(self) -> int:
        """The number of characters still to be tokenized."""

    def finish(self) -> list[int]:
        """All ids. Takes long if much is left. Raises as `Tokenizer.encode` does."""


class CachingTokenizer(Protocol):
    """A tokenizer with a method `begin`, which tells how much work a text needs."""

    def begin(self, text: str, *, add_special_tokens: bool = True) -> EncodeJob | None:
        """Looks a text up in the cache, fast even for long ones; None without a cache."""


class TokenCache:
    """The cache of one tokenizer.

    `encode` is the tokenizer's own; `affixes` are the ids that it puts before and after a text if special tokens are
    wanted, None if that is not known: then such texts are remembered whole.
    """

    def __init__(
        self,
        memory: TokenCacheStore,
        encode: EncodeMany,
        splitter: TextSplitter,
        affixes: tuple[list[int], list[int]] | None,
    ) -> None:
        self._memory = memory
        self._encode = encode
        self._splitter = splitter
        self._affixes = affixes
        #: Without special tokens, and with them. Pieces are texts without.
        self._owners = (memory.owner(), memory.owner())
        self._numbers = _InternedIds()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of a text. The list is the caller's own.

        Raises:
            InvalidArgument: the text holds a lone surrogate.
        """
        if len(text) > self._splitter.piece:
            return self.begin(text, add_special_tokens).finish()
        owner = self._owners[add_special_tokens]
        known = self._memory.get(owner, text)
        if known is not None:
            return list(known)
        to_utf8(text)
        ids = self._encode((text,), add_special_tokens)[0]
        self._memory.put(owner, text, tuple(ids))
        return ids

    def begin(self, text: str, add_special_tokens: bool) -> EncodeJob:
        """Looks a text up in the cache."""
        owner = self._owners[add_special_tokens]
        affixes = self._affixes if add_special_tokens else _NOTHING
        if affixes is None or not self._splitter:
            return _PartialJob(self, owner, text, [text], _NOTHING, add_special_tokens)
        # Before it is cut up, which takes longer than all the rest if everything is known.
        known = self._memory.get(owner, text, whole=False)
        if known is not None:
            return _CachedJob(known)
        pieces = self._splitter.pieces(text)
        return _PartialJob(self, self._owners[False], text, pieces, affixes, False, whole_owner=owner)

    def look_up(self, owner: int, pieces: list[str]) -> list[tuple[int, ...] | None]:
        """The ids of each piece, or None."""
        return self._memory.get_many(owner, pieces)

    def store(self, owner: int, text: str, ids: list[int]) -> None:
        """Remembers a text whose pieces were all known."""
        # The numbers are those of the pieces already.
        self._memory.put(owner, text, tuple(ids), shared=True)

    def encode_pieces(self, owner: int, pieces: list[str], add_special_tokens: bool) -> dict[str, tuple[int, ...]]:
        """Encodes pieces and remembers them."""
        new: dict[str, tuple[int, ...]] = {}
        memory, numbers = self._memory, self._numbers
        room = memory.limit // _SHARE
        for piece, ids in zip(pieces, self._encode(pieces, add_special_tokens), strict=True):
            shared = new[piece] = numbers.share(ids)
            if room > 0:
                room -= memory.put(owner, piece, shared, shared=True)
        return new


_NOTHING: tuple[list[int], list[int]] = ([], [])


class _CachedJob:
    """See `EncodeJob`: a text that is remembered whole."""

    __slots__ = ("_ids",)

    left = 0

    def __init__(self, ids: tuple[int, ...]) -> None:
        self._ids = ids

    def finish(self) -> list[int]:
        """All ids."""
        return list(self._ids)


class _PartialJob:
    """See `EncodeJob`. A text of several pieces that are all known is remembered for `whole_owner`."""

    __slots__ = ("_add", "_affixes", "_cache", "_found", "_owner", "_pieces", "_text", "_whole_owner", "left")

    def __init__(
        self,
        cache: TokenCache,
        owner: int,
        text: str,
        pieces: list[str],
        affixes: tuple[list[int], list[int]],
        add_special_tokens: bool,
        *,
        whole_owner: int | None = None,
    ) -> None:
        self._cache = cache
        self._whole_owner = whole_owner
        self._owner = owner
        self._text = text
        self._pieces = pieces
        self._affixes = affixes
        self._add = add_special_tokens
        self._found = cache.look_up(owner, pieces)
        self.left = sum([len(piece) for piece, ids in zip(pieces, self._found, strict=True) if ids is None])

    def finish(self) -> list[int]:
        """All ids."""
        before, after = self._affixes
        found = self._found
        result = before.copy()
        new: dict[str, tuple[int, ...]] | None = None
        if None in found:
            to_utf8(self._text)  # the whole, so that an error tells the right place
            missing = dict.fromkeys(piece for piece, ids in zip(self._pieces, found, strict=True) if ids is None)
            new = self._cache.encode_pieces(self._owner, list(missing), self._add)
            for piece, ids in zip(self._pieces, found, strict=True):
                result += new[piece] if ids is None else ids
        else:
            for ids in found:
                result += ids or ()
        result += after
        if new is None and self._whole_owner is not None and len(found) > 1:
            self._cache.store(self._whole_owner, self._text, result)
        return result


class _InternedIds(dict[int, int]):
    """One object for each number, so that entries hold references only. Grows to the vocabulary's size at most."""

    def __missing__(self, number: int) -> int:
        return self.setdefault(number, number)

    def share(self, ids: list[int]) -> tuple[int, ...]:
        """The same numbers, each as the object that the others use."""
        if len(ids) < 2:
            return tuple(ids)
        shared: tuple[int, ...] = itemgetter(*ids)(self)
        return shared
