"""Leases in a store outside of the process."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from abc import abstractmethod

from dynamo_core.contracts.discovery import Lease

log = logging.getLogger(__name__)


def new_id() -> int:
    """An id for a lease: nobody else draws the same."""
    return secrets.randbelow(2**63 - 1) + 1


class OutsideLease(Lease):
    """What all of them have: an id, and `lost`, which any thread may tell. Made in the loop that waits for it."""

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
    def over(self) -> bool:
        """Whether it needs no heartbeats any more: closed or lost."""

    def tell_lost(self) -> None:
        """Sets `lost`, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._lost.set)
        except RuntimeError:
            # The loop has been closed, and with it everybody who could wait for this.
            log.debug("lease %016x was lost after its event loop had ended", self._id)


class BeatingLease(OutsideLease):
    """One whose heartbeats come from a `Keeper`'s thread; the other methods are called in the event loop."""

    def __init__(self, lease_id: int, ttl: float) -> None:
        """`ttl` in seconds."""
        super().__init__(lease_id, ttl)
        # What follows is touched with the lock held: by the keeper's thread, and by those that write.
        self._lock = threading.Lock()
        self._closed = False
        self._gone = False
        #: When the next heartbeat is due, on the keeper's clock.
        self.due = 0.0

    @property
    def over(self) -> bool:
        return self._closed or self._gone

    @abstractmethod
    def beat(self) -> None:
        """Renews the lease, or registers it again, and sets `due`. Raises nothing that can be foreseen."""
