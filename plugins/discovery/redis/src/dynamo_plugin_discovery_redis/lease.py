"""A lease in the store, and the records that live with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from dynamo_core import jitter
from dynamo_core.errors import CannotConnect
from dynamo_leases import HeartbeatLease, LeaseFailureTracker, check_record
from dynamo_redis import RedisFailure

from dynamo_plugin_discovery_redis.store import Store

log = logging.getLogger(__name__)

#: Runs something that blocks in a thread of discovery's own.
InThread = Callable[[Callable[[], None]], Coroutine[Any, Any, None]]


class RedisLease(HeartbeatLease):
    """Made by `RedisDiscovery.lease`. The `HeartbeatThread` calls `beat`, the event loop the rest."""

    def __init__(
        self,
        store: Store,
        lease_id: int,
        *,
        ttl: float,
        heartbeat: float,
        in_thread: InThread,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__(lease_id, ttl)
        self._store = store
        self._heartbeat = heartbeat
        self._in_thread = in_thread
        self._on_change = on_change
        self._failures = LeaseFailureTracker(lease_id, store.config.lost_after)
        self._records: dict[str, bytes] = {}
        self._must_register = False

    async def put(self, key: str, value: bytes) -> None:
        check_record(key, value)
        await self._in_thread(lambda: self._put(key, value))
        self._on_change()

    async def remove(self, key: str) -> None:
        await self._in_thread(lambda: self._remove(key))
        self._on_change()

    async def aclose(self) -> None:
        if self.ended:
            self._closed = True
            return
        try:
            await self._in_thread(self._close)
        except CannotConnect as error:
            log.warning("lease %016x expires: %s", self._id, error)
        self._on_change()

    # In threads.

    def register(self) -> None:
        """Write the lease and all its records anew.

        Raises:
            CannotConnect: that was not possible.
        """
        with self._lock:
            self._register()
            self.due = time.monotonic() + self._heartbeat

    def beat(self) -> None:
        """Renew the lease, and register again if the lease or a record of it is gone."""
        now = time.monotonic()
        with self._lock:
            if self.ended:
                return
            try:
                if self._must_register:
                    self._register()
                elif not self._store.beat(self._id, self._ttl, len(self._records)):
                    # All processes notice at about the same time; they come back spread over half a heartbeat.
                    log.warning("lease %016x is not in the store any more; it registers again", self._id)
                    self._must_register = True
                    self.due = now + self._spread()
                    return
            except CannotConnect as error:
                self._failed(error, now)
                return
            self._failures.succeeded()
            self.due = now + self._heartbeat

    def _put(self, key: str, value: bytes) -> None:
        with self._lock:
            if self._closed:
                raise ValueError("the lease is closed")
            if self._gone:
                raise CannotConnect("the lease is lost: the server refused it for too long")
            if self._must_register or not self._store.put(self._id, key, value):
                self._register({key: value})
            # The newest comes last: that is the order in which they are registered again.
            self._records.pop(key, None)
            self._records[key] = value

    def _remove(self, key: str) -> None:
        with self._lock:
            # Forgotten first: should this fail, the next heartbeat finds a record too many, and mends that.
            if self._records.pop(key, None) is not None and not self.ended:
                self._store.remove(self._id, key)

    def _close(self) -> None:
        with self._lock:
            if self.ended:
                return
            self._closed = True
            self._records.clear()
            self._store.close_lease(self._id, self._ttl)

    def _register(self, more: dict[str, bytes] | None = None) -> None:
        self._store.register(self._id, self._ttl, self._records | (more or {}))
        self._must_register = False

    def _failed(self, error: CannotConnect, now: float) -> None:
        self.due = now + self._spread()
        if self._failures.failed(error, now, counts=isinstance(error, RedisFailure) and error.refused):
            self._gone = True
            self._records.clear()
            self.mark_lost()

    def _spread(self) -> float:
        return jitter(self._heartbeat, 0.05, 0.5)
