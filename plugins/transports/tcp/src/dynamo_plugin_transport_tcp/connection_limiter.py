"""A limit on connections whose callers have not yet authenticated.

A caller proves it in the handshake, with the nonce of the worker's address and the secret. Until then its connection is
*pending*. The number of pending connections is limited, and a new one evicts the oldest of the host that has the most:
a caller speaks as soon as it is connected, so a connection that stays silent is no caller.
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
        #: By host, in the order of arrival.
        self._waiting: dict[str, dict[PendingConnection, None]] = {}
        self._count = 0
        #: Hosts from which a connection has done the handshake, the newest last.
        self._verified: dict[str, None] = {}
        #: When the last warning about a host was logged.
        self._warned: dict[str, float] = {}

    def add(self, pending: PendingConnection) -> None:
        """Add a connection, and evict another where there are too many. Called in the thread that accepts."""
        oldest: PendingConnection | None = None
        with self._lock:
            if self._count >= self._most:
                host = max(self._waiting, key=lambda host: (len(self._waiting[host]), host not in self._verified))
                oldest = next(iter(self._waiting[host]))
                self._drop(oldest)
            self._waiting.setdefault(pending.host, {})[pending] = None
            self._count += 1
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
        """Remove a closed connection. Safe twice."""
        with self._lock:
            self._drop(pending)

    def verified(self, pending: PendingConnection) -> None:
        """Record that the caller has done the handshake.

        Of hosts with as many pending connections, its host comes last.
        """
        with self._lock:
            self._drop(pending)
            _remember(self._verified, pending.host, None)

    def _drop(self, pending: PendingConnection) -> None:
        """Forget a connection, with the lock held. Safe twice."""
        waiting = self._waiting.get(pending.host, {})
        if pending in waiting:
            del waiting[pending]
            self._count -= 1
            if not waiting:
                del self._waiting[pending.host]

    def warn(self, host: str, message: str, *details: object) -> None:
        """Log a warning about a host, at most once a minute."""
        now = monotonic()
        with self._lock:
            last = self._warned.get(host)
            if last is not None and now - last < AGAIN:
                return
            _remember(self._warned, host, now)
        log.warning(message, *details)


def _remember(remembered: dict[str, V], host: str, value: V) -> None:
    """Add an entry as the newest, and drop the oldest of too many."""
    remembered.pop(host, None)
    remembered[host] = value
    if len(remembered) > REMEMBERED:
        del remembered[next(iter(remembered))]
