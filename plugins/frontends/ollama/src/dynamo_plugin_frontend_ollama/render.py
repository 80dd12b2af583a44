"""Answers of Ollama's API, as lines of JSON and as one body."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from dynamo_generation.answers.content_blocks import Block, BlockRenderer, Kind
from dynamo_generation.answers.render import Collected, Identity, encode, verdict_of
from dynamo_generation.choices.choice import Choice, Piece

_END = b',"done":false}\n'


class Shape(NamedTuple):
    """The text before an answer, and the text that closes it."""

    opens: bytes
    closes: bytes


CHAT = Shape(b',"message":{"role":"assistant","content":"', b"}")
GENERATE = Shape(b',"response":"', b"")


class LineRenderer(BlockRenderer):
    """Makes the lines and the body of one answer. `begun` is when its request came, in nanoseconds."""

    def __init__(self, identity: Identity, shape: Shape, begun: int) -> None:
        super().__init__(identity)
        head = encode({"model": identity.model, "created_at": moment(identity.created)})[:-1]
        self._before, self._closes = head + shape.opens, shape.closes
        self._after = b'"' + shape.closes + _END
        self._begun_at = begun
        self._first = 0

    def leading_events(self, choice: Choice) -> bytes:
        """Return nothing: every line stands for itself."""
        self._first = time.monotonic_ns()
        return b""

    def around(self, choice: Choice) -> tuple[bytes, bytes]:
        """Return what stands around the text of a choice that is nothing but text."""
        return self._before, self._after

    def add(self, collected: Collected, piece: Piece) -> int:
        """Add a piece to the one answer. Give about how many bytes that takes."""
        self._first = self._first or time.monotonic_ns()
        return super().add(collected, piece)

    def finish(self, choice: Choice) -> bytes:
        """Return what the last block still needs. The end comes with the usage."""
        self._choice = choice
        return self._written(self._blocks.end())

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the last line."""
        return self._before + b'"' + self._closes + self._last(usage)

    def body(self, collected: Sequence[Collected], usage: dict[str, Any], nvext: dict[str, Any] | None) -> list[bytes]:
        """Return the whole answer as JSON."""
        self._choice = collected[0].choice
        blocks = self._blocks.all
        text, thoughts = ("".join(each.text for each in blocks if each.kind is kind) for kind in _TEXTS)
        more = _thinking(thoughts) if thoughts else b""
        calls = [_call(block) for block in blocks if block.call is not None]
        if calls:
            more += _calls(calls)
        return [self._before, _inside(text), b'"', more, self._closes, self._last(usage)]

    def _begun(self, block: Block) -> bytes:
        return b""

    def _more(self, block: Block, text: str) -> bytes:
        match block.kind:
            case Kind.TEXT:
                return self._before + _inside(text) + self._after
            case Kind.REASONING:
                return self._before + b'"' + _thinking(text) + self._closes + _END
            case Kind.CALL:
                # Arguments are an object, which is told when it is whole.
                return b""

    def _ended(self, block: Block) -> bytes:
        if block.call is None:
            return b""
        return self._before + b'"' + _calls([_call(block)]) + self._closes + _END

    def _last(self, usage: dict[str, Any]) -> bytes:
        """Return the end of the last object: why it ended, and what it took."""
        now, choice = time.monotonic_ns(), self._choice
        first = self._first or now
        told: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if choice is not None and choice.finish_reason == "length" else "stop",
            "total_duration": now - self._begun_at,
            # Workers have their models before they are asked.
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": first - self._begun_at,
            "eval_count": usage["completion_tokens"],
            "eval_duration": max(now - first, 1),
            **({} if choice is None else verdict_of(choice)),
        }
        return b",%b\n" % encode(told)[1:]


_TEXTS = (Kind.TEXT, Kind.REASONING)


def moment(seconds: float) -> str:
    """Return a time since 1970 as the API tells times."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _inside(text: str) -> bytes:
    return encode(text)[1:-1]


def _thinking(text: str) -> bytes:
    return b',"thinking":' + encode(text)


def _calls(calls: Sequence[dict[str, Any]]) -> bytes:
    return b',"tool_calls":' + encode(calls)


def _call(block: Block) -> dict[str, Any]:
    call = block.call
    known = {} if call is None else {"id": call.id}
    return {**known, "function": {"name": "" if call is None else call.name, "arguments": block.arguments}}
