"""Rate-limited warnings about records and messages that cannot be read and are skipped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from dynamo_core.protocol.decoding import truncated

#: Warnings allowed at once, and the seconds after which one more is allowed.
BURST = 10
EVERY = 10.0
#: The most names that are remembered as warned about.
MOST_NAMES = 1000


class UnreadableWarner:
    """Warns once per name (a record's key, a message's source) until it can be read again.

    Beyond `BURST` warnings, and one more every `EVERY` seconds, names are only counted; the next warning says how many.
    """

    def __init__(self, log: logging.Logger, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Take as `what` the kind of thing that has the names, such as "record"; `clock` counts seconds."""
        self._log = log
        self._what = what
        self._clock = clock
        self._warned: set[str] = set()
        self._suppressed = 0
        self._tokens = float(BURST)
        self._filled_at = clock()

    def warn(self, name: str, reason: object) -> None:
        """Report that the thing with this name is skipped."""
        if name in self._warned:
            return
        now = self._clock()
        self._tokens = min(float(BURST), self._tokens + (now - self._filled_at) / EVERY)
        self._filled_at = now
        if self._tokens < 1:
            self._suppressed += 1
            return
        self._tokens -= 1
        if len(self._warned) < MOST_NAMES:
            self._warned.add(name)
        suppressed, self._suppressed = self._suppressed, 0
        more = f" (and {suppressed} more that were not told of)" if suppressed else ""
        self._log.warning(
            "%s '%s' cannot be read and is left out: %s%s", self._what, truncated(name), truncated(str(reason)), more
        )

    def readable(self, name: str) -> None:
        """Report that the thing with this name can be read, or is gone: its next failure is warned about again."""
        if self._warned:
            self._warned.discard(name)
