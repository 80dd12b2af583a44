"""Following a store: a listing, then its changes, again and again."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from dynamo_core import WatchEvent, WatchKind, jitter
from dynamo_core.errors import CannotConnect

log = logging.getLogger(__name__)

#: Called with the changes of a view, and whether the view is complete.
OnChange = Callable[[list[WatchEvent], bool], None]


class FollowedView(Protocol):
    """The view that a follower keeps."""

    #: Whether a listing has ever come.
    synced: bool

    def failed(self) -> list[WatchEvent]:
        """Return the changes for watches that follow when the store cannot be read."""
        ...


class Follower(ABC):
    """Keeps a view of the store, and reports its changes. Lives in one event loop. Times are in seconds."""

    def __init__(self, view: FollowedView, *, poll: float, on_change: OnChange) -> None:
        """`poll` bounds the pause between two attempts to read the store."""
        self._followed = view
        self._poll = poll
        self._on_change = on_change

    @abstractmethod
    async def _list(self) -> None:
        """Read everything into the view.

        Raises:
            CannotConnect: the store cannot be read.
        """

    @abstractmethod
    async def _follow_changes(self) -> None:
        """Follow the changes since the listing; return when that is no longer possible."""

    async def refresh(self) -> None:
        """Read everything once, so that the view has what was there before this call; keep the view if that fails."""
        try:
            await self._list()
        except CannotConnect as error:
            # `follow` meets the same failure, and reports it.
            log.debug("the store of discovery cannot be read: %s", error)

    async def follow(self) -> None:
        """Follow the store until it is cancelled."""
        while True:
            begun = time.monotonic()
            try:
                await self._list()
            except CannotConnect as error:
                self._failed(error)
            except Exception as error:
                # One bad record must not end the watches.
                log.exception("the store of discovery could not be read")
                self._failed(error)
            else:
                await self._follow_changes()
                if time.monotonic() - begun > self._poll:
                    continue
            await asyncio.sleep(jitter(self._poll, 0.25, 1))

    def _failed(self, error: Exception) -> None:
        events = self._followed.failed()
        if events:
            log.warning("discovery is stale, the last view is kept: %s", error)
        self._report(events)

    def _report(self, events: list[WatchEvent]) -> None:
        if any(event.kind is WatchKind.FRESH for event in events):
            log.info("discovery is current again")
        self._on_change(events, self._followed.synced)
