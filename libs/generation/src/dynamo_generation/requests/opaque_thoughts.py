"""Reasoning of an answer as an opaque text that the client stores and sends back.

It is base64 of a version byte, a checksum and the text as UTF-8. It is not encrypted and proves nothing of where it
comes from: the client may read the thoughts anyway.
"""

from __future__ import annotations

import binascii
import struct
import zlib
from base64 import b64decode, b64encode

_VERSION = 1
_HEAD = struct.Struct("!BI")


def pack_thoughts(thoughts: str) -> str:
    """Return the opaque text."""
    body = thoughts.encode(errors="replace")
    return b64encode(_HEAD.pack(_VERSION, zlib.crc32(body)) + body).decode()


def unpack_thoughts(opaque: str | None) -> str:
    """Return the thoughts; empty if the text comes from elsewhere, or is not whole."""
    try:
        data = b64decode(opaque or "", validate=True)
        version, checksum = _HEAD.unpack_from(data)
        body = data[_HEAD.size :]
        return body.decode() if (version, checksum) == (_VERSION, zlib.crc32(body)) else ""
    except (binascii.Error, struct.error, ValueError):
        return ""
