"""Decoding of bytes from another process. Every fault becomes one error with a short text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from typing import Any, Final, Protocol, TypeVar

import msgspec

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

#: What decoders raise on bytes that they cannot make into the wanted type. `UnicodeError` is a `ValueError`.
UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)
#: Characters of a foreign text that are shown.
SHOWN: Final = 200
#: Lists and maps inside each other in a value without a schema. Comparing and encoding recurse as decoding does.
MAX_DEPTH: Final = 32


class Unreadable(ValueError):
    """Bytes that cannot be decoded. The text is one short line that shows on any terminal."""


class Decoder(Protocol[T_co]):
    """The base of msgspec decoders with our errors."""

    def decode(self, data: Any, /) -> T_co:
        """Return the value of some bytes."""
        ...


def read(decoder: Decoder[T], data: bytes | memoryview | str) -> T:
    """Decode a value that another process wrote.

    Raises:
        Unreadable: it is not of the decoder's type.
    """
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise Unreadable(truncated(str(error))) from None


def read_json(data: bytes | str) -> Any:
    """Return a JSON value of any kind, as Python's own parser takes it: the settings of models may hold ``Infinity``.

    Raises:
        Unreadable: it is no JSON, or nested too deeply to be read.
    """
    try:
        return json.loads(data)
    except UNREADABLE as error:
        raise Unreadable(truncated(str(error))) from None


def check_depth(value: object) -> None:
    """Make sure that a decoded value can be compared, encoded and shown.

    Raises:
        Unreadable: it has more than `MAX_DEPTH` lists and maps inside each other.
    """
    level = [value] if isinstance(value, dict | list | tuple) else []
    for _ in range(MAX_DEPTH):
        level = [child for one in level for child in _parts(one) if isinstance(child, dict | list | tuple)]
    if level:
        raise Unreadable(f"it has more than {MAX_DEPTH} lists and maps inside each other")


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        # A key of msgpack may be an array.
        return chain(value, value.values())
    return value if isinstance(value, list | tuple) else ()


def truncated(text: str, limit: int = SHOWN) -> str:
    """Return a foreign text fit for messages: on one line, cut at `limit` characters, nothing invisible."""
    cut = text if len(text) <= limit else text[:limit] + "…"
    return cut if cut.isprintable() else repr(cut)[1:-1]
