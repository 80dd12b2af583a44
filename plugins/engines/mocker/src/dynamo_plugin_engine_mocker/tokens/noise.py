"""Pseudo-random numbers as a pure function of a seed and a position."""

from __future__ import annotations

import struct
from hashlib import shake_128

#: Positions are numbered from 0 and come in blocks of this many: one hash serves a whole block.
BLOCK = 64
#: Each number is below this.
WORD = 1 << 16

_WORDS = struct.Struct(f"<{BLOCK}H")
_KEY = struct.Struct("<8sQQ")


def noise(purpose: bytes, seed: int, block: int) -> tuple[int, ...]:
    """Return the numbers of positions ``block * BLOCK`` and up, for a purpose of up to 8 bytes and a 64-bit seed."""
    return _WORDS.unpack(shake_128(_KEY.pack(purpose, seed, block)).digest(_WORDS.size))


def seed_of(seed: int | None) -> int:
    """Return a request's seed, which may be absent, negative or large, as 64 bits."""
    return (seed or 0) & 0xFFFF_FFFF_FFFF_FFFF
