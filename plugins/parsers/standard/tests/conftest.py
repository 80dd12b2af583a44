"""Parsers fed in pieces, and what came out of them made comparable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from dynamo_core import (
    ContentDelta,
    ParserDelta,
    ReasoningDelta,
    ReasoningParser,
    ToolCallArguments,
    ToolCallParser,
    ToolCallStart,
)

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]

#: What a text became, in order: content, reasoning, calls with name and arguments.
Parsed = list[tuple[str, ...]]


def pieces_of(text: str, sizes: Sequence[int]) -> list[str]:
    """Return the text in pieces of these sizes, taken in turn."""
    pieces, at, turn = [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
        turn += 1
    return pieces


def joined(deltas: Sequence[ParserDelta]) -> Parsed:
    """Return deltas with neighbours of one kind joined; the indexes of calls are checked, their ids left out."""
    out: list[list[str]] = []
    calls = 0
    for delta in deltas:
        match delta:
            case ContentDelta(text) | ReasoningDelta(text):
                kind = "content" if isinstance(delta, ContentDelta) else "reasoning"
                assert text
                if out and out[-1][0] == kind:
                    out[-1][1] += text
                else:
                    out.append([kind, text])
            case ToolCallStart(index, id, name):
                assert index == calls
                assert id
                calls += 1
                out.append(["call", name, ""])
            case ToolCallArguments(index, text):
                assert index == calls - 1
                assert out[-1][0] == "call"
                out[-1][2] += text
    return [tuple(item) for item in out]


Parse = Callable[..., Parsed]


@pytest.fixture
def parse() -> Parse:
    """Return what a parser makes of a text, in pieces of the given sizes."""

    def run(parser: ToolCallParser | ReasoningParser, text: str, sizes: Sequence[int] = (1_000_000,)) -> Any:
        deltas: list[ParserDelta] = []
        for piece in pieces_of(text, sizes):
            deltas += parser.feed(piece)
        return joined([*deltas, *parser.finish()])

    return run


@pytest.fixture
def tools() -> list[dict[str, Any]]:
    """Return the tools of a request: functions called ``f`` and ``g``."""
    return TOOLS
