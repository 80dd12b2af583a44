"""Bounds on the size and depth of a body, checked on its bytes before anything is built from it.

Objects cost up to a hundred times their bytes in a body, and code that walks them recurses. The counting is one pass
over the bytes, which ends where a bound is passed. It also tells how many names the outermost object gives.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import msgspec
from dynamo_core.errors import InvalidArgument
from dynamo_core.protocol import UNREADABLE, truncated

from dynamo_generation.bodies.json_structure import outermost_names, outside_of_strings

#: Bytes up to which looking for each name takes less time than looking at the structure.
SHORT = 2048
#: Up to this many bytes a body is read at once; decoding a larger one is left to a thread.
INLINE = 64 * 1024
#: Lists and objects inside each other, the body itself being the first.
MAX_DEPTH = 100
#: Lists and objects, all in all.
MAX_CONTAINERS = 50_000
#: Texts, the names of fields among them.
MAX_STRINGS = 250_000
#: Values in lists and objects; a prompt may be given as that many token ids.
MAX_VALUES = 1_000_000

_DEEP = f"is nested too deeply: at most {MAX_DEPTH} lists and objects inside each other are allowed"
#: Texts of an outermost object whose field that is out of bounds is looked for.
_MOST_TEXTS = 20_000
_COLON = ord(":")
_OPENING = frozenset(b"[{")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[]{}:"))


class Measure(NamedTuple):
    """The containers of a JSON text, the commas between its values, and the names of its outermost object."""

    containers: int
    values: int
    names: int


class _TooDeep(Exception):
    """More than `MAX_DEPTH` lists and objects are nested before the position `end`."""

    def __init__(self, end: int) -> None:
        super().__init__(_DEEP)
        self.end = end


class _TooMany(Exception):
    """A bounded count is exceeded before the position `end`."""

    def __init__(self, what: str, most: int, end: int) -> None:
        super().__init__(f"too many {what}: at most {most} are allowed")
        self.end = end


def check_bounds(body: bytes) -> int | None:
    """Check a body that may not even be JSON.

    Returns:
        The names that its outermost object gives, those that it gives twice counted twice; None for a short body.

    Raises:
        InvalidArgument: it is out of bounds; `field` is the field of the body that is, if that can be told.
    """
    if len(body) <= SHORT and body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        # As many in texts as outside of them: it is enough that they are few.
        return None
    try:
        return measure(body).names
    except _TooDeep as error:
        names = [name for _, name in _outermost(body[: error.end])[-1:]]
        raise InvalidArgument(f"Validation: The body {_DEEP}", field=_readable(names)) from None
    except _TooMany as error:
        field = _readable(_largest(body[: error.end]))
        raise InvalidArgument(f"Validation: {field or 'The body'} has {error}", field=field) from None


def measure(text: bytes) -> Measure:
    """Count what is in a JSON text; of one that is none, up to where that shows.

    Raises:
        _TooDeep, _TooMany: more than there may be; the rest of the text is not looked at.
    """
    depth = quotes = containers = values = names = 0
    for end, more, outside in outside_of_strings(text):
        quotes += more
        if quotes > 2 * MAX_STRINGS:
            raise _TooMany("texts", MAX_STRINGS, end)
        values += outside.count(b",")
        containers += outside.count(b"[") + outside.count(b"{")
        _check_sums(containers, values, end)
        for char in outside.translate(None, _NOT_STRUCTURE):
            if char == _COLON:
                names += depth == 1
            elif char in _OPENING:
                depth += 1
                if depth > MAX_DEPTH:
                    raise _TooDeep(end)
            else:
                depth -= 1
                if depth < 0:
                    # No JSON, as the parser will say.
                    return Measure(containers, values, names)
    return Measure(containers, values, names)


def _check_sums(containers: int, values: int, end: int = 0) -> None:
    if values > MAX_VALUES:
        raise _TooMany("values", MAX_VALUES, end)
    if containers > MAX_CONTAINERS:
        raise _TooMany("lists and objects", MAX_CONTAINERS, end)


def _largest(body: bytes) -> list[bytes]:
    """Return the name of the field with the most bytes of what was looked at; none without any."""
    named = _outermost(body)
    sizes = (following - begin for begin, following in pairwise([*(begin for begin, _ in named), len(body)]))
    return [name for _, (_, name) in sorted(zip(sizes, named, strict=True))[-1:]]


def _outermost(body: bytes) -> list[tuple[int, bytes]]:
    """Return the names of the outermost object with where their values begin; none if no request has so many texts."""
    try:
        return list(outermost_names(body, MAX_DEPTH, _MOST_TEXTS))
    except OverflowError:
        return []


def _readable(names: list[bytes]) -> str | None:
    """Return a name as it is read, if there is one and it can be."""
    try:
        return (truncated(msgspec.json.decode(names[0], type=str)) if names else "") or None
    except UNREADABLE:
        return None


class ArgumentBounds:
    """The bounds of the arguments of earlier calls: JSON inside of texts, which templates are shown as objects."""

    def __init__(self) -> None:
        self._containers = self._values = 0

    def add(self, text: str, message: int, call: int) -> None:
        """Count the arguments of a call of a message, both by their places.

        Raises:
            InvalidArgument: they lead out of bounds, all of them counted together.
        """
        if len(text) <= MAX_DEPTH:
            return
        field = f"messages[{message}].tool_calls[{call}].function.arguments"
        try:
            more = measure(text.encode("utf-8", "replace"))
            self._containers += more.containers
            self._values += more.values
            _check_sums(self._containers, self._values)
        except _TooDeep:
            raise InvalidArgument(f"Validation: {field} {_DEEP}", field=field) from None
        except _TooMany as error:
            raise InvalidArgument(f"Validation: {field} has {error}, in all calls together", field=field) from None
