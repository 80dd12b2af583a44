"""Embeddings: unit vectors made from a hash of the token ids."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import shake_128
from math import sqrt


def embedding(token_ids: Sequence[int], dimensions: int) -> list[float]:
    """Return the vector of an input: the same ids give the same direction in every process.

    A shorter vector has the direction of the first components of a longer one.
    """
    words = struct.pack(f"<{len(token_ids)}Q", *token_ids)
    numbers = struct.unpack(f"<{dimensions}h", shake_128(words).digest(2 * dimensions))
    # Odd numbers only: no component, and so no vector, is zero.
    components = [2 * number + 1 for number in numbers]
    length = sqrt(sum(component * component for component in components))
    return [component / length for component in components]
