"""Leases: unique, the life of their records, and no concern of other leases."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from dynamo_core.contracts.discovery import MAX_VALUE, WatchKind

from dynamo_testing.discovery.harness import DiscoveryHarness, Registry
from dynamo_testing.optional_packages import pytest


class LeaseChecks(DiscoveryHarness):
    """Records live as long as their lease, and the lease as long as its owner."""

    async def test_ids_of_live_leases_differ_and_fit_63_bits(self, registry: Registry) -> None:
        clients = (registry.directories.one, registry.directories.other)

        leases = [await client.lease() for _ in range(20) for client in clients]

        ids = [lease.id for lease in leases]
        assert len(set(ids)) == len(ids)
        assert all(0 < number < 2**63 for number in ids)

    async def test_a_lease_reports_its_ttl_or_none(self, registry: Registry) -> None:
        usual, own = await registry.directories.one.lease(), await registry.directories.one.lease(ttl=7.0)

        assert usual.ttl is None or usual.ttl > 0
        assert own.ttl in (None, 7.0)

    async def test_a_record_is_there_once_put_has_returned(self, registry: Registry) -> None:
        lease = await registry.directories.one.lease()

        await lease.put(registry.key("a"), b"1")

        assert await registry.snapshot(registry.directories.one) == {registry.key("a"): b"1"}

    async def test_the_records_of_a_closed_lease_vanish(self, registry: Registry) -> None:
        lease = await registry.directories.one.lease()
        await lease.put(registry.key("a"), b"1")
        await lease.put(registry.key("b"), b"2")
        async with registry.viewing() as view:
            await view.shows({registry.key("a"): b"1", registry.key("b"): b"2"})

            await lease.aclose()

            await view.shows({})

    async def test_closing_a_lease_leaves_the_records_of_others(self, registry: Registry) -> None:
        first, second = await registry.directories.one.lease(), await registry.directories.one.lease()
        await first.put(registry.key("a"), b"1")
        await second.put(registry.key("b"), b"2")

        await first.aclose()
        await first.aclose()

        async with registry.viewing() as view:
            await view.catch_up()
            assert registry.key("b") in view.records

    async def test_a_removed_record_vanishes(self, registry: Registry) -> None:
        lease = await registry.directories.one.lease()
        await lease.put(registry.key("a"), b"1")
        async with registry.viewing() as view:
            await view.shows({registry.key("a"): b"1"})

            await lease.remove(registry.key("a"))

            await view.shows({})

    async def test_removing_a_missing_record_is_fine(self, registry: Registry) -> None:
        lease = await registry.directories.one.lease()

        await lease.remove(registry.key("never"))

        assert await registry.snapshot() == {}

    async def test_a_stranger_cannot_remove_a_record(self, registry: Registry) -> None:
        owner, stranger = await registry.directories.one.lease(), await registry.directories.other.lease()
        await owner.put(registry.key("a"), b"1")

        await stranger.remove(registry.key("a"))

        async with registry.viewing() as view:
            await view.catch_up()
            assert view.records == {registry.key("a"): b"1"}

    async def test_a_closed_lease_leaves_nothing_behind_of_a_late_put(self, registry: Registry) -> None:
        lease = await registry.directories.one.lease()
        await lease.aclose()

        # Refusing is as good as ignoring; a record that is never removed is not.
        with suppress(Exception):
            await lease.put(registry.key("late"), b"1")

        async with registry.viewing() as view:
            await view.catch_up()
            assert view.records == {}

    async def test_a_record_of_the_largest_size_is_kept_and_a_larger_one_refused(self, registry: Registry) -> None:
        lease = await registry.directories.one.lease()
        await lease.put(registry.key("full"), b"x" * MAX_VALUE)

        with pytest.raises(ValueError, match=r"."):
            await lease.put(registry.key("over"), b"x" * (MAX_VALUE + 1))

        async with registry.viewing() as view:
            await view.shows({registry.key("full"): b"x" * MAX_VALUE})

    async def test_closing_the_client_removes_the_records_of_its_leases(self, registry: Registry) -> None:
        if not registry.directories.apart:
            pytest.skip("the two clients are one object")
        lease = await registry.directories.one.lease()
        await lease.put(registry.key("a"), b"1")
        async with registry.viewing() as view:
            await view.shows({registry.key("a"): b"1"})

            await registry.directories.one.aclose()

            await view.shows({})

    async def test_a_live_lease_is_not_lost_and_outlives_its_ttl(self, registry: Registry) -> None:
        if not self.CAN_KILL_OWNER:
            pytest.skip("CAN_KILL_OWNER is False: leases do not expire")
        lease = await registry.directories.one.lease(self.TTL)
        await lease.put(registry.key("a"), b"1")

        # Nothing happens in a lease that is kept alive: there is no event to wait for.
        await asyncio.sleep(2.5 * self.TTL)

        assert not lease.lost.is_set()
        assert await registry.snapshot() == {registry.key("a"): b"1"}

    async def test_the_records_of_a_dead_owner_vanish(self, registry: Registry) -> None:
        if not self.CAN_KILL_OWNER:
            pytest.skip("CAN_KILL_OWNER is False")
        lease = await registry.directories.one.lease(self.TTL)
        await lease.put(registry.key("a"), b"1")
        async with registry.viewing() as view:
            await view.shows({registry.key("a"): b"1"})

            await self.kill_owner(registry.directories)

            await view.shows({})

    async def test_an_outage_keeps_the_view_and_marks_it_stale(self, registry: Registry) -> None:
        self._needs_outages()
        lease = await registry.directories.one.lease()
        await lease.put(registry.key("a"), b"1")
        async with registry.viewing() as view:
            await view.shows({registry.key("a"): b"1"})

            await self.cut_store(registry.directories)
            await view.until(lambda: view.count(WatchKind.STALE) > 0, "STALE expected")
            kept = dict(view.records)
            await self.restore_store(registry.directories)
            await view.until(lambda: view.count(WatchKind.FRESH) > 0, "FRESH expected")

        assert kept == {registry.key("a"): b"1"}
        assert [event.kind for event in view.log if event.kind in (WatchKind.STALE, WatchKind.FRESH)] == [
            WatchKind.STALE,
            WatchKind.FRESH,
        ]

    async def test_after_an_outage_leases_are_registered_and_usable(self, registry: Registry) -> None:
        self._needs_outages()
        lease = await registry.directories.one.lease()
        await lease.put(registry.key("a"), b"1")
        async with registry.viewing() as view:
            await self.cut_store(registry.directories)
            await view.until(lambda: view.count(WatchKind.STALE) > 0, "STALE expected")
            await self.restore_store(registry.directories)
            await view.until(lambda: view.count(WatchKind.FRESH) > 0, "FRESH expected")
            await view.shows({registry.key("a"): b"1"})

            async with asyncio.timeout(self.WAIT):
                await lease.put(registry.key("b"), b"2")

            await view.shows({registry.key("a"): b"1", registry.key("b"): b"2"})
            assert not lease.lost.is_set()

    def _needs_outages(self) -> None:
        if not self.CAN_CUT_STORE:
            pytest.skip("CAN_CUT_STORE is False")
