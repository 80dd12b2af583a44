"""The maintainer of one lease and its records in a request-response store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from dynamo_core import jitter
from dynamo_core.errors import CannotConnect

from dynamo_leases.failures import LeaseFailureTracker, Refused

log = logging.getLogger(__name__)


class LeaseStore(Protocol):
    """A store that keeps leases. Every method raises `CannotConnect` if it cannot be asked, `Refused` if it says no."""

    async def grant(self, lease: int, ttl: float) -> None:
        """Make a lease; one that is there is fine. `ttl` in seconds."""
        ...

    async def keep_alive(self, lease: int) -> set[str] | None:
        """Renew a lease. The keys that it holds; None if it is gone."""
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease and remove its records; one that is gone is fine."""
        ...

    async def put(self, lease: int, key: str, value: bytes) -> bool:
        """Write a record, whichever lease held the key; False if there is no such lease."""
        ...

    async def reclaim(self, lease: int, key: str, value: bytes) -> bool:
        """Write a record that is missing; False if another lease has put the key meanwhile and keeps it."""
        ...

    async def remove(self, lease: int, key: str) -> None:
        """Remove a record if this lease holds it."""
        ...


class LeaseMaintainer:
    """Keeps one lease and its records in the store. Lives in one event loop. Times are in seconds.

    Each heartbeat repairs the store: it grants a lease that is gone again under its id, puts a record that is missing
    unless another lease has taken the key, and removes a record whose write was never confirmed.
    """

    def __init__(
        self,
        store: LeaseStore,
        lease: int,
        *,
        ttl: float,
        heartbeat: float,
        lost_after: float,
        on_lost: Callable[[], None],
    ) -> None:
        """`lost_after` is how long the store may refuse the lease; a store that is away does not count."""
        self._store = store
        self._id = lease
        self._ttl = ttl
        self._heartbeat = heartbeat
        self._on_lost = on_lost
        self._failures = LeaseFailureTracker(lease, lost_after)
        self._lock = asyncio.Lock()
        self._records: dict[str, bytes] = {}
        self._must_register = False
        self._closed = False
        self._lost = False

    async def register(self) -> None:
        """Make the lease."""
        async with self._lock:
            await self._register()

    async def put(self, key: str, value: bytes) -> None:
        """Write a record."""
        async with self._lock:
            if self._closed:
                raise ValueError("the lease is closed")
            if self._lost:
                raise CannotConnect("the lease is lost: it was refused for too long")
            if self._must_register:
                await self._register()
            if not await self._store.put(self._id, key, value):
                await self._register()
                if not await self._store.put(self._id, key, value):
                    raise CannotConnect("the store of discovery ends the lease at once")
            # The newest comes last: that is the order in which they are registered again.
            self._records.pop(key, None)
            self._records[key] = value

    async def remove(self, key: str) -> None:
        """Remove a record of this lease."""
        async with self._lock:
            # Forgotten first: if the request fails, the next heartbeat finds a record too many and removes it.
            if self._records.pop(key, None) is not None and not self._lost:
                await self._store.remove(self._id, key)

    async def close(self) -> None:
        """End the lease and its records."""
        self._closed = True
        async with self._lock:
            self._records.clear()
            await self._store.revoke(self._id)

    async def keep(self) -> None:
        """Keep the lease alive until it is closed or lost."""
        pause = self._heartbeat
        while not (self._closed or self._lost):
            await asyncio.sleep(pause)
            try:
                async with self._lock:
                    pause = await self._beat()
            except CannotConnect as error:
                self._failed(error)
                pause = self._soon()
            except Exception:
                # One wrong answer must not end the lease.
                log.exception("the heartbeat of lease %016x failed", self._id)
                pause = self._soon()

    async def _beat(self) -> float:
        """Renew the lease and repair its records. Return the seconds until the next heartbeat."""
        if self._closed:
            return 0.0
        if self._must_register:
            await self._register()
        elif (held := await self._store.keep_alive(self._id)) is None:
            # All processes notice at about the same time, and register again spread over half a heartbeat.
            log.warning("lease %016x is not in the store any more; it registers again", self._id)
            self._must_register = True
            return self._soon()
        else:
            await self._repair(held)
        self._failures.succeeded()
        return self._heartbeat

    async def _register(self) -> None:
        self._must_register = True
        await self._store.grant(self._id, self._ttl)
        await self._repair(set())
        self._must_register = False

    async def _repair(self, held: set[str]) -> None:
        for key in held - self._records.keys():
            await self._store.remove(self._id, key)
        for key, value in [item for item in self._records.items() if item[0] not in held]:
            if not await self._store.reclaim(self._id, key, value):
                log.warning("lease %016x gives up the record %r: another process has put it", self._id, key)
                del self._records[key]

    def _failed(self, error: CannotConnect) -> None:
        if self._failures.failed(error, time.monotonic(), counts=isinstance(error, Refused)):
            self._lost = True
            self._records.clear()
            self._on_lost()

    def _soon(self) -> float:
        return jitter(self._heartbeat, 0.05, 0.5)
