"""The two clocks: a monotonic one, and the host's, which may jump."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """A source of time. Deadlines use `monotonic` (seconds), file times use `wall` (nanoseconds)."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], int] = time.time_ns


SYSTEM = Clock()
