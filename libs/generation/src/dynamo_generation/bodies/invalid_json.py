"""The position of an error in bodies on which JSON readers disagree: NaN, lone surrogates, infinite numbers.

The decoder says no more than that something is wrong. Clients make these mistakes without knowing: a mean of nothing is
NaN, and a text that was cut between two halves of a character still is a text to them.
"""

from __future__ import annotations

import json
from typing import Any

from dynamo_core.protocol import UNREADABLE

#: More digits than any integer has that can be meant.
_DIGITS = 40


class _Fault(str):
    """Stands for a value that is none, and says why."""

    __slots__ = ()


def find_unreadable(body: bytes) -> tuple[str, str] | None:
    """Return the field that holds such a value (empty for the body itself), and what is wrong with it.

    None if something else is wrong.
    """
    try:
        value = json.loads(body, parse_constant=_constant, parse_int=_integer, parse_float=_float)
    except UNREADABLE:
        return None
    found = _walk(value)
    return found and ("".join(reversed(found[0])).removeprefix("."), found[1])


def _constant(name: str) -> _Fault:
    return _Fault(f"{name} is not a number in JSON")


def _integer(text: str) -> Any:
    return int(text) if len(text) <= _DIGITS else _Fault("the number is out of range")


def _float(text: str) -> Any:
    value = float(text)
    return value if abs(value) != float("inf") else _Fault("the number is out of range")


def _walk(value: Any) -> tuple[list[str], str] | None:
    """Return the steps to the first fault, from the last to the first: only the way to a fault is written down."""
    if isinstance(value, _Fault):
        return [], str(value)
    if isinstance(value, str):
        return None if _whole(value) else ([], "the text holds half a character (a lone surrogate)")
    items: Any = ()
    if isinstance(value, dict):
        for name in value:
            if not _whole(name):
                return [], "the name of a field holds half a character (a lone surrogate)"
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, child in items:
        found = _walk(child)
        if found is not None:
            found[0].append(f"[{key}]" if isinstance(value, list) else f".{key}")
            return found
    return None


def _whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
