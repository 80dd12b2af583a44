"""A directory in memory: leases never expire by themselves, since their holders live in the same process."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from typing import ClassVar

from dynamo_core import MAX_VALUE, Discovery, Lease, MetricsScope, PluginConfig, WatchEvent, WatchKind


class MemoryDiscovery(Discovery):
    """Discovery for one process. Workers and clients must be given the same object."""

    NAME = "memory"
    CROSS_PROCESS: ClassVar[bool] = False

    def __init__(self, config: PluginConfig, metrics: MetricsScope) -> None:
        super().__init__(config, metrics)
        self._records: dict[str, bytes] = {}
        self._watchers: set[_Watcher] = set()
        self._leases: dict[int, _MemoryLease] = {}

    async def lease(self, ttl: float | None = None) -> Lease:
        lease_id = 0
        while lease_id == 0 or lease_id in self._leases:
            lease_id = self.draw_id()
        lease = self._leases[lease_id] = _MemoryLease(self, lease_id)
        return lease

    def draw_id(self) -> int:
        """Return a number for a lease, which may be taken."""
        return secrets.randbits(63)

    async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
        watcher = _Watcher(prefix)
        self._watchers.add(watcher)
        try:
            snapshot = [item for item in self._records.items() if item[0].startswith(prefix)]
            for key, value in snapshot:
                yield WatchEvent(WatchKind.PUT, key, value)
            yield WatchEvent(WatchKind.SYNCED)
            while (changes := await watcher.changes()) is not None:
                for event in changes:
                    yield event
        finally:
            self._watchers.discard(watcher)

    async def put_value(self, key: str, value: bytes | None) -> None:
        if value is None:
            self.delete(key)
        else:
            self.put(key, value)

    async def aclose(self) -> None:
        for lease in list(self._leases.values()):
            await lease.aclose()
        for watcher in self._watchers:
            watcher.end()

    def put(self, key: str, value: bytes) -> None:
        """Write a record and tell the watchers."""
        if len(value) > MAX_VALUE:
            raise ValueError(f"the value of {key!r} has {len(value)} bytes, more than {MAX_VALUE}")
        self._records[key] = value
        self._notify(WatchEvent(WatchKind.PUT, key, value))

    def delete(self, key: str) -> None:
        """Remove a record, if it is there, and tell the watchers."""
        if self._records.pop(key, None) is not None:
            self._notify(WatchEvent(WatchKind.DELETE, key))

    def ended(self, lease_id: int) -> None:
        """Forget a lease that has been closed."""
        self._leases.pop(lease_id, None)

    def _notify(self, event: WatchEvent) -> None:
        for watcher in self._watchers:
            watcher.offer(event)


class _MemoryLease(Lease):
    def __init__(self, directory: MemoryDiscovery, lease_id: int) -> None:
        self._directory = directory
        self._id = lease_id
        self._keys: set[str] = set()
        self._lost = asyncio.Event()
        self._closed = False

    @property
    def id(self) -> int:
        return self._id

    @property
    def lost(self) -> asyncio.Event:
        return self._lost

    async def put(self, key: str, value: bytes) -> None:
        if self._closed:
            raise ValueError("the lease is closed")
        self._directory.put(key, value)
        self._keys.add(key)

    async def remove(self, key: str) -> None:
        if key in self._keys:
            self._keys.discard(key)
            self._directory.delete(key)

    async def aclose(self) -> None:
        self._closed = True
        while self._keys:
            self._directory.delete(self._keys.pop())
        self._directory.ended(self._id)


class _Watcher:
    """Changes that wait for one watch: the newest per key, so that a slow reader holds no more than the view."""

    __slots__ = ("_ended", "_pending", "_prefix", "_waiter")

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._pending: dict[str, WatchEvent] = {}
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def offer(self, event: WatchEvent) -> None:
        if not event.key.startswith(self._prefix):
            return
        self._pending.pop(event.key, None)
        self._pending[event.key] = event
        self._wake()

    def end(self) -> None:
        """End the watch once it has told what is pending."""
        self._ended = True
        self._wake()

    async def changes(self) -> list[WatchEvent] | None:
        """Return what has changed; wait for a change. None when the directory is closed."""
        while not self._pending:
            if self._ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        changes = list(self._pending.values())
        self._pending.clear()
        return changes

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
