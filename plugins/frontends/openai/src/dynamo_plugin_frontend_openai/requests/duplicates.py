"""Fields that a body gives twice. Servers differ in which of the two counts, so a body that has one is refused.

The decoder takes the last and says nothing. But it tells how many fields there are, and the bytes how many were given.
"""

from __future__ import annotations

import re

import msgspec

from dynamo_plugin_frontend_openai.requests.bounds import outside_of_texts

_TOKEN = re.compile(rb'("(?:[^"\\]|\\.)*")(\s*:)?|[\[\]{}]', re.DOTALL)
_COLON = ord(":")
_OPENING = frozenset(b"[{")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[]{}:"))


def find_duplicate(body: bytes, fields: int) -> str | None:
    """The first field of an object that is there twice; None if none is.

    `body` is a JSON object that was found to have so many different fields. Those of inner objects do not count.
    """
    return None if _given(body) == fields else _name(body)


def _given(body: bytes) -> int:
    count = depth = 0
    for char in outside_of_texts(body).translate(None, _NOT_STRUCTURE):
        if char == _COLON:
            count += depth == 1
        elif char in _OPENING:
            depth += 1
        else:
            depth -= 1
    return count


def _name(body: bytes) -> str | None:
    seen: set[str] = set()
    depth = 0
    for token in _TOKEN.finditer(body):
        text, colon = token.groups()
        if text is None:
            depth += 1 if body[token.start()] in _OPENING else -1
        elif depth == 1 and colon is not None:
            name = msgspec.json.decode(text, type=str)
            if name in seen:
                return name
            seen.add(name)
    return None
