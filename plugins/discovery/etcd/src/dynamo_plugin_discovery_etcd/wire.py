"""The JSON encoding of etcd: bytes in base64, 64-bit numbers as text, zeros left out."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """A value, the lease it belongs to, and the revision of the store that it came with."""

    lease: int
    revision: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Listing:
    """All records of this system at one revision of the store."""

    cluster: int
    revision: int
    records: dict[str, Record]


@dataclass(frozen=True, slots=True)
class Change:
    """A change reported by a watch of the store: the record, or None for one that is gone."""

    key: str
    revision: int
    record: Record | None


class Keys:
    """Keys below a prefix, as etcd wants them."""

    def __init__(self, prefix: str) -> None:
        self._start = f"{prefix}/".encode()
        #: The first key that does not begin with the prefix: its last byte is a slash, which can be counted up.
        self._end = self._start[:-1] + bytes([self._start[-1] + 1])

    def one(self, key: str) -> str:
        """Return one key."""
        return text(self._start + _bytes(key))

    def everything(self, after: str | None = None) -> Json:
        """Return the range of all keys, or of those after one."""
        start = self._start if after is None else self._start + _bytes(after) + b"\x00"
        return {"key": text(start), "range_end": text(self._end)}

    def name(self, key: str) -> str:
        """Return the reverse of `one`."""
        return b64decode(key)[len(self._start) :].decode(errors="surrogateescape")


def text(data: bytes) -> str:
    """Return bytes in base64."""
    return b64encode(data).decode()


def _bytes(key: str) -> bytes:
    # A foreign key that is no UTF-8 must not stop the listing.
    return key.encode(errors="surrogateescape")


def number(fields: Json, name: str) -> int:
    """Return a number, 0 if it is left out."""
    return int(fields.get(name, 0))


def record(fields: Json) -> Record:
    """Return what a key holds."""
    return Record(number(fields, "lease"), number(fields, "mod_revision"), b64decode(fields.get("value", "")))
