"""Leases in an external store."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from abc import abstractmethod

from dynamo_core import Lease

log = logging.getLogger(__name__)


def new_lease_id() -> int:
    """Return a random id for a lease; two processes do not draw the same."""
    return secrets.randbelow(2**63 - 1) + 1


class StoreLease(Lease):
    """A lease with an id and `lost`, which any thread may set. Made in the event loop that waits for `lost`."""

    def __init__(self, lease_id: int, ttl: float) -> None:
        """`ttl` in seconds."""
        self._id = lease_id
        self._ttl = ttl
        self._loop = asyncio.get_running_loop()
        self._lost = asyncio.Event()

    @property
    def id(self) -> int:
        return self._id

    @property
    def lost(self) -> asyncio.Event:
        return self._lost

    @property
    def ttl(self) -> float:
        return self._ttl

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the lease needs no heartbeats any more: closed or lost."""

    def mark_lost(self) -> None:
        """Set `lost`, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._lost.set)
        except RuntimeError:
            # The loop has been closed, and with it all tasks that could wait for this.
            log.debug("lease %016x was lost after its event loop had ended", self._id)


class HeartbeatLease(StoreLease):
    """A lease whose heartbeats a `HeartbeatThread` sends; the other methods are called in the event loop."""

    def __init__(self, lease_id: int, ttl: float) -> None:
        """`ttl` in seconds."""
        super().__init__(lease_id, ttl)
        # Guards what follows: the heartbeat thread and the threads that write share it.
        self._lock = threading.Lock()
        self._closed = False
        self._gone = False
        #: When the next heartbeat is due, on the clock of the thread.
        self.due = 0.0

    @property
    def ended(self) -> bool:
        return self._closed or self._gone

    @abstractmethod
    def beat(self) -> None:
        """Renew the lease, or register it again, and set `due`. Raise no expected error."""
