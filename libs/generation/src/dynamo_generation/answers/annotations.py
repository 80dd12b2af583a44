"""Annotations: extra values beside the answer that `nvext.annotations` requests.

In a unary answer an annotation is a key of `nvext`. In a stream it is an event of its name with a comment line of JSON,
as the original has it. Where the client asks for `annotations_in: "chunks"`, it is a key of the `nvext` of a chunk
without choices, which the official SDKs can read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from dynamo_generation.answers.render import encode
from dynamo_generation.prompts.preprocess import Prompt

FORMATTED_PROMPT = "formatted_prompt"
TOKEN_IDS = "token_ids"  # noqa: S105 - tokens of text
TIMING = "timing"


class Timing:
    """The times of a request's arrival and first tokens. `clock` is monotonic, in seconds."""

    __slots__ = ("_begun", "_clock", "_first", "_received")

    def __init__(self, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._begun = clock()
        self._received = now()
        self._first: float | None = None

    def first_output(self) -> None:
        """Record the time of the first output."""
        self._first = self._clock()

    def value(self) -> dict[str, Any]:
        """Return milliseconds: when the request came (since 1970), then the time to the first output and to all."""
        first = self._first
        return {
            "request_received_ms": round(self._received * 1000),
            "ttft_ms": None if first is None else round((first - self._begun) * 1000, 3),
            "total_time_ms": round((self._clock() - self._begun) * 1000, 3),
        }


def as_events(values: dict[str, Any]) -> bytes:
    """Return annotations as events of their names; of a list, each value is an event of its own, in order."""
    parts = []
    for name, value in values.items():
        if name == TOKEN_IDS:
            # Each value is text that holds JSON, as in the original.
            value = [encode(ids).decode() for ids in value]
        each = value if isinstance(value, list) else [value]
        parts += [b"event: %b\n: %b\n\n" % (name.encode(), encode(one)) for one in each]
    return b"".join(parts)


def leading_events(
    wanted: Sequence[str], prompts: Sequence[Prompt], decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """Return the annotations that come before the first chunk, each a list with a value per prompt."""
    values: dict[str, Any] = {}
    if FORMATTED_PROMPT in wanted:
        values[FORMATTED_PROMPT] = [_text(prompt, decode) for prompt in prompts]
    if TOKEN_IDS in wanted:
        values[TOKEN_IDS] = [prompt.token_ids for prompt in prompts]
    return values


def trailing_events(wanted: Sequence[str], timing: Timing) -> dict[str, Any]:
    """Return the annotations that come before the last finish chunk."""
    return {TIMING: timing.value()} if TIMING in wanted else {}


def scalar(values: dict[str, Any]) -> dict[str, Any]:
    """Return annotations as they stand in `nvext`: lists of one value are that value."""
    return {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in values.items()}


def unary_extension(
    wanted: Sequence[str], prompts: Sequence[Prompt], timing: Timing, decode: Callable[[Sequence[int]], str]
) -> dict[str, Any] | None:
    """Return the `nvext` object of a unary answer; None if nothing was asked for.

    Several prompts make lists of values.
    """
    return scalar(leading_events(wanted, prompts, decode) | trailing_events(wanted, timing)) or None


def _text(prompt: Prompt, decode: Callable[[Sequence[int]], str]) -> str:
    return decode(prompt.token_ids) if prompt.text is None else prompt.text
