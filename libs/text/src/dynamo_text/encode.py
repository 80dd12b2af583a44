"""Encoding without holding the event loop."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import cast

from dynamo_core import Tokenizer
from dynamo_core.errors import ServiceOverloaded

from dynamo_text.prefix_cache import CachingTokenizer

#: Up to this many characters a text is encoded at once: handing it to a thread would take longer.
INLINE = 4096
#: Up to this many characters a text is looked up at once: cutting it up and finding the pieces takes milliseconds.
LOOK_UP = 1 << 19
#: How many long texts may be encoded or wait for it at a time.
MAX_WAITING = 256

_waiting = 0


async def encode_async(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The ids of a text; if more than `INLINE` characters must be tokenized, one of a few threads does it.

    Raises:
        InvalidArgument: the text holds a lone surrogate.
        ServiceOverloaded: `MAX_WAITING` long texts are waiting already.
    """
    global _waiting
    if len(text) <= INLINE:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    work = None
    # As `isinstance` with a protocol takes as long as the look-up.
    if len(text) <= LOOK_UP and hasattr(tokenizer, "begin"):
        work = cast(CachingTokenizer, tokenizer).begin(text, add_special_tokens=add_special_tokens)
    if work is not None and work.left <= INLINE:
        return work.finish()
    if _waiting >= MAX_WAITING:
        raise ServiceOverloaded("too many long prompts are being tokenized, please retry later")
    _waiting += 1
    finish = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens) if work is None else work.finish
    box = [finish]
    del finish, work
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads(), lambda: box.pop()())
    finally:
        _waiting -= 1
        box.clear()  # what was given up stays in the queue of the threads for a while; the text need not


@cache
def _threads() -> ThreadPoolExecutor:
    # More threads than half the cores would take the time of the event loop.
    return ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 2)), thread_name_prefix="encode")
