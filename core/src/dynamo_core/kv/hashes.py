"""Block and sequence hashes of token ids, bit-equal to those of NVIDIA Dynamo.

A block hash covers one full block: XXH3-64 with seed 1337 over its token ids as little-endian u32. A sequence hash
stands for the whole prefix up to its block: the first is the first block hash, each next one is XXH3-64 with seed 1337
over its predecessor and the block hash, both as little-endian u64. A partial block at the end has no hash.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence

import xxhash

SEED = 1337

_xxh3 = xxhash.xxh3_64_intdigest
_pack_pair = struct.Struct("<QQ").pack


#: The name of how blocks are hashed here. Workers of one model must agree on it.
SCHEME = f"xxh3-64/{SEED}"


def lora_seed(lora_name: str | None) -> int:
    """Return the seed of block hashes made under an adapter; `SEED` without one."""
    if not lora_name:
        return SEED
    return (SEED + _xxh3(lora_name.encode())) % 2**64


def block_seed(lora_name: str | None = None, cache_salt: str | None = None) -> int:
    """Return the seed of block hashes under an adapter and a salt.

    Requests share blocks only with requests of the same salt. How the original mixes a salt in is not known; hashes
    under a salt are this project's own.
    """
    seed = lora_seed(lora_name)
    return (seed + _xxh3(cache_salt.encode(), SEED)) % 2**64 if cache_salt else seed


def block_hashes(
    token_ids: Sequence[int], block_size: int, *, lora_name: str | None = None, cache_salt: str | None = None
) -> list[int]:
    """Return one unsigned 64-bit hash per full block of `block_size` tokens.

    Raises:
        ValueError: `block_size` is not positive.
        OverflowError: a token id does not fit 32 bits.
    """
    if block_size <= 0:
        raise ValueError(f"block_size must be greater than 0, got {block_size}")
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    data = ids.tobytes()
    width = 4 * block_size
    full = len(data) // width * width
    seed = block_seed(lora_name, cache_salt)
    return [_xxh3(block, seed) for (block,) in struct.iter_unpack(f"{width}s", data[:full])]


def sequence_hashes(blocks: Sequence[int]) -> list[int]:
    """Return the chained hash of every prefix, given the block hashes."""
    if not blocks:
        return []
    current = blocks[0]
    chained = [current]
    for block in blocks[1:]:
        current = _xxh3(_pack_pair(current, block), SEED)
        chained.append(current)
    return chained


def to_signed(value: int) -> int:
    """Return the same 64 bits as a signed number."""
    return value - 2**64 if value >= 2**63 else value


def to_unsigned(value: int) -> int:
    """Return the same 64 bits as an unsigned number."""
    return value + 2**64 if value < 0 else value
