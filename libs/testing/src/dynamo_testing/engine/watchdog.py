"""A watchdog that ends a run whose engine blocks the event loop, where no deadline inside the loop could."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import PurePath

#: Seconds between two looks.
_LOOK = 0.1
#: Seconds beyond the deadline of a call before the loop counts as blocked: it had time to notice by itself.
SLACK = 3.0


class Watchdog:
    """A thread that calls `stuck` if the event loop is silent for longer than it may be.

    `stuck` is told what was seen and for how many seconds, in the watchdog's thread. Make the watchdog in the loop's
    thread and call `beat` in the loop, more often than `SLACK`.
    """

    def __init__(self, stuck: Callable[[str, float], None]) -> None:
        self.stuck = stuck
        self._watched = threading.get_ident()
        self._over = threading.Event()
        self._beat = time.monotonic()
        #: Seconds that one call into the engine may take now.
        self.patience = 0.0
        self._thread = threading.Thread(target=self._run, name="conformance watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def beat(self) -> None:
        """Say that the loop runs."""
        self._beat = time.monotonic()

    def stop(self) -> None:
        """End the watch."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(_LOOK):
            silent = time.monotonic() - self._beat
            if silent > self.patience + SLACK:
                self.stuck(f"the event loop was blocked for {silent:.0f} s{self._place()}", silent)
                return

    def _place(self) -> str:
        """Return where the watched thread is."""
        frame = sys._current_frames().get(self._watched)
        if frame is None:
            return ""
        code = frame.f_code
        return f" ({PurePath(code.co_filename).name}, line {frame.f_lineno}, in {code.co_name})"
