"""The cost of a parser for a long text: in lines of Python, bytes and kept text, not in seconds."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

from dynamo_testing.parser.piecewise_parsing import Parser

#: Characters in a piece of text, and how many pieces are fed.
PIECE, PIECES = 64, 512
#: What is allocated at once for a piece, in bytes, and the longest text that is kept, however much came before it.
ALLOCATED, KEPT = 16 * 1024, 16 * PIECE

_NOT_STATE = (type, ModuleType, FunctionType, BuiltinFunctionType)


class Lines:
    """Counts the lines of Python that run inside of ``with``.

    Nothing is collected meanwhile: what other tests have left behind would be finalized here, and counted.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Lines:
        gc.disable()
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before)
        gc.enable()

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.count += 1
        return self._trace


def longest_text(root: object) -> int:
    """Return the length of the longest text that an object holds, however deep."""
    longest, seen, left = 0, {id(root)}, [root]
    while left:
        each = left.pop()
        if isinstance(each, str | bytes | bytearray):
            longest = max(longest, len(each))
            continue
        for other in gc.get_referents(each):
            if id(other) not in seen and not isinstance(other, _NOT_STATE):
                seen.add(id(other))
                left.append(other)
    return longest


def allocated_by(parser: Parser, piece: str) -> int:
    """Return the most bytes that were held more than before while a piece was fed."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        parser.feed(piece)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def check_cost(parser: Parser, opening: str, filler: str) -> None:
    """Feed a long text after an opening.

    Raises:
        AssertionError: the last pieces cost more than the first, or the parser keeps the text in one piece.
    """
    parser.feed(opening)
    text = filler * (2 * PIECE // len(filler) + 2)
    counts = []
    for quarter in range(4):
        with Lines() as lines:
            for number in range(PIECES // 4):
                start = (quarter * PIECES // 4 + number) * PIECE % len(filler)
                parser.feed(text[start : start + PIECE])
        counts.append(lines.count)
    what = f"{PIECES * PIECE} characters {filler!r} after {opening!r}"
    assert counts[-1] <= 2 * counts[0] + PIECE, f"lines of Python grow over {what}: {counts}"
    kept = longest_text(parser)
    assert kept <= KEPT, f"a text of {kept} characters is kept after {what}"
    allocated = min(allocated_by(parser, text[:PIECE]) for _ in range(3))
    assert allocated < ALLOCATED, f"a piece of {PIECE} characters allocates {allocated} bytes after {what}"
