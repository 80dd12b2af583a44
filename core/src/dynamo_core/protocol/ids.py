"""Ids: instance ids as text, request ids, and request ids chosen by clients.

An instance id is written as 16 hexadecimal digits, the same in logs, metrics, JSON and on the command line. JSON has no
such numbers: most clients read one of 64 bits as the nearest of 53.
"""

from __future__ import annotations

import os
import re

_HEX = re.compile(r"[0-9a-fA-F]{16}")
_END = 2**64

#: The most characters of a client's request id.
_LONGEST = 256


def format_instance_id(instance_id: int) -> str:
    """Return the id for people and for JSON. In a log line that may not be written, ``%016x`` does the same."""
    return f"{instance_id:016x}"


def parse_instance_id(value: str | int) -> int:
    """Return the id that a number or its text stands for.

    Raises:
        ValueError: it is neither.
    """
    number = value if isinstance(value, int) else int(value, 16) if _HEX.fullmatch(value) else -1
    if not 0 <= number < _END:
        raise ValueError(f"expected 16 hexadecimal digits, or a number from 0 to {_END - 1}")
    return number


def new_request_id() -> str:
    """Return a random UUID, version 4. `uuid.uuid4` takes four times as long for the same."""
    text = os.urandom(16).hex()
    variant = "89ab"[int(text[16], 16) & 3]
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-{variant}{text[17:20]}-{text[20:]}"


def client_request_id(value: str | None) -> str | None:
    """Return the client's own id of its request, if that is short and visible ASCII."""
    if value and len(value) <= _LONGEST and all("!" <= char <= "~" for char in value):
        return value
    return None
