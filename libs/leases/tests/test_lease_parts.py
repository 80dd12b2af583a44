"""The small parts that discoveries share: heartbeats, polls, failures, times, lines, threads, the start."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from dynamo_core import LoopThread, jitter, wait_for_store
from dynamo_core.errors import CannotConnect, ConfigError
from dynamo_leases.failures import LeaseFailureTracker
from dynamo_leases.heartbeat_thread import HeartbeatThread
from dynamo_leases.lease import HeartbeatLease, new_lease_id
from dynamo_leases.line_decoder import LineDecoder
from dynamo_leases.poller import Poller
from dynamo_leases.records import MAX_KEY, check_record
from dynamo_leases.times import check_times, check_ttl, heartbeat_interval
from hypothesis import given
from hypothesis import strategies as st


class Counting(HeartbeatLease):
    """Beats as fast as it is let, until a test closes it."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(new_lease_id(), ttl=1.0)
        self.fails = fails
        self.beats = 0
        self.enough = threading.Event()

    def beat(self) -> None:
        self.beats += 1
        self.due = time.monotonic() + 0.001
        if self.beats >= 3:
            self.enough.set()
        if self.fails:
            raise RuntimeError("surprise")

    async def put(self, key: str, value: bytes) -> None:
        raise NotImplementedError

    async def remove(self, key: str) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        self._closed = True


async def test_the_heartbeat_thread_beats_while_the_event_loop_is_blocked() -> None:
    thread, lease = HeartbeatThread(), Counting()
    thread.add(lease)

    # The loop cannot run meanwhile.
    assert lease.enough.wait(5)

    thread.stop(5)
    thread.stop(5)
    with pytest.raises(ValueError, match="closed"):
        thread.add(lease)


@pytest.mark.parametrize(("fails", "beats"), [(True, 1), (False, 0)], ids=["fails", "is closed"])
async def test_heartbeats_stop_for_a_closed_lease_only(fails: bool, beats: int) -> None:
    thread, goes, stays = HeartbeatThread(), Counting(fails=fails), Counting()
    if not fails:
        await goes.aclose()
    thread.add(goes)
    thread.add(stays)

    assert stays.enough.wait(5)

    thread.stop(5)
    assert goes.beats == beats


async def test_a_lease_can_be_marked_lost_from_any_thread() -> None:
    lease = Counting()
    await asyncio.to_thread(lease.mark_lost)
    async with asyncio.timeout(5):
        await lease.lost.wait()

    def in_a_loop_that_ends() -> Counting:
        async def make() -> Counting:
            return Counting()

        return asyncio.run(make())

    (await asyncio.to_thread(in_a_loop_that_ends)).mark_lost()


async def test_a_poll_returns_after_a_read_that_began_later() -> None:
    begun, gates = 0, [asyncio.Event(), asyncio.Event()]

    async def poll_once() -> None:
        nonlocal begun
        begun += 1
        await gates[begun - 1].wait()

    poller = Poller(poll_once, 60.0)
    first = asyncio.ensure_future(poller.poll())
    while not begun:  # noqa: ASYNC110
        await asyncio.sleep(0)
    second = asyncio.ensure_future(poller.poll())
    await asyncio.sleep(0)
    gates[0].set()

    async with asyncio.timeout(5):
        await first
        while begun < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not second.done()
        gates[1].set()
        await second
    await poller.aclose()


async def test_a_failed_poll_releases_its_waiters_and_polling_goes_on() -> None:
    looks = asyncio.Queue[None]()

    async def poll_once() -> None:
        looks.put_nowait(None)
        raise RuntimeError("surprise")

    poller = Poller(poll_once, 0.01)
    async with asyncio.timeout(5):
        await poller.poll()
        for _ in range(3):
            await looks.get()
    await poller.aclose()
    await poller.poll()


async def test_closing_releases_the_waiters_of_a_poll() -> None:
    async def poll_once() -> None:
        await asyncio.Event().wait()

    poller = Poller(poll_once, 60.0)
    waiting = [asyncio.ensure_future(poller.poll()) for _ in range(2)]
    await asyncio.sleep(0.01)

    await poller.aclose()

    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)


def test_only_consecutive_failures_lose_a_lease() -> None:
    failures, error = LeaseFailureTracker(1, 10.0), CannotConnect("no")

    assert not failures.failed(error, 0.0, counts=True)
    assert not failures.failed(error, 10.0, counts=True)
    assert not failures.failed(error, 11.0, counts=False)
    assert not failures.failed(error, 12.0, counts=True)
    failures.succeeded()
    assert not failures.failed(error, 30.0, counts=True)
    assert not failures.failed(error, 40.0, counts=True)
    assert failures.failed(error, 40.1, counts=True)


@given(st.floats(0.001, 1000), st.floats(0, 2), st.floats(0, 2))
def test_a_spread_lies_between_its_ends(seconds: float, least: float, more: float) -> None:
    assert least * seconds * 0.999 <= jitter(seconds, least, least + more) <= (least + more) * seconds * 1.001


def test_heartbeats_come_at_least_twice_in_a_ttl() -> None:
    assert heartbeat_interval(9.0, None) == 3.0
    assert heartbeat_interval(9.0, 1.0) == 1.0
    assert heartbeat_interval(1.0, 3.0) == 0.5


def test_settings_that_do_not_fit_into_the_ttl_are_named() -> None:
    check_times(9.0, 3, poll=3.0, heartbeat=None)
    with pytest.raises(ValueError, match=r"^poll \(3\.1 s\) must be at most a third of ttl \(9 s\)$"):
        check_times(9.0, 3, heartbeat=1.0, poll=3.1)
    with pytest.raises(ValueError, match=r"^heartbeat \(5 s\) must be at most half of ttl \(9 s\)$"):
        check_times(9.0, 2, heartbeat=5.0)
    for ttl in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="more than 0 seconds"):
            check_ttl(ttl)


def test_invalid_record_keys_and_values_are_refused() -> None:
    check_record("k" * MAX_KEY, b"")
    with pytest.raises(ValueError, match="must not be empty"):
        check_record("", b"")
    with pytest.raises(ValueError, match="longer than 1024 bytes"):
        check_record("é" * 513, b"")
    with pytest.raises(ValueError, match="has 65537 bytes, more than 65536"):
        check_record("a", b"x" * 65537)


@given(st.lists(st.binary(max_size=20)), st.integers(1, 7))
def test_lines_are_decoded_the_same_however_cut(parts: list[bytes], size: int) -> None:
    data = b"\n".join(part.replace(b"\n", b"") for part in parts) + b"\n"
    lines, found = LineDecoder(), list[bytes]()

    for start in range(0, len(data), size):
        found += lines.feed(data[start : start + size])

    assert found == [line for line in data.split(b"\n") if line.strip()]


def test_a_line_without_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynamo_leases import line_decoder

    monkeypatch.setattr(line_decoder, "MAX_LINE", 10)
    reader = LineDecoder()
    reader.feed(b"12345678\n")
    with pytest.raises(ValueError, match="more than 10 bytes"):
        reader.feed(b"12345678901")


async def test_a_loop_thread_runs_while_the_callers_loop_is_blocked() -> None:
    closed = threading.Event()

    async def closing() -> None:
        closed.set()

    thread, done = LoopThread("directory-test", closing), threading.Event()

    async def work() -> None:
        await asyncio.sleep(0.01)
        done.set()

    async def forever() -> None:
        await asyncio.Event().wait()

    background = asyncio.ensure_future(thread.run(work()))
    await asyncio.sleep(0)
    assert done.wait(5)
    await background
    endless = asyncio.ensure_future(thread.run(forever()))
    await asyncio.sleep(0.01)
    await asyncio.to_thread(thread.stop, 5)

    with pytest.raises(ValueError, match="closed"):
        await endless
    with pytest.raises(ValueError, match="closed"):
        await thread.run(work())
    assert closed.is_set()
    assert not any(other.name == "directory-test" for other in threading.enumerate())


async def test_a_starting_process_waits_for_its_store() -> None:
    tries = 0

    async def probe() -> None:
        nonlocal tries
        tries += 1
        if tries < 2:
            raise CannotConnect("not there yet")

    await wait_for_store(probe, timeout=10, hopeless=lambda error: None, unreachable="url: {}")

    assert tries == 2


async def test_a_starting_process_does_not_wait_on_permanent_errors() -> None:
    async def probe() -> None:
        raise CannotConnect("wrong password")

    with pytest.raises(ConfigError, match="set the password"):
        await wait_for_store(
            probe, timeout=60, hopeless=lambda error: ConfigError("set the password"), unreachable="url: {}"
        )
    with pytest.raises(CannotConnect, match=r"^url: wrong password; start it$"):
        await wait_for_store(probe, timeout=0, hopeless=lambda error: None, unreachable="url: {}; start it")


async def test_a_starting_process_logs_each_reason_of_its_wait_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reasons = ["refused", "refused", "loading", "refused", "loading"]
    told: list[str] = []

    async def probe() -> str:
        if reasons:
            raise CannotConnect(reasons.pop(0))
        return "there"

    found = await wait_for_store(probe, timeout=20, what="a store", unreachable="url: {}", tell=told.append)

    assert found == "there"
    assert told == ["refused", "refused", "loading", "refused", "loading", ""]
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["refused", "loading"]
