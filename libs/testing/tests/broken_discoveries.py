"""Directories that break one promise each, and what of the kit must find it.

Not collected with the other tests: `test_the_kits_find_broken_parts` runs this file and compares.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, ClassVar

import pytest
from dynamo_core import MAX_VALUE, Lease, PluginConfig, TaskSet, WatchEvent, WatchKind
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_telemetry import Metrics
from dynamo_testing.discovery_kit import Directories, DiscoveryKit


class Store(MemoryDiscovery):
    """A directory without a fault."""

    def __init__(self) -> None:
        super().__init__(PluginConfig(), Metrics())


class Broken(DiscoveryKit):
    """The kit over one directory."""

    #: The directory under test.
    store: ClassVar[type[Store]] = Store
    #: The checks that must fail, and no others may.
    FAILS: ClassVar[frozenset[str]] = frozenset()
    #: The seconds that a check waits which must fail, and any other.
    PATIENCE = (0.2, 10.0)

    @pytest.fixture
    async def directories(self) -> AsyncIterator[Directories]:
        store = self.store()
        yield Directories(one=store, other=store)
        await store.aclose()


class TestWithoutAFault(Broken):
    pass


class TestSaysOfALeaseThatItLivesForAnotherTime(Broken):
    class store(Store):  # noqa: N801 - the part that is exchanged, as the attribute is named
        async def lease(self, ttl: float | None = None) -> Lease:
            made = await super().lease(ttl)

            class Short(type(made)):  # type: ignore[misc]
                @property
                def ttl(self) -> float:
                    return 5.0

            made.__class__ = Short
            return made

    FAILS = frozenset({"test_a_lease_tells_its_life_or_nothing"})


class TestSaysTwiceThatTheSnapshotIsComplete(Broken):
    class store(Store):  # noqa: N801
        async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
            async with aclosing(super().watch(prefix)) as events:
                synced = False
                async for event in events:
                    if synced and event.kind is WatchKind.PUT:
                        yield WatchEvent(WatchKind.SYNCED)
                    synced = synced or event.kind is WatchKind.SYNCED
                    yield event

    FAILS = frozenset({"test_the_end_of_the_snapshot_is_told_once"})


class TestForgetsChangesDuringTheSnapshot(Broken):
    """A change between the snapshot and the first look at changes is lost."""

    class store(Store):  # noqa: N801
        async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
            for key, value in dict(self._records).items():
                if key.startswith(prefix):
                    yield WatchEvent(WatchKind.PUT, key, value)
            yield WatchEvent(WatchKind.SYNCED)
            async with aclosing(super().watch(prefix)) as events:
                async for event in events:
                    if event.kind is WatchKind.SYNCED:
                        break
                async for event in events:
                    yield event

    FAILS = frozenset(
        {
            "test_changes_of_one_client_are_seen_by_the_other_and_by_itself",
            "test_a_watch_tells_only_of_keys_with_its_prefix",
            "test_a_new_value_takes_the_place_of_the_old",
            "test_the_end_of_the_snapshot_is_told_once",
            "test_the_records_of_a_closed_lease_vanish",
            "test_a_removed_record_vanishes",
            "test_a_value_without_a_lease_can_be_removed_by_anybody",
            "test_a_watch_that_is_not_read_does_not_hold_up_the_writers",
            "test_closing_a_watch_leaves_the_others_alone",
            "test_what_a_watch_tells_adds_up_to_what_is_there",
            # These put a mark at once, to know when they have been told everything.
            "test_a_value_without_a_lease_outlives_its_writer",
            "test_a_closed_lease_leaves_nothing_behind_of_a_late_put",
            "test_a_stranger_cannot_remove_a_record",
            "test_closing_a_lease_leaves_the_records_of_others",
        }
    )


class TestTellsANewValueAsGoneAndBack(Broken):
    class store(Store):  # noqa: N801
        async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
            known: set[str] = set()
            async with aclosing(super().watch(prefix)) as events:
                async for event in events:
                    if event.kind is WatchKind.PUT and event.key in known:
                        yield WatchEvent(WatchKind.DELETE, event.key)
                    (known.add if event.kind is WatchKind.PUT else known.discard)(event.key)
                    yield event

    FAILS = frozenset({"test_a_new_value_takes_the_place_of_the_old"})


class TestIgnoresThePrefix(Broken):
    class store(Store):  # noqa: N801
        async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
            async with aclosing(super().watch("")) as events:
                async for event in events:
                    yield event

    FAILS = frozenset(
        {
            "test_a_watch_tells_only_of_keys_with_its_prefix",
            "test_what_a_watch_tells_adds_up_to_what_is_there",
        }
    )


class TestDoesNotTellOfNewValues(Broken):
    class store(Store):  # noqa: N801
        def put(self, key: str, value: bytes) -> None:
            if key in self._records:
                self._records[key] = value
            else:
                super().put(key, value)

    FAILS = frozenset(
        {
            "test_a_new_value_takes_the_place_of_the_old",
            "test_a_watch_that_is_not_read_does_not_hold_up_the_writers",
            "test_what_a_watch_tells_adds_up_to_what_is_there",
        }
    )


class TestKeepsTheRecordsOfClosedLeases(Broken):
    class store(Store):  # noqa: N801
        async def lease(self, ttl: float | None = None) -> Lease:
            lease: Any = await super().lease(ttl)

            async def aclose() -> None:
                lease._closed = True

            lease.aclose = aclose
            return lease  # type: ignore[no-any-return]

    FAILS = frozenset({"test_the_records_of_a_closed_lease_vanish", "test_what_a_watch_tells_adds_up_to_what_is_there"})


class TestRemovesTooMuchWithALease(Broken):
    class store(Store):  # noqa: N801
        def ended(self, lease_id: int) -> None:
            super().ended(lease_id)
            for key in [key for key in self._records if not key.endswith("/threshold")]:
                self.delete(key)

    FAILS = frozenset(
        {
            "test_closing_a_lease_leaves_the_records_of_others",
            "test_what_a_watch_tells_adds_up_to_what_is_there",
        }
    )


class TestLetsStrangersRemoveRecords(Broken):
    class store(Store):  # noqa: N801
        async def lease(self, ttl: float | None = None) -> Lease:
            lease: Any = await super().lease(ttl)

            async def remove(key: str) -> None:
                self.delete(key)

            lease.remove = remove
            return lease  # type: ignore[no-any-return]

    FAILS = frozenset({"test_a_stranger_cannot_remove_a_record", "test_what_a_watch_tells_adds_up_to_what_is_there"})


class TestTakesRecordsUnderAClosedLease(Broken):
    class store(Store):  # noqa: N801
        async def lease(self, ttl: float | None = None) -> Lease:
            lease: Any = await super().lease(ttl)

            async def put(key: str, value: bytes) -> None:
                self.put(key, value)
                lease._keys.add(key)

            lease.put = put
            return lease  # type: ignore[no-any-return]

    FAILS = frozenset({"test_a_closed_lease_leaves_nothing_behind_of_a_late_put"})


class TestHasNoLimit(Broken):
    class store(Store):  # noqa: N801
        def put(self, key: str, value: bytes) -> None:
            self._records[key] = value
            self._tell(WatchEvent(WatchKind.PUT, key, value))

    FAILS = frozenset(
        {
            "test_a_record_of_the_largest_size_is_kept_and_a_larger_one_refused",
            "test_a_value_that_is_too_large_is_refused",
        }
    )


class TestHasTooLowALimit(Broken):
    class store(Store):  # noqa: N801
        def put(self, key: str, value: bytes) -> None:
            if len(value) > 60_000:
                raise ValueError("too large")
            super().put(key, value)

    FAILS = frozenset(
        {
            "test_a_record_of_the_largest_size_is_kept_and_a_larger_one_refused",
            "test_a_value_that_is_too_large_is_refused",
        }
    )


class TestGivesTheSameIdTwice(Broken):
    class store(Store):  # noqa: N801
        made = 0

        async def lease(self, ttl: float | None = None) -> Lease:
            lease: Any = await super().lease(ttl)
            self.made += 1
            lease._id = 1 + self.made % 30
            return lease  # type: ignore[no-any-return]

    FAILS = frozenset({"test_ids_of_live_leases_differ_and_fit_63_bits"})


class TestTiesValuesToALease(Broken):
    class store(Store):  # noqa: N801
        async def put_value(self, key: str, value: bytes | None) -> None:
            await super().put_value(key, value)
            for lease in self._leases.values():
                lease._keys.add(key)

    FAILS = frozenset(
        {
            "test_a_value_without_a_lease_outlives_its_writer",
            "test_what_a_watch_tells_adds_up_to_what_is_there",
        }
    )


class TestRewritesKeys(Broken):
    class store(Store):  # noqa: N801
        def put(self, key: str, value: bytes) -> None:
            super().put(key.replace("//", "/"), value)

    FAILS = frozenset({"test_keys_and_values_may_hold_anything"})


class TestKeepsWatchesAfterClosing(Broken):
    class store(Store):  # noqa: N801
        async def aclose(self) -> None:
            for lease in list(self._leases.values()):
                await lease.aclose()

    FAILS = frozenset({"test_closing_the_client_ends_its_watches"})


class TestEndsAllWatchesWithOne(Broken):
    class store(Store):  # noqa: N801
        async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
            try:
                async with aclosing(super().watch(prefix)) as events:
                    async for event in events:
                        yield event
            finally:
                self._watchers.clear()

    FAILS = frozenset({"test_closing_a_watch_leaves_the_others_alone"})


class TestLeavesTasksBehind(Broken):
    class store(Store):  # noqa: N801
        async def lease(self, ttl: float | None = None) -> Lease:
            TaskSet().spawn(asyncio.sleep(60), name="forgotten")
            return await super().lease(ttl)

    FAILS = frozenset({"test_clients_can_be_closed_twice_and_leave_no_task_behind"})


class TestPutsLater(Broken):
    class store(Store):  # noqa: N801
        async def lease(self, ttl: float | None = None) -> Lease:
            lease: Any = await super().lease(ttl)
            put = lease.put

            async def put_soon(key: str, value: bytes) -> None:
                if lease._closed or len(value) > MAX_VALUE:
                    raise ValueError("not now")
                asyncio.get_running_loop().call_later(0.1, self.put, key, value)
                lease._keys.add(key)

            lease.put = put_soon if ttl is None else put
            return lease  # type: ignore[no-any-return]

    FAILS = frozenset(
        {
            "test_a_record_is_there_once_put_has_returned",
            "test_a_stranger_cannot_remove_a_record",
            "test_closing_a_lease_leaves_the_records_of_others",
            "test_what_a_watch_tells_adds_up_to_what_is_there",
        }
    )


class TestRepeatsTheSnapshot(Broken):
    class store(Store):  # noqa: N801
        async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
            async with aclosing(super().watch(prefix)) as events:
                times = 2
                async for event in events:
                    times = 1 if event.kind is WatchKind.SYNCED else times
                    for _ in range(times):
                        yield event

    FAILS = frozenset({"test_a_watch_begins_with_what_is_there_and_says_when_that_is_all"})


class TestMakesSomethingOfNothing(Broken):
    class store(Store):  # noqa: N801
        async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
            if not self._records:
                yield WatchEvent(WatchKind.FRESH)
            async with aclosing(super().watch(prefix)) as events:
                async for event in events:
                    yield event

    FAILS = frozenset({"test_a_watch_of_nothing_says_that_its_snapshot_is_complete"})


class TestInsistsOnWhatItRemoves(Broken):
    class store(Store):  # noqa: N801
        async def lease(self, ttl: float | None = None) -> Lease:
            lease: Any = await super().lease(ttl)
            remove = lease.remove

            async def insist(key: str) -> None:
                if key not in lease._keys:
                    raise KeyError(key)
                await remove(key)

            lease.remove = insist
            return lease  # type: ignore[no-any-return]

    FAILS = frozenset(
        {
            "test_removing_what_is_not_there_is_fine",
            "test_a_stranger_cannot_remove_a_record",
            "test_what_a_watch_tells_adds_up_to_what_is_there",
        }
    )


class Client(Store):
    """One of two clients of one store, whose leases can expire and whose store can be cut off."""

    def __init__(self, store: Store | None = None) -> None:
        super().__init__()
        self.others: list[MemoryDiscovery] = []
        if store is not None:
            self._records = store._records

    def _tell(self, event: WatchEvent) -> None:
        super()._tell(event)
        for other in self.others:
            MemoryDiscovery._tell(other, event)

    def announce(self, kind: WatchKind) -> None:
        """Tells all watches that the store is gone, or back."""
        for watcher in self._watchers:
            watcher.offer(WatchEvent(kind, f"{watcher._prefix}\0{kind.value}"))


class Remote(Broken):
    """The kit over two clients of one store."""

    CAN_KILL_OWNER = True
    CAN_CUT_STORE = True
    TTL = 0.05
    client: ClassVar[type[Client]] = Client

    @pytest.fixture
    async def directories(self) -> AsyncIterator[Directories]:
        one = self.client()
        other = self.client(one)
        one.others, other.others = [other], [one]
        yield Directories(one=one, other=other)
        await one.aclose()
        await other.aclose()

    async def kill_owner(self, directories: Directories) -> None:
        assert isinstance(directories.one, Client)
        for lease in list(directories.one._leases.values()):
            await lease.aclose()

    async def cut_store(self, directories: Directories) -> None:
        for client in (directories.one, directories.other):
            assert isinstance(client, Client)
            client.announce(WatchKind.STALE)

    async def restore_store(self, directories: Directories) -> None:
        for client in (directories.one, directories.other):
            assert isinstance(client, Client)
            client.announce(WatchKind.FRESH)


class TestTwoClients(Remote):
    pass


class TestKeepsTheRecordsOfTheDead(Remote):
    async def kill_owner(self, directories: Directories) -> None:
        pass

    FAILS = frozenset({"test_the_records_of_a_dead_owner_vanish"})


class TestLetsLiveLeasesExpire(Remote):
    class client(Client):  # noqa: N801
        async def lease(self, ttl: float | None = None) -> Lease:
            lease = await super().lease(ttl)
            if ttl is not None:
                asyncio.get_running_loop().call_later(ttl, self.expire, lease)
            return lease

        def expire(self, lease: Any) -> None:
            while lease._keys:
                self.delete(lease._keys.pop())

    FAILS = frozenset({"test_a_live_lease_is_not_lost_and_outlives_its_ttl"})


class TestSaysNothingOfOutages(Remote):
    async def cut_store(self, directories: Directories) -> None:
        pass

    FAILS = frozenset(
        {
            "test_an_outage_of_the_store_leaves_the_view_as_it_was_and_says_so",
            "test_after_an_outage_leases_are_registered_and_usable",
        }
    )


class TestEmptiesTheViewInAnOutage(Remote):
    async def cut_store(self, directories: Directories) -> None:
        assert isinstance(directories.one, Client)
        self.records = dict(directories.one._records)
        for key in self.records:
            directories.one.delete(key)
        await super().cut_store(directories)

    async def restore_store(self, directories: Directories) -> None:
        assert isinstance(directories.one, Client)
        for key, value in self.records.items():
            directories.one.put(key, value)
        await super().restore_store(directories)

    FAILS = frozenset({"test_an_outage_of_the_store_leaves_the_view_as_it_was_and_says_so"})


class TestForgetsLeasesInAnOutage(Remote):
    async def restore_store(self, directories: Directories) -> None:
        assert isinstance(directories.one, Client)
        for lease in list(directories.one._leases.values()):
            await lease.aclose()
        await super().restore_store(directories)

    FAILS = frozenset({"test_after_an_outage_leases_are_registered_and_usable"})


class TestLeavesItsRecordsWhenClosed(Remote):
    class client(Client):  # noqa: N801
        async def aclose(self) -> None:
            self._leases.clear()
            await super().aclose()

    FAILS = frozenset({"test_closing_the_client_removes_the_records_of_its_leases"})
