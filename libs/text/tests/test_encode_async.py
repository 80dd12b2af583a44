from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from dynamo_core.errors import InvalidArgument, ServiceOverloaded
from dynamo_text import encode as encode_module
from dynamo_text.byte_tokenizer import ByteTokenizer
from dynamo_text.encode import INLINE, encode_async
from dynamo_text.hf_tokenizer import HFTokenizer


class GatedTokenizer(ByteTokenizer):
    """Encodes only when the gate is open, and tells in which thread it did."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.threads: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.get_ident())
        assert self.gate.wait(10)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raise AssertionError("nobody decodes here")


async def test_a_short_text_is_encoded_at_once() -> None:
    tokenizer = GatedTokenizer()
    tokenizer.gate.set()

    assert await encode_async(tokenizer, "hi") == [*b"hi"]
    assert tokenizer.threads == [threading.get_ident()]


async def test_a_long_text_leaves_the_event_loop() -> None:
    tokenizer = GatedTokenizer()
    text = "a" * (INLINE + 1)

    pending = asyncio.ensure_future(encode_async(tokenizer, text))
    await asyncio.sleep(0)
    assert not pending.done()
    tokenizer.gate.set()

    assert await pending == list(text.encode())
    assert tokenizer.threads != [threading.get_ident()]


@pytest.mark.parametrize("add", [True, False])
async def test_the_threaded_path_gives_the_same_ids(tiny: HFTokenizer, add: bool) -> None:
    text = "häus 你好 😀 " * 1000

    assert await encode_async(tiny, text, add_special_tokens=add) == tiny.encode(text, add_special_tokens=add)


async def test_errors_come_through_from_the_thread() -> None:
    with pytest.raises(InvalidArgument, match="lone surrogate"):
        await encode_async(ByteTokenizer(), "a" * INLINE + "\ud800")


async def test_too_many_long_texts_are_refused_and_room_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "MAX_WAITING", 2)
    tokenizer = GatedTokenizer()
    text = "a" * (INLINE + 1)

    first, second = (asyncio.ensure_future(encode_async(tokenizer, text)) for _ in range(2))
    await asyncio.sleep(0)
    with pytest.raises(ServiceOverloaded, match="long prompts"):
        await encode_async(tokenizer, text)

    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    third = asyncio.ensure_future(encode_async(tokenizer, text))
    tokenizer.gate.set()

    assert await first == await third == list(text.encode())
