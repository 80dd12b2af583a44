"""Connections of which the listener does not know yet that their callers have read the worker's record.

A caller shows it with the nonce of the worker's address, in the first thing that it says. Until then a connection is a
*stranger*. Strangers are few, and the oldest of them makes room for the next: a caller speaks as soon as it is
connected, so a connection that has been silent for long is none. Connections that have shown the nonce take no room
here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from dynamo_core.contracts.metrics import CounterLike

V = TypeVar("V")

log = logging.getLogger(__name__)

#: Seconds between two warnings about one host, and how many hosts are remembered.
AGAIN = 60.0
REMEMBERED = 1024


@dataclass(slots=True, eq=False)
class Stranger:
    """One connection. `close` closes it, and is called in the thread that accepts connections."""

    host: str
    close: Callable[[], object]


class Strangers:
    """Keeps at most so many. Used by the event loop and by the thread that accepts connections."""

    def __init__(self, most: int, evicted: CounterLike) -> None:
        """`evicted` counts those that had to make room."""
        self._most = most
        self._evicted = evicted
        self._lock = threading.Lock()
        #: In the order in which they came.
        self._waiting: dict[Stranger, None] = {}
        #: Hosts from which a connection has shown the nonce, the newest last.
        self._known: dict[str, None] = {}
        #: When a host was last warned about.
        self._warned: dict[str, float] = {}

    def met(self, stranger: Stranger) -> None:
        """Lets a connection in. One of those that wait may have to go. Called in the thread that accepts."""
        oldest: Stranger | None = None
        with self._lock:
            if len(self._waiting) >= self._most:
                unknown = (one for one in self._waiting if one.host not in self._known)
                oldest = next(unknown, None) or next(iter(self._waiting))
                del self._waiting[oldest]
            self._waiting[stranger] = None
        if oldest is not None:
            self._evicted.inc()
            self.warn(
                oldest.host,
                "connections from %s that say nothing are closed to make room: more than %d wait (`max_silent`)",
                oldest.host,
                self._most,
            )
            # The event loop may have been closed, and the connection with it.
            with suppress(RuntimeError):
                oldest.close()

    def gone(self, stranger: Stranger) -> None:
        """A connection is over. Safe twice."""
        with self._lock:
            self._waiting.pop(stranger, None)

    def known(self, stranger: Stranger) -> None:
        """A connection has shown the nonce: others from its host are the last to go."""
        with self._lock:
            self._waiting.pop(stranger, None)
            _remember(self._known, stranger.host, None)

    def warn(self, host: str, message: str, *details: object) -> None:
        """Logs a warning about a host, once in a minute, whatever else it does."""
        now = monotonic()
        with self._lock:
            last = self._warned.get(host)
            if last is not None and now - last < AGAIN:
                return
            _remember(self._warned, host, now)
        log.warning(message, *details)


def _remember(remembered: dict[str, V], host: str, value: V) -> None:
    """As the newest; the oldest of too many is forgotten."""
    remembered.pop(host, None)
    remembered[host] = value
    if len(remembered) > REMEMBERED:
        del remembered[next(iter(remembered))]
