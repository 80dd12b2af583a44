"""Bounds of record keys and values."""

from __future__ import annotations

from dynamo_core import MAX_VALUE

#: The longest key, in bytes of UTF-8.
MAX_KEY = 1024
#: The lease id of values that outlive their writer.
NO_LEASE = 0


def check_record(key: str, value: bytes) -> None:
    """Check the key and the value of a record.

    Raises:
        ValueError: the key is empty or too long, or the value is too large.
    """
    if not key:
        raise ValueError("a key must not be empty")
    if len(key.encode()) > MAX_KEY:
        raise ValueError(f"the key {key[:40]!r}… is longer than {MAX_KEY} bytes")
    if len(value) > MAX_VALUE:
        raise ValueError(f"the value of {key!r} has {len(value)} bytes, more than {MAX_VALUE}")
