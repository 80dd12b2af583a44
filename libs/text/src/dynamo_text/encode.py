"""Encoding without blocking the event loop, and within a limit on the text."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Protocol, TypeGuard, TypeVar

from dynamo_core import Tokenizer
from dynamo_core.errors import ServiceOverloaded

from dynamo_text.encode_limit import MAX_STRETCH, EncodeLimit, TextTooLong
from dynamo_text.prefix_cache import LOOK_UP, EncodeJob
from dynamo_text.token_bound import TokenBound

#: Up to this many characters a text is encoded at once: handing it to a thread would take longer.
INLINE = 4096
#: How many long texts may be encoded or wait for it at a time.
MAX_WAITING = 256
#: Texts of which the lengths are added at once.
_FEW = 256

T = TypeVar("T")

_waiting = 0


class BoundedTokenizer(Tokenizer, Protocol):
    """A tokenizer that takes a text in parts, and stops where it is too long. Those of this package are."""

    #: The least number of tokens of texts, if that is known.
    token_bound: TokenBound | None

    def encode_within(self, text: str, limit: EncodeLimit | None, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. Raise as `encode` does, and `TextTooLong` and `EncodingCancelled`."""

    def beginning(self, text: str, limit: EncodeLimit) -> str:
        """Return the beginning of a text with all the tokens that `limit` allows; may raise `TextTooLong`."""


class CachingTokenizer(BoundedTokenizer, Protocol):
    """A tokenizer with a method `begin`, which tells how much work a text needs."""

    def begin(self, text: str, *, add_special_tokens: bool = True) -> EncodeJob | None:
        """Look a text up in the cache, fast even for long ones; None without a cache."""


class TextEncoder:
    """Encodes texts that may have `most` tokens each, and `stretch` bytes without a place to cut.

    `refuse` makes the error for a text that has more: its argument is the least number of its tokens; None where the
    text cannot be cut into parts and is too long to be encoded at once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        most: int,
        refuse: Callable[[int | None], Exception],
        stretch: int = MAX_STRETCH,
    ) -> None:
        self._tokenizer = tokenizer
        self._most = most
        self._stretch = stretch
        self._refuse = refuse

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. A short one may have more than `most`.

        Raises:
            InvalidArgument: the text holds a lone surrogate.
            ServiceOverloaded: `MAX_WAITING` long texts are waiting already.
            Exception: that of `refuse`.
        """
        if len(text) <= INLINE:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        limit = EncodeLimit(self._most, self._stretch)
        try:
            return await encode_async(self._tokenizer, text, add_special_tokens=add_special_tokens, limit=limit)
        except TextTooLong as error:
            raise self._refuse(error.tokens) from error

    async def check(self, texts: Sequence[str]) -> None:
        """Check by their lengths alone that texts may fit, all together. Short ones may not.

        Raises:
            Exception: that of `refuse`.
        """
        bound = _bound(self._tokenizer)
        if bound is None:
            return
        if len(texts) <= _FEW and sum(len(text) for text in texts if not bound.is_instant(text)) <= LOOK_UP:
            weight = bound.weight_of(texts)
        else:
            weight = await asyncio.to_thread(bound.weight_of, texts)
        if weight <= INLINE:
            return
        least = bound.at_least(weight)
        if least > self._most:
            raise self._refuse(least)

    async def beginning(self, text: str) -> str:
        """Return the beginning of a text, cut so that its first `most` tokens are those of the text.

        Raises:
            Exception: that of `refuse`: it cannot be cut.
        """
        if len(text) <= INLINE or not _is_bounded(self._tokenizer):
            return text
        try:
            return await _in_thread(partial(self._tokenizer.beginning, text, EncodeLimit(self._most, self._stretch)))
        except TextTooLong as error:
            raise self._refuse(error.tokens) from error


async def encode_async(
    tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True, limit: EncodeLimit | None = None
) -> list[int]:
    """Return the ids of a text; if more than `INLINE` characters must be tokenized, one of a few threads does it.

    Raises:
        InvalidArgument: the text holds a lone surrogate.
        ServiceOverloaded: `MAX_WAITING` long texts are waiting already.
        TextTooLong: the text has more tokens than `limit` allows, or cannot be cut.
    """
    if len(text) <= INLINE:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if limit is not None and (bound := _bound(tokenizer)) and (len(text) <= LOOK_UP or bound.is_instant(text)):
        limit.check(bound.at_least(bound.weight(text)))
    work: EncodeJob | None = None
    if len(text) <= LOOK_UP and _is_caching(tokenizer):
        work = tokenizer.begin(text, add_special_tokens=add_special_tokens)
    if work is not None and work.left <= INLINE:
        return work.finish(limit)
    if work is not None:
        finish = partial(work.finish, limit)
    elif _is_bounded(tokenizer):
        finish = partial(tokenizer.encode_within, text, limit, add_special_tokens=add_special_tokens)
    else:
        finish = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    del work
    try:
        return await _in_thread(finish)
    except asyncio.CancelledError:
        if limit is not None:
            limit.given_up = True
        raise


async def _in_thread(work: Callable[[], T]) -> T:
    global _waiting
    if _waiting >= MAX_WAITING:
        raise ServiceOverloaded("too many long prompts are being tokenized, please retry later")
    _waiting += 1
    box = [work]
    del work
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads(), lambda: box.pop()())
    finally:
        _waiting -= 1
        box.clear()  # what was given up stays in the queue of the threads for a while; the text need not


# As `isinstance` with a protocol takes as long as the look-up.


def _is_caching(tokenizer: Tokenizer) -> TypeGuard[CachingTokenizer]:
    return hasattr(tokenizer, "begin")


def _is_bounded(tokenizer: Tokenizer) -> TypeGuard[BoundedTokenizer]:
    return hasattr(tokenizer, "encode_within")


def _bound(tokenizer: Tokenizer) -> TokenBound | None:
    return tokenizer.token_bound if _is_bounded(tokenizer) else None


@cache
def _threads() -> ThreadPoolExecutor:
    # More threads than half the cores would take the time of the event loop.
    return ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 2)), thread_name_prefix="encode")
