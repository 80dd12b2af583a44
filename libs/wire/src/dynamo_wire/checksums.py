"""The checksum of what travels between processes: XXH3 with 64 bits, which finds what a network has changed.

It keeps no attacker out, who could make another. That is what TLS is for.
"""

from __future__ import annotations

#: ``checksum(data, seed)``: a number; `data` is bytes or a view of some, `seed` a number from before or 0.
from xxhash import xxh3_64_intdigest as checksum

__all__ = ["checksum"]
