"""Every watch is told a snapshot, then what changed, and holds no more than the view."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from dynamo_core import WatchEvent, WatchKind
from dynamo_leases.fanout import Fanout
from hypothesis import given
from hypothesis import strategies as st

PUT, DELETE, SYNCED, STALE, FRESH = (
    WatchKind.PUT,
    WatchKind.DELETE,
    WatchKind.SYNCED,
    WatchKind.STALE,
    WatchKind.FRESH,
)


async def nothing() -> None:
    """Look at a store that has nothing new."""


async def read(watch: AsyncGenerator[WatchEvent, None], number: int) -> list[WatchEvent]:
    async with asyncio.timeout(5):
        return [await anext(watch) for _ in range(number)]


async def test_a_watch_begins_with_the_records_under_its_prefix() -> None:
    fanout = Fanout()
    fanout.publish([WatchEvent(PUT, key, b"") for key in ("a/1", "b/1", "a/2")], synced=True)

    events = await read(fanout.watch("a/", nothing), 3)

    assert events == [WatchEvent(PUT, "a/1", b""), WatchEvent(PUT, "a/2", b""), WatchEvent(SYNCED)]


async def test_the_store_is_read_before_the_snapshot() -> None:
    fanout = Fanout()

    async def look() -> None:
        fanout.publish([WatchEvent(PUT, "a", b"1")], synced=True)

    assert await read(fanout.watch("", look), 2) == [WatchEvent(PUT, "a", b"1"), WatchEvent(SYNCED)]


async def test_a_watch_is_stale_until_the_first_snapshot() -> None:
    fanout = Fanout()
    watch = fanout.watch("", nothing)
    assert await read(watch, 1) == [WatchEvent(STALE)]

    fanout.publish([WatchEvent(STALE), WatchEvent(PUT, "a", b"1"), WatchEvent(FRESH)], synced=True)

    assert await read(watch, 2) == [WatchEvent(PUT, "a", b"1"), WatchEvent(SYNCED)]


async def test_a_watch_that_begins_during_an_outage_gets_the_last_view_marked_stale() -> None:
    fanout = Fanout()
    fanout.publish([WatchEvent(PUT, "a", b"1")], synced=True)
    fanout.publish([WatchEvent(STALE)], synced=True)

    assert await read(fanout.watch("", nothing), 3) == [
        WatchEvent(PUT, "a", b"1"),
        WatchEvent(SYNCED),
        WatchEvent(STALE),
    ]


async def test_a_slow_reader_gets_the_newest_of_every_key() -> None:
    fanout = Fanout()
    fanout.publish([], synced=True)
    watch = fanout.watch("", nothing)
    await read(watch, 1)
    reading = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)

    for number in range(1001):
        fanout.publish([WatchEvent(PUT, f"k{number % 2}", str(number).encode())], synced=True)

    assert [await reading, *await read(watch, 1)] == [WatchEvent(PUT, "k1", b"999"), WatchEvent(PUT, "k0", b"1000")]


async def test_closing_ends_reading_and_waiting_watches() -> None:
    fanout, unsynced = Fanout(), Fanout()
    fanout.publish([], synced=True)
    reading, waiting = fanout.watch("", nothing), unsynced.watch("", nothing)
    await read(reading, 1)
    await read(waiting, 1)
    ends = [asyncio.ensure_future(anext(watch, None)) for watch in (reading, waiting)]
    await asyncio.sleep(0)

    fanout.close()
    unsynced.close()

    async with asyncio.timeout(5):
        assert await asyncio.gather(*ends) == [None, None]
        assert await anext(fanout.watch("", nothing), None) is None


async def test_a_closed_watch_gets_no_events() -> None:
    fanout = Fanout()
    fanout.publish([], synced=True)
    watch = fanout.watch("", nothing)
    await read(watch, 1)

    await watch.aclose()

    assert not fanout._watchers


steps = st.lists(st.tuples(st.sampled_from(["put", "delete", "read"]), st.sampled_from(["a", "b", "ab"])), max_size=30)


@given(steps, st.sampled_from(["", "a"]))
async def test_the_events_of_a_watch_add_up_to_the_view(history: list[tuple[str, str]], prefix: str) -> None:
    fanout, told = Fanout(), dict[str, bytes]()
    fanout.publish([WatchEvent(PUT, "a", b"first")], synced=True)
    watch = fanout.watch(prefix, nothing)

    async def follow() -> None:
        async for event in watch:
            if event.kind is PUT:
                told[event.key] = event.value
            elif event.kind is DELETE:
                # A key that came and went unread is told as gone.
                told.pop(event.key, None)

    following = asyncio.ensure_future(follow())
    for number, (action, key) in enumerate(history):
        if action == "put":
            fanout.publish([WatchEvent(PUT, key, str(number).encode())], synced=True)
        elif action == "delete" and key in fanout.records:
            fanout.publish([WatchEvent(DELETE, key)], synced=True)
        else:
            await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following

    assert told == {key: value for key, value in fanout.records.items() if key.startswith(prefix)}
