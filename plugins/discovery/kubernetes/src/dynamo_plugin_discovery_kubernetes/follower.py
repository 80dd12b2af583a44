"""Follows the leases and records for all watches of a process: a listing, two watches, and expiry."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from dynamo_core import TaskSet, jitter
from dynamo_core.errors import CannotConnect
from dynamo_leases import Follower, Json, OnChange, StreamEnded

from dynamo_plugin_discovery_kubernetes.client import Events
from dynamo_plugin_discovery_kubernetes.errors import Status
from dynamo_plugin_discovery_kubernetes.objects import (
    LeaseFact,
    lease_fact,
    lease_number,
    record_fact,
    version,
)
from dynamo_plugin_discovery_kubernetes.store import Store
from dynamo_plugin_discovery_kubernetes.view import View

log = logging.getLogger(__name__)

#: The part of the ttl for which the leases may be silent before the follower asks for them.
SILENT = 0.5


class Relist(Exception):
    """The changes cannot be followed any further; says why."""


class KubernetesFollower(Follower):
    """Lives in the plugin's own event loop. Times are in seconds."""

    def __init__(self, store: Store, *, ttl: float, poll: float, watch_timeout: float, on_change: OnChange) -> None:
        self._store = store
        self._ttl = ttl
        self._watch_timeout = watch_timeout
        self._view = View(ttl)
        super().__init__(self._view, poll=poll, on_change=on_change)
        self._listing = asyncio.Lock()
        #: When a watch last told of a lease.
        self._heard_at = 0.0

    async def _list(self) -> None:
        # One after the other, so that an older one never follows a newer one.
        async with self._listing:
            asked_at = self._view.lease_version, self._view.record_version
            # The leases last: a record whose lease has just been made is not taken for one without.
            newest_record, records = await self._store.listing(self._store.objects.records)
            newest_lease, leases = await self._store.listing(self._store.objects.leases)
            found = [fact for item in records if (fact := record_fact(item)) is not None]
            events = self._view.listed(
                (newest_lease, _leases(leases)), (newest_record, found), asked_at, time.monotonic(), time.time()
            )
            self._report(events)

    async def _follow_changes(self) -> None:
        self._heard_at = time.monotonic()
        objects = self._store.objects
        over: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        # No task group: in Python 3.11 one that fails leaves the task around it marked as cancelled.
        tasks = TaskSet()
        for name, work in (
            ("leases", partial(self._keep_watching, objects.leases, self._view_of_leases, self._take_leases)),
            ("records", partial(self._keep_watching, objects.records, self._view_of_records, self._take_records)),
            ("check", self._keep_checking),
        ):
            tasks.spawn(_until_it_fails(work, over), name=f"discovery-{name}")
        try:
            error = await over
        finally:
            await tasks.aclose()
        if isinstance(error, Relist | CannotConnect):
            # Whether the store is away, the next listing tells.
            log.info("discovery reads everything anew: %s", error)
        else:
            log.error("the changes of discovery could not be followed", exc_info=error)

    async def _keep_watching(self, path: str, newest: Callable[[], int], take: Callable[[list[Json]], None]) -> None:
        """Watch one collection, again and again from where it was left off."""
        while True:
            begun = time.monotonic()
            # Not all watches of all processes end together.
            seconds = jitter(self._watch_timeout, 0.75, 1)
            try:
                async with self._store.changes(path, newest(), seconds) as events:
                    await self._read(events, take, begun + seconds + self._poll)
            except StreamEnded as error:
                log.debug("a watch is opened again: %s", error)
            except Status as error:
                raise Relist(f"the changes since version {newest()} are forgotten: {error}") from error
            lived = time.monotonic() - begun
            await asyncio.sleep(jitter(self._poll, 0.1, 0.5) if lived < self._poll else 0)

    async def _read(self, events: Events, take: Callable[[list[Json]], None], until: float) -> None:
        clock = asyncio.get_running_loop()
        try:
            # The server should have ended it by then.
            async with asyncio.timeout_at(clock.time() + until - time.monotonic()):
                while True:
                    take(await events.read())
        except TimeoutError:
            return

    def _view_of_leases(self) -> int:
        return self._view.lease_version

    def _view_of_records(self) -> int:
        return self._view.record_version

    def _take_leases(self, events: list[Json]) -> None:
        if not events:
            return
        now, wall = time.monotonic(), time.time()
        self._heard_at = now
        for event in events:
            item = event["object"]
            if event["type"] == "BOOKMARK":
                self._view.lease_version = max(self._view.lease_version, version(item))
            elif (number := lease_number(item)) is not None:
                fact = None if event["type"] == "DELETED" else lease_fact(item)
                self._view.lease_changed(version(item), number, fact, now, wall)
        self._report(self._view.settle())

    def _take_records(self, events: list[Json]) -> None:
        if not events:
            return
        now = time.monotonic()
        for event in events:
            item = event["object"]
            if event["type"] == "BOOKMARK":
                self._view.record_version = max(self._view.record_version, version(item))
            else:
                fact = None if event["type"] == "DELETED" else record_fact(item)
                self._view.record_changed(version(item), item["metadata"]["name"], fact, now)
        self._report(self._view.settle())

    async def _keep_checking(self) -> None:
        """Ask for leases that are silent: a dead process says nothing, and neither does a dead watch."""
        while True:
            await asyncio.sleep(self._poll)
            now = time.monotonic()
            silent = now - self._heard_at >= SILENT * self._ttl
            if silent or self._view.doubts(now):
                await self._ask_for_leases(silent)
            self._report(self._view.tick(time.monotonic()))
            for lease in self._view.left_behind(time.monotonic()):
                # All processes see it at the same time; one is enough.
                if jitter(1, 0, 1) < self._poll / self._ttl:
                    await self._clear_away(lease)

    async def _clear_away(self, lease: LeaseFact) -> None:
        try:
            await self._store.clear_away(lease)
        except CannotConnect as error:
            # Others may.
            log.debug("what lease %016x has left cannot be removed: %s", lease.number, error)

    async def _ask_for_leases(self, silent: bool) -> None:
        async with self._listing:
            newest, items = await self._store.listing(self._store.objects.leases)
            leases = _leases(items)
            unheard = self._view.behind(leases)
            self._report(self._view.leases_listed(newest, leases, time.monotonic(), time.time()))
        if silent and unheard:
            raise Relist("the watch does not bring the changes")
        if silent:
            # No lease has changed, and the server is there.
            self._heard_at = time.monotonic()


def _leases(items: list[Json]) -> list[LeaseFact]:
    return [fact for item in items if (fact := lease_fact(item)) is not None]


async def _until_it_fails(work: Callable[[], Awaitable[None]], over: asyncio.Future[Exception]) -> None:
    try:
        await work()
    except Exception as error:
        if not over.done():
            over.set_result(error)
