"""Limits the connections whose callers have not yet proved that they read the worker's record.

A caller proves it with the nonce of the worker's address, in its first message. Until then its connection is *pending*.
The number of pending connections is limited, and a new one evicts the oldest: a caller speaks as soon as it is
connected, so a connection that stays silent is no caller. Connections that have sent the nonce do not count.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from dynamo_core import CounterLike

V = TypeVar("V")

log = logging.getLogger(__name__)

#: Seconds between two warnings about one host, and how many hosts are remembered.
AGAIN = 60.0
REMEMBERED = 1024


@dataclass(slots=True, eq=False)
class PendingConnection:
    """One connection. `close` closes it; the thread that accepts connections calls it."""

    host: str
    close: Callable[[], object]


class ConnectionLimiter:
    """Keeps at most `most` pending connections. The event loop and the thread that accepts connections share it."""

    def __init__(self, most: int, evicted: CounterLike) -> None:
        """`evicted` counts the connections that were closed to make room."""
        self._most = most
        self._evicted = evicted
        self._lock = threading.Lock()
        #: In the order of arrival.
        self._waiting: dict[PendingConnection, None] = {}
        #: Hosts from which a connection has sent the nonce, the newest last.
        self._verified: dict[str, None] = {}
        #: When the last warning about a host was logged.
        self._warned: dict[str, float] = {}

    def add(self, pending: PendingConnection) -> None:
        """Adds a connection, and evicts another where there are too many. Called in the thread that accepts."""
        oldest: PendingConnection | None = None
        with self._lock:
            if len(self._waiting) >= self._most:
                unknown = (known for known in self._waiting if known.host not in self._verified)
                oldest = next(unknown, None) or next(iter(self._waiting))
                del self._waiting[oldest]
            self._waiting[pending] = None
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

    def remove(self, pending: PendingConnection) -> None:
        """The connection is closed. Safe twice."""
        with self._lock:
            self._waiting.pop(pending, None)

    def verified(self, pending: PendingConnection) -> None:
        """The connection has sent the nonce. Others from its host are evicted last."""
        with self._lock:
            self._waiting.pop(pending, None)
            _remember(self._verified, pending.host, None)

    def warn(self, host: str, message: str, *details: object) -> None:
        """Logs a warning about a host, at most once a minute."""
        now = monotonic()
        with self._lock:
            last = self._warned.get(host)
            if last is not None and now - last < AGAIN:
                return
            _remember(self._warned, host, now)
        log.warning(message, *details)


def _remember(remembered: dict[str, V], host: str, value: V) -> None:
    """Adds an entry as the newest, and drops the oldest of too many."""
    remembered.pop(host, None)
    remembered[host] = value
    if len(remembered) > REMEMBERED:
        del remembered[next(iter(remembered))]
