"""What tests do beside the test itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self


class Threads:
    """Threads that work while a block runs: each ends soon after `over` is set."""

    def __init__(self, *work: Callable[[], None]) -> None:
        self.over = threading.Event()
        self._threads = [threading.Thread(target=one) for one in work]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(120)
