"""One flush per loop turn for all streams in which something arrived."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class FlushQueue:
    """Collects callbacks and runs them together in the next loop turn.

    Sixty-four streams that got a token in the same read cost one scheduled call, not sixty-four.
    """

    __slots__ = ("_dirty",)

    def __init__(self) -> None:
        self._dirty: list[Callable[[], None]] = []

    def add(self, callback: Callable[[], None]) -> None:
        """Runs `callback` in the next loop turn. The caller makes sure that it is added once per turn."""
        if not self._dirty:
            asyncio.get_running_loop().call_soon(self._flush)
        self._dirty.append(callback)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        for callback in dirty:
            try:
                callback()
            except Exception:
                log.exception("a stream's reader failed")
