"""Real processes that share a folder, and one that is killed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

from dynamo_core import WatchKind
from dynamo_plugin_discovery_file.clock import SYSTEM
from dynamo_plugin_discovery_file.discovery import FileDiscovery
from dynamo_plugin_discovery_file.folder import Folder
from dynamo_plugin_discovery_file.scanner import Scanner
from dynamo_testing.discovery.processes import OWNER, records_end_with_their_processes

Make = Callable[..., FileDiscovery]

SCRIPT = OWNER.format(
    imports="from dynamo_plugin_discovery_file.discovery import FileConfig, FileDiscovery",
    discovery="FileDiscovery(FileConfig(path=sys.argv[1], ttl=1, poll=0.1), Metrics())",
)


async def test_the_records_of_a_process_that_is_killed_vanish_and_those_of_others_stay(
    make: Make, tmp_path: Path
) -> None:
    await records_end_with_their_processes(SCRIPT, str(tmp_path / "discovery"), lambda: make(ttl=1, poll=0.1))


async def test_a_lease_stays_alive_while_the_event_loop_is_blocked(make: Make) -> None:
    discovery = make(ttl=1.2, poll=0.05)
    lease = await discovery.lease()
    await lease.put("a", b"1")
    other = Scanner(Folder(discovery.path, SYSTEM), ttl=1.2, clock=SYSTEM)
    blocked = threading.Event()

    def look_from_elsewhere() -> list[WatchKind]:
        seen = [event.kind for event in other.poll()]
        while not blocked.wait(0.05):
            seen += [event.kind for event in other.poll()]
        return seen

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look_from_elsewhere)
        # An engine that loads its weights without giving way.
        time.sleep(2.0)  # noqa: ASYNC251
        blocked.set()
        seen = looking.result(timeout=5)

    assert seen == [WatchKind.PUT]
    assert not lease.lost.is_set()


async def test_a_watch_of_an_unreadable_folder_is_stale_and_recovers(make: Make, tmp_path: Path) -> None:
    discovery = make(poll=0.02)
    (tmp_path / "discovery").write_text("in the way")

    async with asyncio.timeout(10), aclosing(discovery.watch("")) as events:
        assert (await anext(events)).kind is WatchKind.STALE
        (tmp_path / "discovery").unlink()
        await discovery.put_value("a", b"1")
        kinds = [(await anext(events)).kind for _ in range(2)]

    assert kinds == [WatchKind.PUT, WatchKind.SYNCED]
