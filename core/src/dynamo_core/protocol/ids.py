"""The ids of instances as text: 16 hexadecimal digits, the same in logs, metrics, JSON and on the command line.

JSON has no such numbers: most clients read one of 64 bits as the nearest of 53.
"""

from __future__ import annotations

import re

_HEX = re.compile(r"[0-9a-fA-F]{16}")
_END = 2**64


def format_instance_id(instance_id: int) -> str:
    """The id for people and for JSON. In a log line that may not be written, ``%016x`` does the same."""
    return f"{instance_id:016x}"


def parse_instance_id(told: str | int) -> int:
    """The id that is meant by a number or by its text.

    Raises:
        ValueError: it is neither.
    """
    number = told if isinstance(told, int) else int(told, 16) if _HEX.fullmatch(told) else -1
    if not 0 <= number < _END:
        raise ValueError(f"expected 16 hexadecimal digits, or a number from 0 to {_END - 1}")
    return number
