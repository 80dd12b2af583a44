"""What one lease holds in the store, and how it is kept there."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from dynamo_core.errors import CannotConnect

from dynamo_plugin_discovery_etcd.errors import NOT_FOUND, Refused, Status
from dynamo_plugin_discovery_etcd.store import Store

log = logging.getLogger(__name__)


class Holding:
    """Lives in the plugin's own event loop, one step at a time. Times are in seconds.

    What the store has is mended at each heartbeat: a lease that is gone is granted again under its id, a record that is
    missing is put again unless somebody else has taken its key, and one that was never confirmed is taken back.
    """

    def __init__(
        self,
        store: Store,
        lease: int,
        *,
        ttl: float,
        heartbeat: float,
        lost_after: float,
        on_lost: Callable[[], None],
    ) -> None:
        self._store = store
        self._id = lease
        self._ttl = ttl
        self._heartbeat = heartbeat
        self._lost_after = lost_after
        self._on_lost = on_lost
        self._lock = asyncio.Lock()
        self._records: dict[str, bytes] = {}
        self._must_register = False
        self._failing = False
        self._refused_since: float | None = None
        self._closed = False
        self._lost = False

    async def register(self) -> None:
        """Makes the lease."""
        async with self._lock:
            await self._register()

    async def put(self, key: str, value: bytes) -> None:
        """Writes a record."""
        async with self._lock:
            if self._closed:
                raise ValueError("the lease is closed")
            if self._lost:
                raise CannotConnect("the lease is lost: the cluster refused it for too long")
            if self._must_register:
                await self._register()
            if not await self._store.put(self._id, key, value):
                await self._register()
                if not await self._store.put(self._id, key, value):
                    raise CannotConnect("etcd ends the lease at once")
            # The newest comes last: that is the order in which they are registered again.
            self._records.pop(key, None)
            self._records[key] = value

    async def remove(self, key: str) -> None:
        """Removes a record of this lease."""
        async with self._lock:
            # Forgotten first: should this fail, the next heartbeat finds a record too many, and removes it.
            if self._records.pop(key, None) is not None and not self._lost:
                await self._store.remove(self._id, key)

    async def close(self) -> None:
        """Ends the lease and its records."""
        self._closed = True
        async with self._lock:
            self._records.clear()
            await self._store.revoke(self._id)

    async def keep(self) -> None:
        """Keeps the lease alive until it is closed or lost."""
        pause = self._heartbeat
        while not (self._closed or self._lost):
            await asyncio.sleep(pause)
            try:
                async with self._lock:
                    pause = await self._beat()
            except CannotConnect as error:
                self._failed(error)
                pause = self._spread()
            except Exception:
                # One wrong answer must not end it.
                log.exception("the heartbeat of lease %x failed", self._id)
                pause = self._spread()

    async def _beat(self) -> float:
        """Renews and mends; when to come again."""
        if self._closed:
            return 0.0
        if self._must_register:
            await self._register()
        elif (held := await self._store.keep_alive(self._id)) is None:
            # All processes notice at about the same time; they come back spread over half a heartbeat.
            log.warning("lease %x is not in etcd any more; it registers again", self._id)
            self._must_register = True
            return self._spread()
        else:
            await self._mend(held)
        if self._failing:
            log.info("lease %x is kept alive again", self._id)
        self._failing, self._refused_since = False, None
        return self._heartbeat

    async def _register(self) -> None:
        self._must_register = True
        await self._store.grant(self._id, self._ttl)
        await self._mend(set())
        self._must_register = False

    async def _mend(self, held: set[str]) -> None:
        for key in held - self._records.keys():
            await self._store.remove(self._id, key)
        for key, value in [item for item in self._records.items() if item[0] not in held]:
            try:
                written = await self._store.reclaim(self._id, key, value)
            except Status as error:
                if error.code != NOT_FOUND:
                    raise CannotConnect(f"etcd does not keep {key!r}: {error}", cause=error) from error
                raise CannotConnect("etcd has ended the lease meanwhile", cause=error) from error
            if not written:
                log.warning("lease %x gives up the record %r: somebody else has put it", self._id, key)
                del self._records[key]

    def _failed(self, error: CannotConnect) -> None:
        now = time.monotonic()
        if not self._failing:
            log.warning("lease %x cannot be kept alive: %s", self._id, error)
        self._failing = True
        if not isinstance(error, Refused):
            # A cluster that is away may come back at any time, and frontends go on over what they have seen.
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        elif now - self._refused_since > self._lost_after:
            log.error("lease %x is lost: %s", self._id, error)
            self._lost = True
            self._records.clear()
            self._on_lost()

    def _spread(self) -> float:
        # No cryptography: it only spreads the processes over the time.
        return self._heartbeat * (0.05 + 0.45 * random.random())  # noqa: S311
