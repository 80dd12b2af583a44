"""The files of the folder: the encoding of records and leases, and file names for keys.

A record is one line that says what it is, then the value as it was put::

    dynamo-record 1 <lease id, 16 hex digits> <crc32, 8 hex digits> <key, percent-encoded>
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from urllib.parse import quote, unquote

from dynamo_core import MAX_VALUE
from dynamo_leases import MAX_KEY, check_record

#: The largest file that can be a record: no more is ever read.
MAX_RECORD = MAX_VALUE + 3 * MAX_KEY + 64

_MAGIC = "dynamo-record 1"
_LEASE_MAGIC = "dynamo-lease 1"
#: File systems allow 255 bytes; a longer name is cut and told apart by a hash.
_MAX_NAME = 200
_CUT = 120


@dataclass(frozen=True, slots=True)
class Record:
    """The content of one file of the folder; `lease` is `NO_LEASE` for a value that outlives its writer."""

    key: str
    value: bytes
    lease: int


def file_name(key: str) -> str:
    """Return the bare file name of a key: percent-encoded, also ``/``, and never with a leading dot."""
    name = quote(key, safe="")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > _MAX_NAME:
        name = f"{name[:_CUT]}~{hashlib.sha256(key.encode()).hexdigest()}"
    return name


def encode(record: Record) -> bytes:
    """Return the content of a record's file."""
    key = quote(record.key, safe="")
    return f"{_MAGIC} {record.lease:016x} {_checksum(record):08x} {key}\n".encode() + record.value


def decode(data: bytes) -> Record:
    """Read what `encode` wrote.

    Raises:
        ValueError: it is something else, or damaged.
    """
    head, newline, value = data.partition(b"\n")
    parts = head.decode("ascii", "replace").split(" ")
    if not newline or len(parts) != 5 or " ".join(parts[:2]) != _MAGIC:
        raise ValueError("it is not a record")
    record = Record(unquote(parts[4], errors="strict"), value, int(parts[2], 16))
    check_record(record.key, value)
    if int(parts[3], 16) != _checksum(record):
        raise ValueError("its checksum is wrong")
    return record


def encode_lease(ttl: float) -> bytes:
    """Return the content of a lease's file; `ttl` in seconds."""
    return f"{_LEASE_MAGIC} {ttl!r}\n".encode()


def decode_lease(data: bytes) -> float:
    """Return the seconds that a lease lives without a heartbeat.

    Raises:
        ValueError: it is not the file of a lease.
    """
    magic, _, ttl = data.decode("ascii", "replace").strip().rpartition(" ")
    seconds = float(ttl) if magic == _LEASE_MAGIC else 0.0
    if not 0 < seconds < 1e9:
        raise ValueError("it is not a lease")
    return seconds


def lease_name(lease: int) -> str:
    """Return the file name of a lease."""
    return f"{lease:016x}"


def _checksum(record: Record) -> int:
    return zlib.crc32(record.value, zlib.crc32(f"{record.lease:016x} {record.key}".encode()))
