"""What leases and watches do when the API server goes away, forgets, falls silent, or wants to be left alone."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest
from dynamo_core import WatchKind
from dynamo_core.errors import CannotConnect
from dynamo_plugin_discovery_kubernetes import store as stores
from dynamo_plugin_discovery_kubernetes import view as views

from plugins.conftest import until

STALE, FRESH = WatchKind.STALE, WatchKind.FRESH


@pytest.mark.parametrize("empty", [False, True], ids=["with its data", "empty"])
async def test_after_an_outage_over_the_ttl_leases_return_with_the_same_id(
    api: Any, make: Any, see: Any, empty: bool
) -> None:
    owner, seen = make(ttl=1.0, timeout=0.3, lost_after=0.1), see(make(ttl=1.0, timeout=0.3))
    lease = await owner.lease()
    await lease.put("a", b"1")
    await lease.put("b", b"2")
    await seen.shows({"a": b"1", "b": b"2"})
    name = api.names("leases")
    await api.stop()
    await seen.hears(STALE)
    with pytest.raises(CannotConnect, match=r"^Kubernetes at http://127\.0\.0\.1:\d+ cannot be reached: "):
        await lease.put("c", b"3")
    # That nobody is taken for dead meanwhile can only be seen by waiting.
    await asyncio.sleep(1.5)

    if empty:
        await api.empty()
    await api.start()
    await seen.hears(FRESH)

    assert seen.records == {"a": b"1", "b": b"2"}
    assert WatchKind.DELETE not in seen.kinds
    await until(lambda: api.names("leases") == name and len(api.names("configmaps")) == 2)
    await see(make()).shows({"a": b"1", "b": b"2"})
    assert not lease.lost.is_set()


async def test_a_process_that_died_during_an_outage_is_gone_after_it(api: Any, make: Any, see: Any) -> None:
    dies, stays, seen = make(), make(), see(make())
    await (await dies.lease(1.0)).put("dies", b"")
    await (await stays.lease(1.0)).put("stays", b"")
    await seen.shows({"dies": b"", "stays": b""})
    await api.stop()
    await seen.hears(STALE)
    dies._thread.stop(5)

    await api.start()
    await seen.hears(FRESH)

    await seen.shows({"stays": b""})


@pytest.mark.parametrize("by_status", [False, True], ids=["told as an event", "told as a status"])
async def test_an_expired_watch_version_causes_a_new_listing_without_staleness(
    api: Any, make: Any, see: Any, by_status: bool
) -> None:
    api.gone_by_status = by_status
    other, seen = make(), see(make())
    await other.put_value("goes", b"")
    await other.put_value("changes", b"old")
    await seen.shows({"goes": b"", "changes": b"old"})
    await seen.hears(WatchKind.SYNCED)
    await until(lambda: api.watched == {"leases", "configmaps"})
    # Watches are open from before, and silent: what happens now must come from a new listing.
    api.silence()
    await other.put_value("goes", None)
    await other.put_value("changes", b"new")
    await api.forget()

    await seen.shows({"changes": b"new"})
    await other.put_value("later", b"")
    await seen.shows({"changes": b"new", "later": b""})

    assert STALE not in seen.kinds


async def test_a_broken_watch_resumes_at_its_version(api: Any, make: Any, see: Any) -> None:
    other, seen = make(), see(make())
    await other.put_value("a", b"1")
    await seen.shows({"a": b"1"})
    await seen.hears(WatchKind.SYNCED)
    await until(lambda: api.watched == {"leases", "configmaps"})
    before = len(api.requests)

    api.silence()
    await other.put_value("a", b"2")
    await api.cut_watches()
    await seen.shows({"a": b"2"})

    assert len(api.asked("GET", "configmaps", watch=True, since=before)) == 1
    assert api.asked("GET", "configmaps", watch=False, since=before) == []
    assert STALE not in seen.kinds


async def test_a_bookmark_moves_the_place_from_which_a_watch_goes_on(api: Any, make: Any, see: Any) -> None:
    seen = see(make(watch_timeout=1.0))
    await seen.hears(WatchKind.SYNCED)
    await until(lambda: api.watched == {"leases", "configmaps"})
    await api.bookmark()
    marked = api.version

    def moved() -> bool:
        watches = api.asked("GET", "configmaps", watch=True)
        return any(int(url.query["resourceVersion"]) >= marked for url in watches)

    # The server ends it after a second.
    await until(moved)
    before = len(api.requests)
    await api.forget()
    await make().put_value("a", b"1")

    await seen.shows({"a": b"1"})
    assert api.asked("GET", "configmaps", watch=False, since=before) == []


async def test_watches_that_fall_silent_are_found_out_and_opened_anew(api: Any, make: Any, see: Any) -> None:
    other, seen = make(), see(make())
    lease = await other.lease()
    await seen.hears(WatchKind.SYNCED)
    await until(lambda: api.watched == {"leases", "configmaps"})
    api.silence()

    await lease.put("a", b"1")
    await seen.shows({"a": b"1"})

    assert STALE not in seen.kinds


async def test_a_lease_without_watch_events_is_read_before_it_counts_as_dead(api: Any, make: Any, see: Any) -> None:
    lease, seen = await make().lease(1.0), see(make(ttl=60.0))
    await lease.put("a", b"1")
    await seen.shows({"a": b"1"})
    await until(lambda: api.watched == {"leases", "configmaps"})

    api.silence("leases")
    # Longer than the lease would live without its heartbeats.
    await asyncio.sleep(1.6)
    await make().put_value("mark", b"")
    await seen.until(lambda: "mark" in seen.records)

    assert WatchKind.DELETE not in seen.kinds


async def test_a_server_that_wants_a_pause_gets_it(api: Any, make: Any) -> None:
    discovery = make(ttl=9.0, timeout=3.0)
    await discovery.start()
    begun = time.monotonic()
    before = len(api.requests)
    api.throttle(1, 1)

    await discovery.put_value("a", b"1")

    assert len(api.requests) == before + 2
    assert time.monotonic() - begun >= 1
    assert api.names("configmaps") != []


async def test_a_pause_that_is_too_long_to_wait_for_is_an_error_and_kept_all_the_same(api: Any, make: Any) -> None:
    discovery = make()
    await discovery.start()
    api.throttle(1, 30)

    with pytest.raises(CannotConnect, match=r"asks for a pause of (29|3\d)\.\d s"):
        await discovery.put_value("a", b"1")
    before = len(api.requests)
    with pytest.raises(CannotConnect, match="asks for a pause of"):
        await discovery.put_value("a", b"1")

    assert len(api.requests) == before


async def test_a_lease_that_others_touch_at_the_same_time_is_renewed_all_the_same(
    api: Any, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await make().lease()
    name = api.names("leases")[0]

    def renewed() -> str:
        return str(api.objects["leases", "default"][name]["spec"]["renewTime"])

    first = renewed()
    api.conflict(2)
    await until(lambda: not api._conflicts and renewed() != first)

    assert not lease.lost.is_set()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_values_that_two_write_at_the_same_time_are_those_of_the_last(api: Any, make: Any, see: Any) -> None:
    one, other = make(), make()
    await one.put_value("a", b"1")
    await other.put_value("a", b"2")
    await other.put_value("a", None)
    await one.put_value("a", b"3")
    api.conflict(1)
    await one.put_value("a", b"4")

    await see(make()).shows({"a": b"4"})
    assert len(api.names("configmaps")) == 1


async def test_a_lease_and_a_record_that_somebody_has_removed_come_back_under_the_same_id(
    api: Any, make: Any, see: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "LOOK_EVERY", 2)
    lease = await make().lease()
    await lease.put("a", b"1")
    seen = see(make())
    await seen.shows({"a": b"1"})
    names = api.names("leases"), api.names("configmaps")

    for resource, (name,) in zip(("leases", "configmaps"), names, strict=True):
        await api.delete(resource, name)
        await seen.shows({})
        await seen.shows({"a": b"1"})

    assert (api.names("leases"), api.names("configmaps")) == names


async def test_a_record_that_was_never_confirmed_is_taken_back(
    api: Any, make: Any, see: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "LOOK_EVERY", 10_000)
    owner = make()
    lease, seen = await owner.lease(), see(make())
    real = stores.Store._ask

    async def lose_the_answer(self: Any, method: str, path: str, *rest: Any, **more: Any) -> Any:
        answer = await real(self, method, path, *rest, **more)
        if method == "POST" and path.endswith("configmaps"):
            raise CannotConnect("the answer was lost")
        return answer

    monkeypatch.setattr(stores.Store, "_ask", lose_the_answer)
    with pytest.raises(CannotConnect, match="the answer was lost"):
        await lease.put("a", b"1")
    await seen.shows({"a": b"1"})

    await seen.shows({})


async def test_leases_and_records_vanish_with_their_pod(api: Any, make: Any, see: Any) -> None:
    await api.put("pods", {"metadata": {"name": "worker-0"}})
    owner, seen = make(pod="worker-0", ttl=60.0), see(make(ttl=60.0))
    await (await owner.lease()).put("a", b"1")
    await seen.shows({"a": b"1"})
    owner._thread.stop(5)

    await api.delete("pods", "worker-0")

    await seen.shows({})
    assert api.names("leases") == api.names("configmaps") == []


async def test_objects_of_a_dead_process_are_deleted_by_others(
    api: Any, make: Any, see: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "CLEAR_AFTER", 1.2)
    owner, seen = make(), see(make(ttl=1.0, timeout=0.3))
    await (await owner.lease(1.0)).put("a", b"1")
    await seen.shows({"a": b"1"})
    owner._thread.stop(5)

    await seen.shows({})
    await until(lambda: api.names("leases") == api.names("configmaps") == [])


async def test_a_lease_that_has_been_renewed_meanwhile_is_not_cleared_away(api: Any, make: Any) -> None:
    from dynamo_plugin_discovery_kubernetes.objects import lease_fact

    discovery = make()
    await discovery.lease()
    name = api.names("leases")[0]
    old = lease_fact(api.objects["leases", "default"][name])
    assert old is not None
    await until(lambda: api.objects["leases", "default"][name]["metadata"]["resourceVersion"] != str(old.version))

    await discovery._thread.run(discovery._session.store.clear_away(old))

    assert api.names("leases") == [name]


async def test_a_lease_that_is_refused_for_too_long_is_lost(api: Any, make: Any) -> None:
    lease = await make(lost_after=0.5).lease()
    api.tokens["all"] = set()

    async with asyncio.timeout(20):
        await lease.lost.wait()

    with pytest.raises(CannotConnect, match="the lease is lost"):
        await lease.put("a", b"1")


async def test_long_listings_come_in_pages_and_are_begun_anew_if_the_server_forgets_their_version(
    api: Any, make: Any, see: Any
) -> None:
    discovery = make()
    for number in range(7):
        await discovery.put_value(f"k{number}", b"")
    api.page_limit = 3
    api.expire_pages(1)

    await see(make()).shows({f"k{number}": b"" for number in range(7)})


async def test_other_prefixes_and_namespaces_are_invisible(api: Any, make: Any, see: Any) -> None:
    api.namespaces.add("elsewhere")
    await make(prefix="other").put_value("a", b"1")
    await make(namespace="elsewhere").put_value("b", b"2")
    await make().put_value("c", b"3")

    seen = see(make())
    await seen.hears(WatchKind.SYNCED)

    assert seen.records == {"c": b"3"}


async def test_foreign_objects_with_the_label_are_left_out(
    api: Any, make: Any, see: Any, caplog: pytest.LogCaptureFixture
) -> None:
    labels = {"discovery.dynamo/system": "dynamo", "discovery.dynamo/lease": "not a number".replace(" ", "-")}
    seen = see(make())
    await seen.hears(WatchKind.SYNCED)
    for resource in ("leases", "configmaps"):
        await api.put(resource, {"metadata": {"name": "foreign", "labels": labels}})
    await make().put_value("c", b"3")

    await seen.shows({"c": b"3"})
    late = see(make())
    await late.hears(WatchKind.SYNCED)

    assert late.records == {"c": b"3"}
    assert "'foreign' cannot be read and is left out" in caplog.text


async def test_a_lease_stays_alive_while_the_event_loop_is_blocked(api: Any, make: Any, see: Any) -> None:
    owner, watcher = make(), make()
    lease = await owner.lease(1.0)
    await lease.put("a", b"1")
    seen = see(watcher)
    await seen.shows({"a": b"1"})

    # An engine that loads its weights without giving way.
    time.sleep(1.6)  # noqa: ASYNC251
    await owner.put_value("mark", b"")
    await seen.until(lambda: "mark" in seen.records)

    assert WatchKind.DELETE not in seen.kinds
    assert not lease.lost.is_set()
