"""Annotations: what `nvext.annotations` asks to be told beside the answer.

In a stream an annotation is an event of its name with a comment line of JSON; in a unary answer it is a key of `nvext`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dynamo_plugin_frontend_openai.preprocess import Prompt

FORMATTED_PROMPT = "formatted_prompt"
TOKEN_IDS = "token_ids"  # noqa: S105 - tokens of text
TIMING = "timing"


class Timing:
    """When a request came and when its first tokens did. `clock` gives seconds and only ever goes forward."""

    __slots__ = ("_begun", "_clock", "_first", "_received")

    def __init__(self, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._begun = clock()
        self._received = now()
        self._first: float | None = None

    def first_output(self) -> None:
        """The first output is here."""
        self._first = self._clock()

    def value(self) -> dict[str, Any]:
        """Milliseconds: when the request came (since 1970), then how long the first output and all of it took."""
        first = self._first
        return {
            "request_received_ms": round(self._received * 1000),
            "ttft_ms": None if first is None else round((first - self._begun) * 1000, 3),
            "total_time_ms": round((self._clock() - self._begun) * 1000, 3),
        }


def event(name: str, value: Any) -> bytes:
    """An annotation as an item of a stream."""
    return b"event: %b\n: %b\n\n" % (name.encode(), msgspec.json.encode(value))


def opening_events(wanted: Sequence[str], prompts: Sequence[Prompt], decode: Callable[[Sequence[int]], str]) -> bytes:
    """The items that come before the first chunk. Of several prompts, each has its own item, in order."""
    parts = []
    if FORMATTED_PROMPT in wanted:
        parts += [event(FORMATTED_PROMPT, _text(prompt, decode)) for prompt in prompts]
    if TOKEN_IDS in wanted:
        # The value is text that holds JSON, as in the original.
        parts += [event(TOKEN_IDS, msgspec.json.encode(prompt.token_ids).decode()) for prompt in prompts]
    return b"".join(parts)


def closing_events(wanted: Sequence[str], timing: Timing) -> bytes:
    """The items that come before the last finish chunk."""
    return event(TIMING, timing.value()) if TIMING in wanted else b""


def unary_extension(
    wanted: Sequence[str], prompts: Sequence[Prompt], timing: Timing, decode: Callable[[Sequence[int]], str]
) -> dict[str, Any] | None:
    """The `nvext` object of a unary answer; None if nothing was asked for. Several prompts make lists of values."""
    extension: dict[str, Any] = {}
    if FORMATTED_PROMPT in wanted:
        texts = [_text(prompt, decode) for prompt in prompts]
        extension[FORMATTED_PROMPT] = texts[0] if len(texts) == 1 else texts
    if TOKEN_IDS in wanted:
        ids = [prompt.token_ids for prompt in prompts]
        extension[TOKEN_IDS] = ids[0] if len(ids) == 1 else ids
    if TIMING in wanted:
        extension[TIMING] = timing.value()
    return extension or None


def _text(prompt: Prompt, decode: Callable[[Sequence[int]], str]) -> str:
    return decode(prompt.token_ids) if prompt.text is None else prompt.text
