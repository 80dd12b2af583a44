"""Leases in a folder: who counts as alive, what is cleared away, and what happens when the folder goes."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import Any

import pytest
from dynamo_core import WatchKind
from dynamo_core.errors import CannotConnect
from dynamo_plugin_discovery_file.folder import RECORDS


@pytest.mark.parametrize("jump", [-86400.0, -1.0, 2.0, 3600.0])
async def test_a_jump_of_the_hosts_clock_expires_no_lease(host: Any, jump: float) -> None:
    view, lease = host.view(), host.lease()
    await lease.put("a", b"1")
    host.run(5)
    view.kinds.clear()

    host.time.jump(jump)
    host.run(10)

    assert view.records == {"a": b"1"}
    assert view.kinds == []


@pytest.mark.parametrize("jump", [-86400.0, 3600.0])
async def test_after_a_jump_of_the_clock_the_dead_still_vanish(host: Any, jump: float) -> None:
    view, lease = host.view(), host.lease()
    await lease.put("a", b"1")
    host.run(5)

    host.time.jump(jump)
    host.kill(lease)
    host.run(3.25)

    assert view.records == {}


async def test_a_process_started_after_a_clock_jump_sees_live_leases_after_a_heartbeat(host: Any) -> None:
    lease = host.lease()
    await lease.put("a", b"1")
    host.time.jump(3600.0)

    late = host.view()
    late.poll()
    host.run(2)

    assert late.records == {"a": b"1"}


async def test_a_suspended_watcher_declares_no_lease_dead(host: Any) -> None:
    view, lease = host.view(), host.lease()
    await lease.put("a", b"1")
    host.run(1)
    view.kinds.clear()

    # The whole host stands still, again and again: nobody can beat, nobody can look.
    for _ in range(3):
        host.time.advance(60)
        view.poll()
    host.run(5)

    assert view.kinds == []


async def test_a_process_that_was_stopped_comes_back_with_its_records(
    host: Any, caplog: pytest.LogCaptureFixture
) -> None:
    view, lease = host.view(), host.lease()
    await lease.put("a", b"1")
    host.run(1)
    host.kill(lease)
    host.run(20)
    assert view.records == {}

    host.alive.append(lease)
    host.run(3)

    assert view.records == {"a": b"1"}
    assert not lease.lost.is_set()
    (told,) = [record.getMessage() for record in caplog.records if f"{lease.id:016x}" in record.getMessage()]
    assert told.endswith("took it for dead, as it had no heartbeat for 3 s; it registers again")


async def test_each_lease_has_its_own_ttl(host: Any) -> None:
    view = host.view()
    short, long = host.lease(ttl=1.5, heartbeat=0.5), host.lease(ttl=12, heartbeat=4)
    await short.put("short", b"")
    await long.put("long", b"")
    host.run(3)
    host.kill(short)
    host.kill(long)

    host.run(2)
    assert set(view.records) == {"long"}
    host.run(12)
    assert view.records == {}


@pytest.mark.parametrize("seconds", [0, 2], ids=["before it noticed", "after it noticed"])
async def test_the_last_to_put_a_key_owns_it(host: Any, seconds: float) -> None:
    view, first, second = host.view(), host.lease(), host.lease()
    await first.put("a", b"first")
    await second.put("a", b"second")
    host.run(seconds)

    await first.remove("a")
    await first.aclose()
    view.poll()
    assert view.records == {"a": b"second"}
    await second.aclose()
    view.poll()
    assert view.records == {}


@pytest.mark.parametrize("wiped", ["the folder", "what is in it"])
async def test_leases_register_again_after_a_wiped_folder_without_false_events(host: Any, wiped: str) -> None:
    view, gone = host.view(), host.lease()
    leases = [host.lease() for _ in range(5)]
    for number, lease in enumerate([*leases, gone]):
        await lease.put(f"key/{number}", str(number).encode())
    host.run(2)
    before = dict(view.records)
    view.kinds.clear()

    if wiped == "the folder":
        shutil.rmtree(host.path)
    else:
        for part in host.path.iterdir():
            shutil.rmtree(part) if part.is_dir() else part.unlink()
    host.kill(gone)
    view.poll()
    assert view.kinds == [WatchKind.STALE]
    assert view.records == before

    host.run(3)
    assert view.records == before
    host.run(3)
    assert view.kinds == [WatchKind.STALE, WatchKind.DELETE, WatchKind.FRESH]
    assert view.records == {f"key/{number}": str(number).encode() for number in range(5)}


async def test_a_folder_recreated_between_two_polls_is_noticed(host: Any) -> None:
    view, lease = host.view(), host.lease()
    await lease.put("a", b"1")
    host.run(1)
    view.kinds.clear()

    shutil.rmtree(host.path)
    host.folder().prepare()
    view.poll()
    assert view.records == {"a": b"1"}
    assert view.kinds == [WatchKind.STALE]
    host.run(3)

    assert view.kinds == [WatchKind.STALE, WatchKind.FRESH]


async def test_a_folder_without_its_format_is_mended_by_the_next_heartbeat(host: Any) -> None:
    view, lease = host.view(), host.lease()
    await lease.put("a", b"1")
    host.run(1)
    view.kinds.clear()

    (host.path / "format").unlink()
    host.run(6)

    assert view.records == {"a": b"1"}
    assert view.kinds == [WatchKind.STALE, WatchKind.FRESH]


async def test_a_change_with_an_unchanged_directory_time_is_seen(host: Any) -> None:
    view, lease = host.view(), host.lease()
    await lease.put("a", b"1")
    view.poll()
    before = (host.path / RECORDS).stat()

    # As on a file system whose clock has not ticked since the first look.
    await lease.put("b", b"2")
    os.utime(host.path / RECORDS, ns=(before.st_atime_ns, before.st_mtime_ns))
    view.poll()

    assert view.records == {"a": b"1", "b": b"2"}


async def test_a_lease_that_cannot_register_for_three_ttls_is_lost(host: Any) -> None:
    lease = host.lease()
    await lease.put("a", b"1")
    shutil.rmtree(host.path)
    host.path.write_text("in the way")

    host.run(9)
    await asyncio.sleep(0)
    assert not lease.lost.is_set()
    host.run(4)

    async with asyncio.timeout(5):
        await lease.lost.wait()
    with pytest.raises(CannotConnect, match="lost"):
        await lease.put("a", b"2")


async def test_a_record_that_was_damaged_or_removed_is_mended_by_its_lease(
    host: Any, caplog: pytest.LogCaptureFixture
) -> None:
    view, lease = host.view(), host.lease()
    await lease.put("a", b"1")
    await lease.put("b", b"2")
    host.run(1)
    (host.path / RECORDS / "a").write_bytes(b"garbage")
    (host.path / RECORDS / "b").unlink()
    view.poll()
    assert view.records == {"a": b"1"}, "a file that was changed in its place is found by the next thorough look"
    host.time.advance(1)
    view.poll()
    view.poll()
    assert view.records == {}

    host.run(2)

    assert view.records == {"a": b"1", "b": b"2"}
    assert caplog.text.count("left out") == 1


async def test_an_empty_or_cut_file_is_left_out_with_one_warning_each(
    host: Any, caplog: pytest.LogCaptureFixture
) -> None:
    view, lease = host.view(), host.lease()
    await lease.put("good", b"1")
    data = (host.path / RECORDS / "good").read_bytes()
    for name, content in {"empty": b"", "cut": data[:-1], "good2": data, "huge": b"x" * 100_000}.items():
        (host.path / RECORDS / name).write_bytes(content)
    (host.path / RECORDS / "folder").mkdir()

    host.run(3)

    assert view.records == {"good": b"1"}
    assert [caplog.text.count(f"/{name}' cannot be read") for name in ("empty", "cut", "good2", "huge", "folder")] == [
        1
    ] * 5
