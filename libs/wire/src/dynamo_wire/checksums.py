"""The checksum of messages between processes: XXH3 with 64 bits, which detects what a network has changed.

It does not stop an attacker, who can compute it as well. TLS does.
"""

from __future__ import annotations

#: ``checksum(data, seed)``: a number; `data` is bytes or a view of some, `seed` a number from before or 0.
from xxhash import xxh3_64_intdigest as checksum

__all__ = ["checksum"]
