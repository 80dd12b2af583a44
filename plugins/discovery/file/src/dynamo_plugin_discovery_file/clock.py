"""The two clocks: one that only counts, and the host's, which may jump."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """Where the time comes from. Deadlines use `monotonic` (seconds), file times use `wall` (nanoseconds)."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], int] = time.time_ns


SYSTEM = Clock()
