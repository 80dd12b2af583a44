"""Watches: a snapshot, then every change, of any process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from dynamo_core.contracts.discovery import MAX_VALUE, Lease, WatchKind
from dynamo_core.errors import DynamoError
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dynamo_testing.discovery.harness import DiscoveryHarness, Registry, View
from dynamo_testing.optional_packages import pytest

#: What a step does, whose keys it is about (of a lease, or of no lease for 2), and which of them; "steal" means that
#: the other lease tries to remove them all.
Step = tuple[str, int, str]

steps = st.lists(
    st.tuples(st.sampled_from(["put", "put", "remove", "steal", "close"]), st.integers(0, 2), st.sampled_from("abc")),
    max_size=12,
)


class WatchChecks(DiscoveryHarness):
    """Checks that the events of a watch add up to the store."""

    async def test_a_watch_begins_with_a_snapshot_and_its_end_mark(self, registry: Registry) -> None:
        lease = await registry.directories.one.lease()
        await lease.put(registry.key("a"), b"1")
        await lease.put(registry.key("b"), b"2")
        expected = {registry.key("a"): b"1", registry.key("b"): b"2"}
        # Until the other client has surely heard of them.
        async with registry.viewing() as view:
            await view.shows(expected)

        async with registry.viewing() as view:
            assert [event.kind for event in view.log] == [WatchKind.PUT, WatchKind.PUT, WatchKind.SYNCED]
            assert view.records == expected

    async def test_an_empty_watch_reports_a_complete_snapshot(self, registry: Registry) -> None:
        async with registry.viewing() as view:
            assert [event.kind for event in view.log] == [WatchKind.SYNCED]

    async def test_the_end_of_the_snapshot_is_reported_once(self, registry: Registry) -> None:
        async with registry.viewing() as view:
            await registry.directories.one.put_value(registry.key("a"), b"1")
            await view.shows({registry.key("a"): b"1"})
            await view.catch_up()

            assert view.count(WatchKind.SYNCED) == 1
        await registry.directories.one.put_value(registry.key("a"), None)

    async def test_changes_of_one_client_are_seen_by_the_other_and_by_itself(self, registry: Registry) -> None:
        lease = await registry.directories.one.lease()
        async with registry.viewing(registry.directories.one) as own, registry.viewing() as others:
            await lease.put(registry.key("a"), b"1")
            for view in (own, others):
                await view.shows({registry.key("a"): b"1"})

            await lease.remove(registry.key("a"))
            for view in (own, others):
                await view.shows({})

    async def test_a_watch_reports_only_keys_with_its_prefix(self, registry: Registry) -> None:
        lease = await registry.directories.one.lease()
        await lease.put(registry.key("b/before"), b"")
        async with registry.viewing(prefix=registry.key("a/")) as view:
            await lease.put(registry.key("b/1"), b"")
            await lease.put(registry.key("a"), b"")
            await lease.put(registry.key("a/1"), b"")
            await view.shows({registry.key("a/1"): b""})
            await view.catch_up()

            told = {event.key for event in view.log if "~mark" not in event.key and event.key}
        assert told == {registry.key("a/1")}

    async def test_a_new_value_takes_the_place_of_the_old(self, registry: Registry) -> None:
        lease = await registry.directories.one.lease()
        async with registry.viewing() as view:
            await lease.put(registry.key("a"), b"0")
            await view.shows({registry.key("a"): b"0"})

            for number in range(1, 5):
                await lease.put(registry.key("a"), str(number).encode())

            await view.shows({registry.key("a"): b"4"})
            await view.catch_up()
            assert view.records == {registry.key("a"): b"4"}
            gaps = [event for event in view.log if event.kind is WatchKind.DELETE and event.key == registry.key("a")]
        assert gaps == [], "a record that is put again is gone for a moment"

    async def test_a_value_without_a_lease_outlives_its_writer(self, registry: Registry) -> None:
        one = registry.directories.one
        lease = await one.lease()
        await one.put_value(registry.key("threshold"), b"0.8")
        await lease.aclose()
        if registry.directories.apart:
            await one.aclose()

        async with registry.viewing() as view:
            await view.catch_up()
            assert view.records == {registry.key("threshold"): b"0.8"}
        await registry.directories.other.put_value(registry.key("threshold"), None)

    async def test_any_client_can_remove_a_value_without_a_lease(self, registry: Registry) -> None:
        await registry.directories.one.put_value(registry.key("threshold"), b"0.8")
        async with registry.viewing() as view:
            await view.shows({registry.key("threshold"): b"0.8"})

            await registry.directories.other.put_value(registry.key("threshold"), None)
            await registry.directories.other.put_value(registry.key("never"), None)

            await view.shows({})

    async def test_a_value_that_is_too_large_is_refused(self, registry: Registry) -> None:
        one = registry.directories.one
        await one.put_value(registry.key("full"), b"x" * MAX_VALUE)

        with pytest.raises(ValueError, match=r"."):
            await one.put_value(registry.key("over"), b"x" * (MAX_VALUE + 1))

        async with registry.viewing() as view:
            await view.shows({registry.key("full"): b"x" * MAX_VALUE})
        await one.put_value(registry.key("full"), None)

    async def test_keys_and_values_may_hold_any_characters(self, registry: Registry) -> None:
        lease = await registry.directories.one.lease()
        names = ["org/model:tag", "größe 1", "a/../b", "a//b", "%2e%2e", ".hidden", "a+b?c#d&e=f", "x" * 150, "*"]
        records = {registry.key(name): bytes(range(256)) + name.encode() for name in names}

        for key, value in records.items():
            await lease.put(key, value)

        async with registry.viewing() as view:
            await view.shows(records)

    async def test_closing_a_watch_leaves_the_others_alone(self, registry: Registry) -> None:
        lease = await registry.directories.one.lease()
        async with registry.viewing() as stays:
            async with registry.viewing() as goes:
                pass
            await goes.watch.aclose()

            await lease.put(registry.key("a"), b"1")

            await stays.shows({registry.key("a"): b"1"})

    async def test_a_watch_that_is_not_read_does_not_hold_up_the_writers(self, registry: Registry) -> None:
        lease = await registry.directories.one.lease()
        async with registry.viewing() as slow, registry.viewing() as quick:
            async with asyncio.timeout(4 * self.WAIT):
                for number in range(100):
                    await lease.put(registry.key(f"k{number % 10}"), str(number).encode())
            expected = {registry.key(f"k{number % 10}"): str(number).encode() for number in range(90, 100)}

            await quick.shows(expected)
            await slow.shows(expected)

    async def test_closing_the_client_ends_its_watches(self, registry: Registry) -> None:
        async with registry.viewing() as view, asyncio.TaskGroup() as group:
            reading = group.create_task(_read_to_the_end(view))
            await asyncio.sleep(0)
            async with asyncio.timeout(self.WAIT):
                await registry.directories.other.aclose()
            done, _ = await asyncio.wait([reading], timeout=self.WAIT)
            reading.cancel()

        assert done, "a watch goes on after Discovery.aclose"

    async def test_clients_can_be_closed_twice_and_leave_no_task_behind(self, registry: Registry) -> None:
        before = asyncio.all_tasks()
        lease = await registry.directories.one.lease()
        await lease.put(registry.key("a"), b"1")
        async with registry.viewing() as view:
            await view.shows({registry.key("a"): b"1"})

        async with asyncio.timeout(self.WAIT):
            for _ in range(2):
                await registry.directories.one.aclose()
                await registry.directories.other.aclose()
            await lease.aclose()

        left = [task.get_name() for task in asyncio.all_tasks() - before if not task.done()]
        assert left == []

    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        # The verdict on a plugin should not depend on the day.
        derandomize=True,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
            HealthCheck.too_slow,
        ],
    )
    @given(history=steps)
    async def test_the_events_of_a_watch_add_up_to_the_store(self, registry: Registry, history: Sequence[Step]) -> None:
        """Random histories of two leases and of values without one, each with keys of its own."""
        example = Registry(registry.directories, self.WAIT)
        async with example.viewing() as followed:
            truth = await _play(example, history)

            await followed.shows(truth)
            async with example.viewing() as fresh:
                await fresh.shows(truth)
        for name in "abc":
            await example.directories.one.put_value(example.key(f"2-{name}"), None)


async def _play(registry: Registry, history: Sequence[Step]) -> dict[str, bytes]:
    """Take the steps, and say what must be there after them."""
    one, other = registry.directories.one, registry.directories.other
    leases: list[Lease] = [await one.lease(), await other.lease()]
    truth: dict[str, bytes] = {}
    for number, (action, who, name) in enumerate(history):
        key, value = registry.key(f"{who}-{name}"), str(number).encode()
        if who == 2:
            # Values without a lease: written by either client, removed by either.
            client = (one, other)[number % 2]
            if action == "put":
                await client.put_value(key, value)
                truth[key] = value
            elif action == "remove":
                await client.put_value(key, None)
                truth.pop(key, None)
        elif action == "put":
            await leases[who].put(key, value)
            truth[key] = value
        elif action == "remove":
            await leases[who].remove(key)
            truth.pop(key, None)
        elif action == "steal":
            for stolen in "abc":
                await leases[1 - who].remove(registry.key(f"{who}-{stolen}"))
        else:
            await leases[who].aclose()
            leases[who] = await (one, other)[who].lease()
            for gone in [held for held in truth if held.startswith(registry.key(f"{who}-"))]:
                del truth[gone]
    return truth


async def _read_to_the_end(view: View) -> None:
    # A watch that is closed under its reader may end, or say what happened.
    with suppress(StopAsyncIteration, DynamoError):
        while True:
            await view.read()
