"""How large and how deep a body may be, found out from its bytes: nothing is built of one that is not within bounds.

Objects cost up to a hundred times their bytes in a body, and code that walks them recurses. The counting is done by
whole-body operations, each a pass at the speed of memory, and looks at strings only if it must.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from dynamo_core.errors import InvalidArgument
from dynamo_core.protocol import UNREADABLE

from dynamo_plugin_frontend_openai.requests.limits import MAX_COMMAS, PAIRS

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
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_OPENING = frozenset(b"[{")
_TOKEN = re.compile(rb'"((?:[^"\\]|\\.)*)"|[\[\]{}]', re.DOTALL)
#: Messages, or parts of one, that a template takes about a millisecond for.
_MANY = 256
#: How far the culprit of a body that is too deep is looked for.
_LOOKED_AT = 10_000


class _TooDeep(Exception):
    """There are more than `MAX_DEPTH` lists and objects inside each other."""


class _TooMany(Exception):
    """There are more of something than there may be."""

    def __init__(self, what: str, most: int) -> None:
        super().__init__(f"too many {what}: at most {most} are allowed")


def check_bounds(body: bytes) -> None:
    """Checks a body that may not even be JSON.

    Raises:
        InvalidArgument: it is out of bounds; `field` is the field of the body that is, if that can be told.
    """
    openings = body.count(b"[") + body.count(b"{")
    if len(body) > INLINE:
        _check_notes(body)
    if openings <= MAX_DEPTH and (len(body) <= INLINE or _has_few(body)):
        # As many in texts as outside of them: it is enough that they are few.
        return
    try:
        _measure(body)
    except _TooDeep:
        raise InvalidArgument(f"Validation: The body {_DEEP}", field=_deep_field(body)) from None
    except _TooMany as error:
        field = _largest_field(body)
        raise InvalidArgument(f"Validation: {field or 'The body'} has {error}", field=field) from None


def _has_few(body: bytes) -> bool:
    return body.count(b",") <= MAX_VALUES and body.count(b'"') <= 2 * MAX_STRINGS


def _check_notes(body: bytes) -> None:
    """Refuses more notes of the client than there may be by their bytes: none of them is made."""
    if b'"metadata"' not in body:
        return
    try:
        notes = bytes(msgspec.json.decode(body, type=dict[str, msgspec.Raw]).get("metadata", b""))
    except UNREADABLE:
        # What is wrong with it is told by the validation of the whole.
        return
    if notes.startswith(b"{") and notes.count(b",") > MAX_COMMAS:
        raise InvalidArgument(f"Validation: metadata has too many pairs: {PAIRS}", field="metadata")


def _measure(text: bytes) -> tuple[int, int]:
    """How many lists and objects a JSON text has, and how many commas between values.

    Raises:
        _TooDeep, _TooMany: more than there may be.
    """
    plain = without_escapes(text)
    if plain.count(b'"') > 2 * MAX_STRINGS:
        raise _TooMany("texts", MAX_STRINGS)
    outside = _outside(plain)
    values = outside.count(b",")
    containers = outside.count(b"[") + outside.count(b"{")
    _check_sums(containers, values)
    depth = 0
    for bracket in outside.translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in _OPENING else -1
        if depth > MAX_DEPTH:
            raise _TooDeep
    return containers, values


def outside_of_texts(text: bytes) -> bytes:
    """What a JSON text has beside its texts and their quotes."""
    return _outside(without_escapes(text))


def without_escapes(text: bytes) -> bytes:
    """A JSON text whose quotes open and close texts in turn."""
    return text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text


def _outside(plain: bytes) -> bytes:
    return b"".join(plain.split(b'"')[::2])


def _check_sums(containers: int, values: int) -> None:
    if values > MAX_VALUES:
        raise _TooMany("values", MAX_VALUES)
    if containers > MAX_CONTAINERS:
        raise _TooMany("lists and objects", MAX_CONTAINERS)


def check_arguments(raw: dict[str, Any]) -> None:
    """Checks the arguments of earlier calls: JSON inside of texts, which templates are shown as objects.

    Raises:
        InvalidArgument: naming the first that leads out of bounds, all of them counted together.
    """
    containers = values = 0
    for field, text in _arguments(raw.get("messages")):
        if len(text) <= MAX_DEPTH:
            continue
        try:
            more = _measure(text.encode("utf-8", "replace"))
            containers, values = containers + more[0], values + more[1]
            _check_sums(containers, values)
        except _TooDeep:
            raise InvalidArgument(f"Validation: {field} {_DEEP}", field=field) from None
        except _TooMany as error:
            raise InvalidArgument(f"Validation: {field} has {error}, in all calls together", field=field) from None


def is_long(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a template takes so long for a conversation that its shape is checked that a thread should render it."""
    if len(messages) > _MANY:
        return True
    size = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            if len(content) > _MANY:
                return True
            content = "".join(part.get("text") or "" for part in content)
        size += len(content or "")
    return size + sum(len(text) for _, text in _arguments(messages)) > INLINE


def _arguments(messages: Any) -> Iterator[tuple[str, str]]:
    """The arguments that are texts, each with its path. Nothing is known of the shape yet."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if calls is None:
            continue
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            text = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(text, str):
                yield f"messages[{index}].tool_calls[{number}].function.arguments", text


def _largest_field(body: bytes) -> str | None:
    """The field with the most bytes, which is the one with the most of everything but texts."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except RecursionError:
        return _deep_field(body)
    except UNREADABLE:
        return None
    return max(fields, key=lambda name: len(bytes(fields[name])), default=None)


def _deep_field(body: bytes) -> str | None:
    """The field in which the body gets too deep."""
    depth = 0
    name = b""
    for count, token in enumerate(_TOKEN.finditer(body)):
        text = token[1]
        if text is not None:
            if depth == 1:
                name = text
        else:
            depth += 1 if body[token.start()] in _OPENING else -1
        if depth > MAX_DEPTH or count > _LOOKED_AT:
            break
    return name.decode(errors="replace") or None
