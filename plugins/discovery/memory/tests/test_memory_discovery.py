"""The memory directory: leases, records, watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from dynamo_core import MAX_VALUE, PluginConfig, WatchEvent, WatchKind
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_telemetry import Metrics
from hypothesis import given
from hypothesis import strategies as st


async def test_a_watch_begins_with_a_snapshot_and_says_when_it_is_complete(directory: MemoryDiscovery) -> None:
    lease = await directory.lease()
    await lease.put("v1/a", b"1")
    await lease.put("v2/b", b"2")

    async with aclosing(directory.watch("v1/")) as events:
        seen = [await anext(events), await anext(events)]

    assert seen == [WatchEvent(WatchKind.PUT, "v1/a", b"1"), WatchEvent(WatchKind.SYNCED)]


async def test_a_watch_tells_changes_in_order(directory: MemoryDiscovery) -> None:
    lease = await directory.lease()
    async with aclosing(directory.watch("")) as events:
        assert (await anext(events)).kind is WatchKind.SYNCED
        await lease.put("a", b"1")
        await lease.put("b", b"2")
        await lease.remove("a")

        seen = [await anext(events), await anext(events)]

    assert seen == [WatchEvent(WatchKind.PUT, "b", b"2"), WatchEvent(WatchKind.DELETE, "a")]


async def test_closing_a_lease_removes_its_records_and_no_others(directory: MemoryDiscovery) -> None:
    first, second = await directory.lease(), await directory.lease()
    await first.put("a", b"")
    await second.put("b", b"")

    await first.aclose()
    await first.aclose()

    async with aclosing(directory.watch("")) as events:
        assert await anext(events) == WatchEvent(WatchKind.PUT, "b", b"")
        assert (await anext(events)).kind is WatchKind.SYNCED


async def test_ids_of_live_leases_differ_and_fit_63_bits(directory: MemoryDiscovery) -> None:
    ids = {(await directory.lease()).id for _ in range(200)}

    assert len(ids) == 200
    assert all(0 < number < 2**63 for number in ids)


async def test_a_value_outlives_its_writer_until_it_is_removed(directory: MemoryDiscovery) -> None:
    await directory.put_value("thresholds/m", b"0.8")
    async with aclosing(directory.watch("thresholds/")) as events:
        first = await anext(events)
        await anext(events)
        await directory.put_value("thresholds/m", None)

        last = await anext(events)

    assert (first.kind, first.value, last.kind) == (WatchKind.PUT, b"0.8", WatchKind.DELETE)


async def test_a_value_that_is_too_large_is_refused(directory: MemoryDiscovery) -> None:
    lease = await directory.lease()

    with pytest.raises(ValueError, match="65537 bytes"):
        await lease.put("a", b"x" * (MAX_VALUE + 1))


async def test_a_closed_lease_takes_no_records(directory: MemoryDiscovery) -> None:
    lease = await directory.lease()
    await lease.aclose()

    with pytest.raises(ValueError, match="closed"):
        await lease.put("a", b"")


operations = st.lists(
    st.tuples(st.sampled_from(["put", "remove", "close"]), st.integers(0, 2), st.sampled_from("abc")), max_size=30
)


@given(operations, st.integers(1, 7))
def test_what_a_watch_tells_adds_up_to_what_is_there(steps: list[tuple[str, int, str]], read_every: int) -> None:
    async def play() -> tuple[dict[str, bytes], dict[str, bytes]]:
        directory = MemoryDiscovery(PluginConfig(), Metrics())
        leases = [await directory.lease() for _ in range(3)]
        view: dict[str, bytes] = {}
        truth: dict[str, bytes] = {}
        owner: dict[str, set[int]] = {}
        async with aclosing(directory.watch("")) as events:
            await anext(events)
            for number, (action, who, key) in enumerate(steps):
                if action == "put":
                    value = str(number).encode()
                    await leases[who].put(key, value)
                    truth[key] = value
                    owner.setdefault(key, set()).add(who)
                elif action == "remove":
                    await leases[who].remove(key)
                    if who in owner.get(key, set()):
                        owner[key].discard(who)
                        truth.pop(key, None)
                else:
                    await leases[who].aclose()
                    for held in [key for key, who_holds in owner.items() if who in who_holds]:
                        owner[held].discard(who)
                        truth.pop(held, None)
                    leases[who] = await directory.lease()
                if number % read_every == 0:
                    await _read_all(directory, events, view)
            await _read_all(directory, events, view)
        return view, truth

    view, truth = asyncio.run(play())

    assert view == truth


async def _read_all(directory: MemoryDiscovery, events: AsyncIterator[WatchEvent], view: dict[str, bytes]) -> None:
    """Takes all that the watch has to tell now: a marker, told after everything before it, ends the reading."""
    await directory.put_value("marker", b"")
    async for event in events:
        if event.key == "marker":
            break
        if event.kind is WatchKind.PUT:
            view[event.key] = event.value
        else:
            view.pop(event.key, None)
    await directory.put_value("marker", None)
    assert (await anext(events)).key == "marker"
