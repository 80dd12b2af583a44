"""Strict JSON: refuse duplicate fields and ``-0`` for an integer, which the JSON library accepts.

A scan of the bytes settles nearly every body. Only one that may hold such a fault is parsed once more.
"""

from __future__ import annotations

import re
from json import JSONDecoder
from typing import Final

#: ``-0`` as a whole number; in a text it looks the same.
_minus_zero = re.compile(rb"-0[ \t\n\r]*[,\]}]")
#: An escape that may spell a letter or the underscore of a field's name.
_escaped_letter = re.compile(rb"\\u00[567]")

_MINUS_ZERO: Final = object()
_NO_INTEGER: Final = "expected `int`, got `float`"


def _pairs(pairs: list[tuple[str, object]]) -> list[tuple[str, object]]:
    return pairs


def _integer(digits: str) -> object:
    return _MINUS_ZERO if digits == "-0" else None


_decoder = JSONDecoder(object_pairs_hook=_pairs, parse_int=_integer)


class StrictFields:
    """Looks at the bodies of one type, which has these fields. Fields that are not its own may hold anything."""

    def __init__(self, fields: tuple[str, ...]) -> None:
        self._fields = frozenset(fields)
        self._names = tuple(field.encode() for field in fields)

    def fault(self, body: bytes) -> tuple[str, list[str | int]] | None:
        """Return what is wrong with a body that could be read, and at which path of it; None if nothing is.

        Raises:
            RecursionError: it is nested too deeply to be looked at.
        """
        if not self._suspicious(body):
            return None
        pairs = _decoder.decode(body.decode())
        seen: set[str] = set()
        for name, value in pairs:
            if name not in self._fields:
                continue
            if name in seen:
                return f"duplicate field `{name}`", [name]
            seen.add(name)
            if value is _MINUS_ZERO:
                return f"{name}: {_NO_INTEGER}", [name]
            if isinstance(value, list) and _MINUS_ZERO in value:
                index = value.index(_MINUS_ZERO)
                return f"{name}[{index}]: {_NO_INTEGER}", [name, index]
        return None

    def _suspicious(self, body: bytes) -> bool:
        if b"-0" in body and _minus_zero.search(body):
            return True
        if b"\\" in body:
            return _escaped_letter.search(body) is not None or any(
                body.count(b'"%b"' % name) > 1 for name in self._names
            )
        # Without escapes every other piece between quotes is a text.
        texts = body.split(b'"')[1::2]
        return len(set(texts)) < len(texts) and any(texts.count(name) > 1 for name in self._names)
