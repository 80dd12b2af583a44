"""Pauses between attempts, varied so that the processes of a system do not act all at once. In seconds."""

from __future__ import annotations

import random


def jitter(seconds: float, least: float = 0.5, most: float = 1.5) -> float:
    """A random time between two multiples of `seconds`."""
    # No cryptography: it only spreads the processes over the time.
    return seconds * (least + (most - least) * random.random())  # noqa: S311
