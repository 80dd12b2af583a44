"""Warnings about what is left out because it cannot be read: few of them, however much of it comes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from dynamo_core.protocol.reading import shown

#: Warnings that may come at once, and the seconds after which there may be one more.
BURST = 10
EVERY = 10.0
#: Names that are remembered as told.
MOST_NAMES = 1000


class UnreadableWarner:
    """Warns once of each name, a record's key or a message's source, until what has that name can be read again.

    Beyond `BURST` warnings, and one more every `EVERY` seconds, names are only counted; the next warning says how many.
    """

    def __init__(self, log: logging.Logger, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`what` has the names, such as "record"; `clock` only counts, in seconds."""
        self._log = log
        self._what = what
        self._clock = clock
        self._warned: set[str] = set()
        self._suppressed = 0
        self._tokens = float(BURST)
        self._filled_at = clock()

    def warn(self, name: str, reason: object) -> None:
        """What has this name is left out."""
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
            "%s '%s' cannot be read and is left out: %s%s", self._what, shown(name), shown(str(reason)), more
        )

    def readable(self, name: str) -> None:
        """What has this name can be read, or is gone: the next time that it cannot is told again."""
        if self._warned:
            self._warned.discard(name)
