"""The position of a value in a JSON text, for error messages: found by reading the text once more."""

from __future__ import annotations

import re
from json import JSONDecoder

from dynamo_core.protocol import UNREADABLE

_decoder = JSONDecoder()
_space = re.compile(r"[ \t\n\r]*")


def position(body: bytes, end: int) -> str:
    """Return ``line L column C`` of the byte before `end`; both count from 1, but an empty text ends in column 0."""
    before = body[:end]
    return f"line {before.count(10) + 1} column {len(before) - before.rfind(10) - 1}"


def end_of(body: bytes, path: list[str | int]) -> int:
    """Return the byte after the value at `path`, of names and indexes; the end of the text if it cannot be found.

    Of an object that has a name twice, the last counts.
    """
    text = body.decode("utf-8", "replace")
    try:
        end = _find(text, _skip(text, 0), path)
    except (IndexError, *UNREADABLE):
        return len(body)
    return len(text[:end].encode())


def _find(text: str, at: int, path: list[str | int]) -> int:
    """Return the end of the value at `path` below the one that begins at `at`."""
    if not path:
        return _decoder.raw_decode(text, at)[1]
    step, rest = path[0], path[1:]
    found = len(text)
    at = _skip(text, at + 1)
    index = 0
    while text[at] not in "]}":
        name: str | int = index
        if isinstance(step, str):
            name, at = _decoder.raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)
        end = _decoder.raw_decode(text, at)[1]
        if name == step:
            found = _find(text, at, rest)
            if isinstance(step, int):
                break
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
        index += 1
    return found


def _skip(text: str, at: int) -> int:
    match = _space.match(text, at)
    return at if match is None else match.end()
