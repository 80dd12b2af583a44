"""A lease in the store, and the records that live with it."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from dynamo_core.contracts.discovery import MAX_VALUE, Lease
from dynamo_core.errors import CannotConnect

from dynamo_plugin_discovery_redis.connect import Refused
from dynamo_plugin_discovery_redis.store import Store

log = logging.getLogger(__name__)

#: The longest key, in bytes of UTF-8.
MAX_KEY = 1024

#: Runs something that blocks in a thread of discovery's own.
InThread = Callable[[Callable[[], None]], Coroutine[Any, Any, None]]


def check(key: str, value: bytes) -> None:
    """Refuses what cannot be a record.

    Raises:
        ValueError: the key is empty or too long, or the value is too large.
    """
    if not key:
        raise ValueError("a key must not be empty")
    if len(key.encode()) > MAX_KEY:
        raise ValueError(f"the key {key[:40]!r}… is longer than {MAX_KEY} bytes")
    if len(value) > MAX_VALUE:
        raise ValueError(f"the value of {key!r} has {len(value)} bytes, more than {MAX_VALUE}")


class RedisLease(Lease):
    """Made by `RedisDiscovery.lease`. `beat` is called by the `Keeper`'s thread, the rest in the event loop."""

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
        self._store = store
        self._id = lease_id
        self._ttl = ttl
        self._heartbeat = heartbeat
        self._in_thread = in_thread
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._lost = asyncio.Event()
        # Everything below is touched with the lock held: by the keeper's thread, and by worker threads.
        self._lock = threading.Lock()
        self._records: dict[str, bytes] = {}
        self._closed = False
        self._gone = False
        self._must_register = False
        self._failing = False
        self._refused_since: float | None = None
        #: When the next heartbeat is due, on the clock that only counts.
        self.due = 0.0

    @property
    def id(self) -> int:
        return self._id

    @property
    def lost(self) -> asyncio.Event:
        return self._lost

    @property
    def over(self) -> bool:
        """Whether it needs no heartbeats any more: closed or lost."""
        return self._closed or self._gone

    async def put(self, key: str, value: bytes) -> None:
        check(key, value)
        await self._in_thread(lambda: self._put(key, value))
        self._on_change()

    async def remove(self, key: str) -> None:
        await self._in_thread(lambda: self._remove(key))
        self._on_change()

    async def aclose(self) -> None:
        if self.over:
            self._closed = True
            return
        try:
            await self._in_thread(self._close)
        except CannotConnect as error:
            log.warning("lease %x expires: %s", self._id, error)
        self._on_change()

    # In threads.

    def register(self) -> None:
        """Writes the lease and all its records anew.

        Raises:
            CannotConnect: that was not possible.
        """
        with self._lock:
            self._register()
            self.due = time.monotonic() + self._heartbeat

    def beat(self) -> None:
        """Renews the lease, and registers again if the lease or a record of it is gone."""
        now = time.monotonic()
        with self._lock:
            if self.over:
                return
            try:
                if self._must_register:
                    self._register()
                elif not self._store.beat(self._id, self._ttl, len(self._records)):
                    # All processes notice at about the same time; they come back spread over half a heartbeat.
                    log.warning("lease %x is not in the store any more; it registers again", self._id)
                    self._must_register = True
                    self.due = now + self._spread()
                    return
            except CannotConnect as error:
                self._failed(error, now)
                return
            if self._failing:
                log.info("lease %x is kept alive again", self._id)
            self._failing, self._refused_since = False, None
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
            if self._records.pop(key, None) is not None and not self.over:
                self._store.remove(self._id, key)

    def _close(self) -> None:
        with self._lock:
            if self.over:
                return
            self._closed = True
            self._records.clear()
            self._store.close_lease(self._id, self._ttl)

    def _register(self, more: dict[str, bytes] | None = None) -> None:
        self._store.register(self._id, self._ttl, self._records | (more or {}))
        self._must_register = False

    def _failed(self, error: CannotConnect, now: float) -> None:
        if not self._failing:
            log.warning("lease %x cannot be kept alive: %s", self._id, error)
        self._failing = True
        self.due = now + self._spread()
        if not isinstance(error, Refused):
            # A server that is away may come back at any time, and frontends go on over what they have seen.
            self._refused_since = None
            return
        if self._refused_since is None:
            self._refused_since = now
        elif now - self._refused_since > self._store.config.lost_after:
            log.error("lease %x is lost: %s", self._id, error)
            self._gone = True
            self._records.clear()
            self._tell_lost()

    def _spread(self) -> float:
        # No cryptography: it only spreads the processes over the time.
        return self._heartbeat * (0.05 + 0.45 * random.random())  # noqa: S311

    def _tell_lost(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._lost.set)
        except RuntimeError:
            # The loop has been closed, and with it everybody who could wait for this.
            log.debug("lease %x was lost after its event loop had ended", self._id)
