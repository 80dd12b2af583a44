"""Follows the store for all watches of a process: a listing, the changes after it, and whether they still arrive."""

from __future__ import annotations

import asyncio
import logging
import time

from dynamo_core.errors import CannotConnect
from dynamo_leases import Follower, OnChange

from dynamo_plugin_discovery_etcd.client import Messages
from dynamo_plugin_discovery_etcd.errors import TokenExpired
from dynamo_plugin_discovery_etcd.store import Store
from dynamo_plugin_discovery_etcd.view import View
from dynamo_plugin_discovery_etcd.wire import Change, Json, Keys, number, record

log = logging.getLogger(__name__)


class Relist(Exception):
    """The changes cannot be followed any further; says why."""


class EtcdFollower(Follower):
    """Lives in the plugin's own event loop. Times are in seconds."""

    def __init__(self, store: Store, *, ttl: float, poll: float, timeout: float, on_change: OnChange) -> None:
        self._store = store
        self._timeout = timeout
        self._view = View(ttl)
        super().__init__(self._view, poll=poll, on_change=on_change)
        self._listing = asyncio.Lock()
        #: The view's revision when the store had something else than the view.
        self._suspected_at: int | None = None

    async def _list(self) -> None:
        # One after the other, so that an older one never follows a newer one.
        async with self._listing:
            asked_at = self._view.revision
            listing = await self._store.list()
            self._report(self._view.listed(listing, asked_at, time.monotonic()))

    async def _follow_changes(self) -> None:
        """Return when the changes cannot be followed any further."""
        try:
            await self._follow_stream()
        except Relist as reason:
            log.info("discovery reads everything anew: %s", reason)
        except CannotConnect as error:
            # Whether the store is away, the next listing tells: another member may serve.
            log.info("discovery reads everything anew: %s", error)
            self._view.broken()
        except Exception:
            log.exception("the changes of discovery could not be followed")
            self._view.broken()

    async def _follow_stream(self) -> None:
        self._suspected_at = None
        async with self._store.changes(self._view.revision + 1) as messages:
            try:
                async with asyncio.timeout(self._timeout):
                    created = await self._first(messages)
                self._take(created)
                await self._read(messages)
            except TokenExpired as error:
                self._store.client.forget_login()
                raise CannotConnect(f"etcd ends the watch: {error}", cause=error) from error
            except TimeoutError as error:
                raise CannotConnect(f"etcd at {messages.endpoint} does not open the watch", cause=error) from error

    async def _first(self, messages: Messages) -> list[Json]:
        while not (arrived := await messages.read()):
            continue
        return arrived

    async def _read(self, messages: Messages) -> None:
        clock = asyncio.get_running_loop()
        next_check = clock.time() + self._poll
        while True:
            try:
                async with asyncio.timeout_at(next_check):
                    arrived = await messages.read()
            except TimeoutError:
                arrived = []
            self._take(arrived)
            if clock.time() >= next_check:
                await self._check(messages)
                next_check = clock.time() + self._poll

    def _take(self, messages: list[Json]) -> None:
        changes: list[Change] = []
        for message in messages:
            if message.get("canceled", False):
                self._canceled(message)
            changes += [_change(self._store.keys, event) for event in message.get("events", ())]
        if changes:
            self._report(self._view.changed(changes, time.monotonic()))

    def _canceled(self, message: Json) -> None:
        if (compacted := number(message, "compact_revision")) > 0:
            raise Relist(f"the changes before revision {compacted} have been compacted")
        reason = message.get("cancel_reason", "no reason given")
        # A watch whose token is unknown is told the same as one without the permission.
        self._store.client.forget_login()
        raise CannotConnect(f"etcd has ended the watch: {reason}")

    async def _check(self, messages: Messages) -> None:
        """Check that the server is there and its changes still arrive: a stream of a dead connection is silent too."""
        newest, count = await self._store.newest()
        if self._store.client.endpoint != messages.endpoint:
            raise Relist(f"{messages.endpoint} does not serve")
        view = self._view
        if newest <= view.revision and count == view.count:
            self._suspected_at = None
        elif self._suspected_at == view.revision:
            raise Relist(f"{messages.endpoint} does not send the changes")
        else:
            # They may be on their way.
            self._suspected_at = view.revision
        self._report(view.tick(time.monotonic()))


def _change(keys: Keys, event: Json) -> Change:
    fields = event["kv"]
    gone = event.get("type") == "DELETE"
    return Change(keys.name(fields["key"]), number(fields, "mod_revision"), None if gone else record(fields))
