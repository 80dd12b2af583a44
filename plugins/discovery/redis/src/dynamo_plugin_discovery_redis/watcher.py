"""What waits to be told to one watch."""

from __future__ import annotations

import asyncio

from dynamo_core.contracts.discovery import WatchEvent


class Watcher:
    """The newest change per key, so that a slow reader holds no more than the view."""

    __slots__ = ("_pending", "_prefix", "_waiter")

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._pending: dict[str, WatchEvent] = {}
        self._waiter: asyncio.Future[None] | None = None

    def offer(self, event: WatchEvent) -> None:
        """Takes a change, if it is for this watch."""
        # `STALE` and `FRESH` have no key, and are for every watch; no record has the empty key.
        if event.key and not event.key.startswith(self._prefix):
            return
        self._pending.pop(event.key, None)
        self._pending[event.key] = event
        self.wake()

    def wake(self) -> None:
        """Lets `changes` return, also without a change."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def changes(self) -> list[WatchEvent]:
        """What waits, at least one change unless the watch is woken to end."""
        if not self._pending:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        changes = list(self._pending.values())
        self._pending.clear()
        return changes
