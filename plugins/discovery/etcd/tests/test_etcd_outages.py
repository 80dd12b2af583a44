"""What leases and watches do when etcd goes away, and what comes back is not what was there."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from dynamo_core import WatchKind
from dynamo_core.errors import CannotConnect

STALE, FRESH = WatchKind.STALE, WatchKind.FRESH

#: Many heartbeats in a ttl, for what must be back before one is over.
PATIENT = {"ttl": 10.0, "heartbeat": 0.3, "timeout": 5.0}


@pytest.mark.parametrize("empty", [False, True], ids=["with its data", "empty"])
async def test_after_a_restart_of_etcd_leases_return_with_the_same_id(
    etcd: Any, make: Any, see: Any, empty: bool
) -> None:
    owner, seen = make(**PATIENT), see(make(**PATIENT))
    lease = await owner.lease()
    await lease.put("a", b"1")
    await lease.put("b", b"2")
    await seen.shows({"a": b"1", "b": b"2"})
    etcd.kill()
    await seen.hears(STALE)
    with pytest.raises(CannotConnect, match=r"^etcd at http://127\.0\.0\.1:\d+ cannot be reached: "):
        await lease.put("c", b"3")

    if empty:
        etcd.empty()
    etcd.start()
    await seen.hears(FRESH)

    assert seen.records == {"a": b"1", "b": b"2"}
    assert WatchKind.DELETE not in seen.kinds
    late = see(make())
    await late.shows({"a": b"1", "b": b"2"})
    found = etcd.ask("/v3/lease/timetolive", {"ID": str(lease.id), "keys": True})
    assert len(found["keys"]) == 2
    assert not lease.lost.is_set()


async def test_an_emptied_etcd_reports_no_returning_lease_as_gone(etcd: Any, make: Any, see: Any) -> None:
    one, other, dies, seen = make(**PATIENT), make(**PATIENT), make(**PATIENT), see(make(**PATIENT))
    await (await one.lease()).put("a", b"1")
    await (await other.lease()).put("b", b"2")
    await (await dies.lease()).put("dies", b"")
    await seen.shows({"a": b"1", "b": b"2", "dies": b""})
    dies._thread.stop(5)

    etcd.ask("/v3/kv/deleterange", {"key": "AA==", "range_end": "AA=="})
    await seen.hears(STALE)
    await seen.hears(FRESH)

    assert seen.records == {"a": b"1", "b": b"2"}
    assert seen.kinds.count(WatchKind.DELETE) == 1


async def test_a_process_that_died_during_an_outage_is_gone_after_it(etcd: Any, make: Any, see: Any) -> None:
    short = {"ttl": 2.0, "timeout": 1.0}
    dies, stays, seen = make(**short), make(**short), see(make(**short))
    await (await dies.lease()).put("dies", b"")
    await (await stays.lease()).put("stays", b"")
    await seen.shows({"dies": b"", "stays": b""})
    etcd.kill()
    await seen.hears(STALE)
    dies._thread.stop(5)

    etcd.empty()
    etcd.start()
    await seen.hears(FRESH)

    await seen.shows({"stays": b""})


async def test_leases_that_expire_during_an_outage_are_not_reported_as_gone(etcd: Any, make: Any, see: Any) -> None:
    owner, seen = make(**PATIENT), see(make(**PATIENT))
    lease = await owner.lease()
    await lease.put("a", b"1")
    await seen.shows({"a": b"1"})
    etcd.freeze()
    await seen.hears(STALE)
    # As etcd sees it when its clock goes on: the lease has ended.
    etcd.resume()
    etcd.ask("/v3/lease/revoke", {"ID": str(lease.id)})

    await seen.hears(FRESH)
    await lease.put("b", b"2")
    await seen.shows({"a": b"1", "b": b"2"})

    assert WatchKind.DELETE not in seen.kinds


async def test_revoked_leases_and_deleted_records_come_back(etcd: Any, make: Any, see: Any) -> None:
    lease = await make().lease()
    await lease.put("a", b"1")
    seen = see(make())
    await seen.shows({"a": b"1"})

    etcd.ask("/v3/lease/revoke", {"ID": str(lease.id)})
    await seen.shows({})
    await seen.shows({"a": b"1"})
    etcd.ask("/v3/kv/deleterange", {"key": "ZHluYW1vL2E="})
    await seen.shows({})
    await seen.shows({"a": b"1"})


async def test_a_key_that_another_has_put_last_stays_with_it(etcd: Any, make: Any, see: Any) -> None:
    first, second = await make().lease(), await make().lease()
    await first.put("a", b"first")
    await second.put("a", b"second")

    etcd.ask("/v3/lease/revoke", {"ID": str(first.id)})
    await first.put("mark", b"")
    seen = see(make())
    await seen.shows({"a": b"second", "mark": b""})
    assert seen.kinds.count(WatchKind.PUT) == 2
    await first.remove("a")
    await first.aclose()

    await seen.shows({"a": b"second"})


async def test_removing_a_key_that_another_has_taken_leaves_it_with_the_other(make: Any, see: Any) -> None:
    # Far from the next heartbeats, at which the first would learn of it and the second put it again.
    first, second = await make(ttl=60).lease(), await make(ttl=60).lease()
    await first.put("a", b"first")
    await second.put("a", b"second")

    await first.remove("a")

    seen = see(make())
    await seen.hears(WatchKind.SYNCED)
    assert seen.records == {"a": b"second"}


async def test_changes_before_a_compaction_are_reported_after_a_reconnect(etcd: Any, make: Any, see: Any) -> None:
    other, seen = make(), see(make())
    for number in range(5):
        await other.put_value(f"k{number}", b"old")
    await seen.until(lambda: len(seen.records) == 5)
    etcd.kill()
    await seen.hears(STALE)
    etcd.start()
    await other.put_value("k0", None)
    await other.put_value("k1", b"new")
    etcd.ask("/v3/kv/compaction", {"revision": str(etcd.revision())})

    await seen.until(lambda: "k0" not in seen.records and seen.records["k1"] == b"new")

    assert sorted(seen.records) == ["k1", "k2", "k3", "k4"]


async def test_a_watch_from_a_revision_that_is_compacted_reads_everything_anew(
    etcd: Any, make: Any, see: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dynamo_plugin_discovery_etcd.store import Store

    other, discovery = make(), make()
    for number in range(5):
        await other.put_value("k", str(number).encode())
    real, asked, again = Store.changes, list[int](), threading.Event()

    def from_the_beginning(self: Store, revision: int) -> Any:
        # As if the compaction came between the listing and the watch.
        asked.append(revision)
        if len(asked) == 1:
            etcd.ask("/v3/kv/compaction", {"revision": str(revision - 1)})
            return real(self, 1)
        again.set()
        return real(self, revision)

    monkeypatch.setattr(Store, "changes", from_the_beginning)
    seen = see(discovery)
    await seen.hears(WatchKind.SYNCED)
    assert await asyncio.to_thread(again.wait, 15)
    await other.put_value("k", b"after")

    await seen.shows({"k": b"after"})
    assert STALE not in seen.kinds


async def test_a_watch_that_falls_silent_is_found_out_and_opened_anew(
    etcd: Any, make: Any, see: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dynamo_plugin_discovery_etcd.client import Messages

    real, silent = Messages.read, threading.Event()

    async def read(self: Messages) -> list[dict[str, Any]]:
        arrived = await real(self)
        # A connection that died without a word brings nothing.
        return arrived if not (silent.is_set() and any("events" in message for message in arrived)) else []

    monkeypatch.setattr(Messages, "read", read)
    other, seen = make(), see(make())
    await seen.hears(WatchKind.SYNCED)
    silent.set()
    await other.put_value("a", b"1")

    await seen.shows({"a": b"1"})
    await other.put_value("a", None)
    await seen.shows({})


@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_another_member_takes_over_from_one_that_is_killed_or_hangs(
    cluster: Any, make_on: Any, see: Any, how: str
) -> None:
    urls = [member.url for member in cluster]
    owner, watcher = make_on(*urls), make_on(*urls)
    await owner.start()
    lease, seen = await owner.lease(), see(watcher)
    await lease.put("a", b"1")
    await seen.shows({"a": b"1"})

    used = watcher._session.store.client.endpoint
    getattr(cluster[urls.index(used)], how)()
    await lease.put("b", b"2")

    await seen.shows({"a": b"1", "b": b"2"})
    assert watcher._session.store.client.endpoint != used
    assert WatchKind.DELETE not in seen.kinds
    assert not lease.lost.is_set()


async def test_a_lease_stays_alive_while_the_event_loop_is_blocked(etcd: Any, make: Any) -> None:
    lease = await make().lease(1.0)
    await lease.put("a", b"1")
    blocked = threading.Event()

    def look_from_elsewhere() -> set[int]:
        seen = set()
        while not blocked.wait(0.05):
            seen.add(len(etcd.ask("/v3/kv/range", {"key": "ZHluYW1vL2E="}).get("kvs", ())))
        return seen

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look_from_elsewhere)
        # An engine that loads its weights without giving way.
        time.sleep(2.5)  # noqa: ASYNC251
        blocked.set()
        assert looking.result(timeout=5) == {1}
    assert not lease.lost.is_set()
