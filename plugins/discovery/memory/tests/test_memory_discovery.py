"""The memory directory: leases, records, watches."""

from __future__ import annotations

from contextlib import aclosing

from dynamo_core import WatchEvent, WatchKind
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery


async def test_a_watch_reports_changes_in_order(directory: MemoryDiscovery) -> None:
    lease = await directory.lease()
    async with aclosing(directory.watch("")) as events:
        assert (await anext(events)).kind is WatchKind.SYNCED
        await lease.put("a", b"1")
        await lease.put("b", b"2")
        await lease.remove("a")

        seen = [await anext(events), await anext(events)]

    assert seen == [WatchEvent(WatchKind.PUT, "b", b"2"), WatchEvent(WatchKind.DELETE, "a")]
