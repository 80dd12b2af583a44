"""The view of a store that all watches of a process share: a snapshot, then changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

from dynamo_core import WatchEvent, WatchKind
from dynamo_core.protocol import UnreadableWarner

from dynamo_leases.records import check_record

log = logging.getLogger(__name__)


class Fanout:
    """The view of one process, and the watches that receive its changes. For one event loop."""

    def __init__(self) -> None:
        #: Key to value, the newest last.
        self.records: dict[str, bytes] = {}
        #: Whether the store is away and the view may be old.
        self.stale = False
        self._left_out = UnreadableWarner(log, "record")
        self._closed = False
        self._watchers: set[_Watcher] = set()
        #: Set once there is a snapshot, or never will be.
        self._ready = asyncio.Event()

    def is_closed(self) -> bool:
        """Return whether `close` has been called."""
        return self._closed

    def publish(self, events: Iterable[WatchEvent], *, synced: bool) -> None:
        """Apply changes to the view; `synced` says whether it is complete, which it stays once it was."""
        for event in events:
            match event.kind:
                case WatchKind.PUT if not self._fits(event):
                    continue
                case WatchKind.PUT:
                    self.records.pop(event.key, None)
                    self.records[event.key] = event.value
                case WatchKind.DELETE:
                    self._left_out.readable(event.key)
                    self.records.pop(event.key, None)
                case kind:
                    self.stale = kind is WatchKind.STALE
            for watcher in self._watchers:
                watcher.offer(event)
        if synced:
            self._ready.set()

    def _fits(self, event: WatchEvent) -> bool:
        """Return whether a discovery could have put the record: other programs can write to the store too."""
        try:
            check_record(event.key, event.value)
        except ValueError as error:
            self._left_out.warn(event.key, error)
            return False
        return True

    async def watch(self, prefix: str, refresh: Callable[[], Awaitable[None]]) -> AsyncGenerator[WatchEvent, None]:
        """See `Discovery.watch`. `refresh` brings the view up to date with what was there when it is called.

        Before a store that cannot be read there is no snapshot: `STALE` until it can.
        """
        if self.is_closed():
            return
        await refresh()
        if not self._ready.is_set():
            yield WatchEvent(WatchKind.STALE)
            await self._ready.wait()
        if self.is_closed():
            return
        watcher = _Watcher(prefix)
        self._watchers.add(watcher)
        try:
            # Taken together with the registration, so that nothing falls between the two.
            snapshot = [item for item in self.records.items() if item[0].startswith(prefix)]
            stale = self.stale
            for key, value in snapshot:
                yield WatchEvent(WatchKind.PUT, key, value)
            yield WatchEvent(WatchKind.SYNCED)
            if stale:
                yield WatchEvent(WatchKind.STALE)
            while not self.is_closed():
                for event in await watcher.changes():
                    yield event
        finally:
            self._watchers.discard(watcher)

    def close(self) -> None:
        """End all watches. Safe twice."""
        self._closed = True
        self._ready.set()
        for watcher in self._watchers:
            watcher.wake()


class _Watcher:
    """The changes that one watch has not taken yet: the newest per key, so that it holds no more than the view."""

    __slots__ = ("_pending", "_prefix", "_waiter")

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._pending: dict[str, WatchEvent] = {}
        self._waiter: asyncio.Future[None] | None = None

    def offer(self, event: WatchEvent) -> None:
        """Take a change, if it is for this watch."""
        # `STALE` and `FRESH` have no key, and are for every watch; no record has the empty key.
        if event.key and not event.key.startswith(self._prefix):
            return
        self._pending.pop(event.key, None)
        self._pending[event.key] = event
        self.wake()

    def wake(self) -> None:
        """Let `changes` return, also without a change."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def changes(self) -> list[WatchEvent]:
        """Return what waits, at least one change unless the watch is woken to end."""
        if not self._pending:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        changes = list(self._pending.values())
        self._pending.clear()
        return changes
