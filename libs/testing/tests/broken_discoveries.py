"""Directories that break one promise each, and what of the kit must find it.

Not collected with the other tests: `test_kits_on_broken_parts` runs this file and compares.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from dynamo_core import MAX_VALUE, PluginConfig, TaskSet, WatchEvent, WatchKind
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_telemetry import Metrics
from dynamo_testing.discovery_kit import Directories, DiscoveryKit

from libs.testing.tests.planted import Planted, first, items, made, maps, nothing, put, then


class Store(MemoryDiscovery):
    """A directory without a fault."""

    def __init__(self) -> None:
        super().__init__(PluginConfig(), Metrics())


class Broken(Planted, DiscoveryKit):
    """The kit over one directory."""

    PART = Store
    #: The seconds that a check waits which must fail, and any other.
    PATIENCE = (0.2, 10.0)

    @pytest.fixture
    async def directories(self) -> AsyncIterator[Directories]:
        store = self.PART()
        yield Directories(one=store, other=store)
        await store.aclose()


class TestWithoutAFault(Broken):
    pass


def of(kind: WatchKind, seen: list[WatchEvent]) -> list[WatchEvent]:
    """Return the events of a kind."""
    return [event for event in seen if event.kind is kind]


TestSaysOfALeaseThatItLivesForAnotherTime = Broken.failing(
    "test_a_lease_reports_its_ttl_or_none", lease=made(ttl=property(lambda self: 5.0))
)
TestSaysTwiceThatTheSnapshotIsComplete = Broken.failing(
    "test_the_end_of_the_snapshot_is_reported_once",
    watch=items(
        lambda seen, event: (
            [WatchEvent(WatchKind.SYNCED), event]
            if of(WatchKind.SYNCED, seen) and event.kind is WatchKind.PUT
            else [event]
        )
    ),
)


async def forget_changes_during_the_snapshot(real: Any, self: Any, prefix: str) -> AsyncGenerator[WatchEvent, None]:
    for key, value in dict(self._records).items():
        if key.startswith(prefix):
            yield WatchEvent(WatchKind.PUT, key, value)
    yield WatchEvent(WatchKind.SYNCED)
    async with aclosing(real(prefix)) as events:
        async for event in events:
            if event.kind is WatchKind.SYNCED:
                break
        async for event in events:
            yield event


# A change between the snapshot and the first look at changes is lost.
TestForgetsChangesDuringTheSnapshot = Broken.failing(
    "test_changes_of_one_client_are_seen_by_the_other_and_by_itself",
    "test_a_watch_reports_only_keys_with_its_prefix",
    "test_a_new_value_takes_the_place_of_the_old",
    "test_the_end_of_the_snapshot_is_reported_once",
    "test_the_records_of_a_closed_lease_vanish",
    "test_a_removed_record_vanishes",
    "test_any_client_can_remove_a_value_without_a_lease",
    "test_a_watch_that_is_not_read_does_not_hold_up_the_writers",
    "test_closing_a_watch_leaves_the_others_alone",
    "test_the_events_of_a_watch_add_up_to_the_store",
    # These put a mark at once, to know when they have been told everything.
    "test_a_value_without_a_lease_outlives_its_writer",
    "test_a_closed_lease_leaves_nothing_behind_of_a_late_put",
    "test_a_stranger_cannot_remove_a_record",
    "test_closing_a_lease_leaves_the_records_of_others",
    watch=forget_changes_during_the_snapshot,
)
TestTellsANewValueAsGoneAndBack = Broken.failing(
    "test_a_new_value_takes_the_place_of_the_old",
    watch=items(
        lambda seen, event: (
            [WatchEvent(WatchKind.DELETE, event.key), event]
            if [one.kind for one in seen if one.key == event.key][-1:] == [WatchKind.PUT] == [event.kind]
            else [event]
        )
    ),
)
TestIgnoresThePrefix = Broken.failing(
    "test_a_watch_reports_only_keys_with_its_prefix",
    "test_the_events_of_a_watch_add_up_to_the_store",
    watch=maps(lambda prefix: ""),
)
TestDoesNotTellOfNewValues = Broken.failing(
    "test_a_new_value_takes_the_place_of_the_old",
    "test_a_watch_that_is_not_read_does_not_hold_up_the_writers",
    "test_the_events_of_a_watch_add_up_to_the_store",
    put=lambda real, self, key, value: self._records.update({key: value}) if key in self._records else real(key, value),
)
TestKeepsTheRecordsOfClosedLeases = Broken.failing(
    "test_the_records_of_a_closed_lease_vanish",
    "test_the_events_of_a_watch_add_up_to_the_store",
    lease=made(aclose=lambda real, self: nothing(put(self.inner, _closed=True))),
)


def remove_too_much(real: Any, self: Any, lease_id: int) -> None:
    real(lease_id)
    for key in [key for key in self._records if not key.endswith("/threshold")]:
        self.delete(key)


TestRemovesTooMuchWithALease = Broken.failing(
    "test_closing_a_lease_leaves_the_records_of_others",
    "test_the_events_of_a_watch_add_up_to_the_store",
    ended=remove_too_much,
)
TestLetsStrangersRemoveRecords = Broken.failing(
    "test_a_stranger_cannot_remove_a_record",
    "test_the_events_of_a_watch_add_up_to_the_store",
    lease=made(remove=lambda real, self, key: nothing(self.owner.delete(key))),
)
TestTakesRecordsUnderAClosedLease = Broken.failing(
    "test_a_closed_lease_leaves_nothing_behind_of_a_late_put",
    lease=made(put=lambda real, self, key, value: nothing(self.owner.put(key, value), self._keys.add(key))),
)
TestHasNoLimit = Broken.failing(
    "test_a_record_of_the_largest_size_is_kept_and_a_larger_one_refused",
    "test_a_value_that_is_too_large_is_refused",
    put=lambda real, self, key, value: (
        self._records.update({key: value}),
        self._notify(WatchEvent(WatchKind.PUT, key, value)),
    ),
)
TestHasTooLowALimit = Broken.failing(
    "test_a_record_of_the_largest_size_is_kept_and_a_larger_one_refused",
    "test_a_value_that_is_too_large_is_refused",
    put=lambda real, self, key, value: real(key, value if len(value) <= 60_000 else bytes(MAX_VALUE + 1)),
)
TestGivesTheSameIdTwice = Broken.failing(
    "test_ids_of_live_leases_differ_and_fit_63_bits", lease=made(id=property(lambda self: 1 + self._id % 30))
)
TestTiesValuesToALease = Broken.failing(
    "test_a_value_without_a_lease_outlives_its_writer",
    "test_the_events_of_a_watch_add_up_to_the_store",
    put_value=then(lambda self, key, value: [lease._keys.add(key) for lease in self._leases.values()]),
)
TestRewritesKeys = Broken.failing(
    "test_keys_and_values_may_hold_any_characters",
    put=lambda real, self, key, value: real(key.replace("//", "/"), value),
)


async def close_leases(store: Any) -> None:
    for lease in list(store._leases.values()):
        await lease.aclose()


TestKeepsWatchesAfterClosing = Broken.failing(
    "test_closing_the_client_ends_its_watches", aclose=lambda real, self: close_leases(self)
)


async def end_all_watches(real: Any, self: Any, prefix: str) -> AsyncGenerator[WatchEvent, None]:
    try:
        async with aclosing(real(prefix)) as events:
            async for event in events:
                yield event
    finally:
        self._watchers.clear()


TestEndsAllWatchesWithOne = Broken.failing("test_closing_a_watch_leaves_the_others_alone", watch=end_all_watches)
TestLeavesTasksBehind = Broken.failing(
    "test_clients_can_be_closed_twice_and_leave_no_task_behind",
    lease=first(lambda self, ttl=None: bool(TaskSet().spawn(asyncio.sleep(60), name="forgotten"))),
)


async def put_later(real: Any, self: Any, key: str, value: bytes) -> None:
    if self.ttl is not None or self._closed or len(value) > MAX_VALUE:
        await real(key, value)
    else:
        asyncio.get_running_loop().call_later(0.1, self.owner.put, key, value)
        self._keys.add(key)


TestPutsLater = Broken.failing(
    "test_a_record_is_there_once_put_has_returned",
    "test_a_stranger_cannot_remove_a_record",
    "test_closing_a_lease_leaves_the_records_of_others",
    "test_the_events_of_a_watch_add_up_to_the_store",
    lease=made(put=put_later),
)
TestRepeatsTheSnapshot = Broken.failing(
    "test_a_watch_begins_with_a_snapshot_and_its_end_mark",
    watch=items(
        lambda seen, event: [event] * (1 if of(WatchKind.SYNCED, [*seen, event]) else 2),
    ),
)


async def make_something_of_nothing(real: Any, self: Any, prefix: str) -> AsyncGenerator[WatchEvent, None]:
    if not self._records:
        yield WatchEvent(WatchKind.FRESH)
    async with aclosing(real(prefix)) as events:
        async for event in events:
            yield event


TestMakesSomethingOfNothing = Broken.failing(
    "test_an_empty_watch_reports_a_complete_snapshot", watch=make_something_of_nothing
)
TestInsistsOnWhatItRemoves = Broken.failing(
    "test_removing_a_missing_record_is_fine",
    "test_a_stranger_cannot_remove_a_record",
    "test_the_events_of_a_watch_add_up_to_the_store",
    lease=made(remove=first(lambda self, key: self.owner._records[key] if key in self._keys else {}[key])),
)


class Client(Store):
    """One of two clients of one store, whose leases can expire and whose store can be cut off."""

    def __init__(self, store: Store | None = None) -> None:
        super().__init__()
        self.others: list[MemoryDiscovery] = []
        if store is not None:
            self._records = store._records

    def _notify(self, event: WatchEvent) -> None:
        super()._notify(event)
        for other in self.others:
            MemoryDiscovery._notify(other, event)

    def announce(self, kind: WatchKind) -> None:
        """Tell all watches that the store is gone, or back."""
        for watcher in self._watchers:
            watcher.offer(WatchEvent(kind, f"{watcher._prefix}\0{kind.value}"))


class Remote(Broken):
    """The kit over two clients of one store."""

    CAN_KILL_OWNER = True
    CAN_CUT_STORE = True
    TTL = 0.05
    PART = Client

    @pytest.fixture
    async def directories(self) -> AsyncIterator[Directories]:
        one = self.PART()
        other = self.PART(one)
        one.others, other.others = [other], [one]
        yield Directories(one=one, other=other)
        await one.aclose()
        await other.aclose()

    async def kill_owner(self, directories: Directories) -> None:
        await close_leases(directories.one)

    async def cut_store(self, directories: Any) -> None:
        directories.one.announce(WatchKind.STALE)
        directories.other.announce(WatchKind.STALE)

    async def restore_store(self, directories: Any) -> None:
        directories.one.announce(WatchKind.FRESH)
        directories.other.announce(WatchKind.FRESH)


class TestTwoClients(Remote):
    pass


TestKeepsTheRecordsOfTheDead = Remote.failing(
    "test_the_records_of_a_dead_owner_vanish", kit={"kill_owner": lambda real, self, directories: nothing()}
)


async def expire(real: Any, self: Any, ttl: float | None = None) -> Any:
    lease = await real(ttl)
    if ttl is not None:
        asyncio.get_running_loop().call_later(ttl, lambda: [self.delete(lease._keys.pop()) for _ in set(lease._keys)])
    return lease


TestLetsLiveLeasesExpire = Remote.failing("test_a_live_lease_is_not_lost_and_outlives_its_ttl", lease=expire)
TestSaysNothingOfOutages = Remote.failing(
    "test_an_outage_keeps_the_view_and_marks_it_stale",
    "test_after_an_outage_leases_are_registered_and_usable",
    kit={"cut_store": lambda real, self, directories: nothing()},
)


def empty(kit: Any, directories: Any) -> None:
    kit.records = dict(directories.one._records)
    for key in kit.records:
        directories.one.delete(key)


TestEmptiesTheViewInAnOutage = Remote.failing(
    "test_an_outage_keeps_the_view_and_marks_it_stale",
    kit={
        "cut_store": first(empty),
        "restore_store": first(lambda self, both: [both.one.put(*record) for record in self.records.items()]),
    },
)
TestForgetsLeasesInAnOutage = Remote.failing(
    "test_after_an_outage_leases_are_registered_and_usable",
    kit={"restore_store": first(lambda self, directories: close_leases(directories.one))},
)
TestLeavesItsRecordsWhenClosed = Remote.failing(
    "test_closing_the_client_removes_the_records_of_its_leases", aclose=first(lambda self: self._leases.clear())
)
