"""Decoding of a request body into a checked object."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from dynamo_core.errors import InvalidArgument
from dynamo_core.protocol import UNREADABLE, read, truncated

from dynamo_generation.bodies.bounds import INLINE, check_bounds
from dynamo_generation.bodies.duplicates import find_duplicate
from dynamo_generation.bodies.invalid_json import find_unreadable
from dynamo_generation.bodies.limits import check_limits
from dynamo_generation.bodies.piecewise_decoding import Pieces, copied, is_long

T = TypeVar("T", bound=msgspec.Struct)

#: Bytes of a body that is parsed in pieces.
LARGE = 1024 * 1024

#: For the description only: that something is missing is said in words of our own.
NOT_EMPTY = msgspec.Meta(extra_json_schema={"minLength": 1, "minItems": 1})

#: Characters of an error that may be the client's own.
_LONGEST = 1000
_objects = msgspec.json.Decoder(dict[str, Any])
_PREFIX = "Failed to deserialize the JSON body into the target type: "
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_BYTE = re.compile(r" \(byte \d+\)$")
_FIELD = re.compile(r"Object (?:(missing required)|contains unknown) field `(.*)`")
_EXPECTED = re.compile(r"Expected `([a-z |]+)`(?: (>=|<=) (-?\d+))?(?:, got `(\w+)`)?")
_WORDS = {
    "array": "a list",
    "bool": "a boolean",
    "float": "a number",
    "int": "an integer",
    "object": "an object",
    "str": "a string",
}


def object_of(data: bytes | str) -> dict[str, Any]:
    """Return the JSON object in a text that is a part of something else.

    Raises:
        Unreadable: there is none.
    """
    return read(_objects, data)


def parse_object(body: bytes) -> dict[str, Any]:
    """Return a body as a JSON object within bounds.

    Raises:
        InvalidArgument: it is none; `field` is what it is about, if that can be told.
    """
    pieces = Pieces() if len(body) > LARGE else None
    try:
        if pieces is not None:
            body = pieces.cut(body)
        names = check_bounds(body)
        value = msgspec.json.decode(body)
    except UNREADABLE as error:
        raise _unreadable(body, error, pieces is not None) from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{_PREFIX}expected an object")
    duplicate = find_duplicate(body, value, names)
    if duplicate is not None:
        twice = truncated(duplicate)
        raise InvalidArgument(f"{_PREFIX}duplicate field `{twice}`", field=twice)
    if pieces is not None:
        pieces.restore(value)
    return value


def _unreadable(body: bytes, error: Exception, cut: bool) -> InvalidArgument:
    """Return the error for a body that cannot be decoded; of one that was cut, places in the bytes are not told."""
    if len(body) <= INLINE and (culprit := find_unreadable(body)) is not None:
        field, what = culprit
        return InvalidArgument(f"{_PREFIX}{field}: {what}" if field else _PREFIX + what, field=field or None)
    if isinstance(error, UnicodeDecodeError):
        return InvalidArgument(f"{_PREFIX}it is not UTF-8")
    what = _PATH.sub("", str(error))
    return InvalidArgument(_PREFIX + (_BYTE.sub("", what) if cut else what))


def to_struct(raw: dict[str, Any], cls: type[T]) -> T:
    """Return the known fields of an object, with their types checked.

    Raises:
        InvalidArgument: a field is missing or of another type; `field` is its path.
    """
    check_limits(raw)
    # One conversion of a million values would keep the interpreter's lock. What they are is checked later.
    long = {name: raw[name] for name in getattr(cls, "ANY_LISTS", ()) if is_long(raw.get(name))}
    try:
        made = msgspec.convert(raw | {name: values[:1] for name, values in long.items()} if long else raw, cls)
    except UNREADABLE as error:
        raise schema_error(str(error)) from error
    for name, values in long.items():
        setattr(made, name, copied(values))
    return made


def schema_error(text: str) -> InvalidArgument:
    """Return the error for a body of the wrong shape, from what msgspec says of it.

    The path at its end tells the field.
    """
    match = _PATH.search(text)
    path = match[1] if match else ""
    what = text[: match.start()] if match else text
    what, path = truncated(what, _LONGEST), truncated(path)
    named = _FIELD.fullmatch(what)
    if named is not None:
        path, where = f"{path}.{named[2]}".lstrip("."), path
        what = f"{'missing' if named[1] else 'unknown'} field `{named[2]}`"
    else:
        where = path
        what = _in_words(what)
    return InvalidArgument(f"{_PREFIX}{where}: {what}" if where else _PREFIX + what, field=path or None)


def _in_words(what: str) -> str:
    """Return the types that msgspec names, as a client knows them."""
    match = _EXPECTED.fullmatch(what)
    if match is None:
        return what
    expected, bound, limit, got = match.groups()
    *others, last = [_WORDS.get(name, name) for name in expected.split(" | ")]
    text = f"expected {', '.join(others)} or {last}" if others else f"expected {last}"
    if bound:
        text += f" of {'at least' if bound == '>=' else 'at most'} {limit}"
    return f"{text}, got {_WORDS.get(got, got)}" if got else text
