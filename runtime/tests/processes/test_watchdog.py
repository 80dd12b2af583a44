"""The thread that ends a process: when it does, and when it must not."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from dynamo_runtime.processes.watchdog import Watchdog, stacks


class Ends:
    """Takes the place of the process's end."""

    def __init__(self) -> None:
        self.why: list[str] = []
        self.come = threading.Event()

    def __call__(self, why: str) -> None:
        self.why.append(why)
        self.come.set()

    async def wait(self) -> bool:
        return await asyncio.to_thread(self.come.wait, 10)


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., tuple[Watchdog, Ends]]]:
    made: list[tuple[Watchdog, Ends]] = []

    def start(deadline: float = 60, **how: Any) -> tuple[Watchdog, Ends]:
        ends = Ends()
        watchdog = Watchdog(deadline, end=ends, **how)
        watchdog.start()
        made.append((watchdog, ends))
        return made[-1]

    yield start
    for watchdog, ends in made:
        if ends.why:
            watchdog._thread.join(5)
        watchdog.close()


async def test_the_deadline_ends_a_process_that_expects_its_end(make: Callable[..., tuple[Watchdog, Ends]]) -> None:
    watchdog, ends = make(0.05)

    watchdog.expect_end()
    watchdog.expect_end()

    assert await ends.wait()
    assert ends.why == ["not stopped within 0.05 s"]


async def test_the_deadline_outlives_the_loop(make: Callable[..., tuple[Watchdog, Ends]]) -> None:
    watchdog, ends = make(0.05)

    watchdog.expect_end()
    watchdog.close()

    assert await ends.wait()


async def test_a_fired_watchdog_closes_its_sockets(
    make: Callable[..., tuple[Watchdog, Ends]],
) -> None:
    watchdog, ends = make(0.05)

    watchdog.expect_end()
    watchdog.close()
    await ends.wait()
    await asyncio.to_thread(watchdog._thread.join, 10)

    assert watchdog._ours.fileno() == watchdog._theirs.fileno() == -1


async def test_a_stuck_loop_ends_the_process_with_all_stacks(
    make: Callable[..., tuple[Watchdog, Ends]], caplog: pytest.LogCaptureFixture
) -> None:
    watchdog, ends = make()
    watchdog.watch_loop(0.2)

    stood = ends.come.wait(10)

    assert stood
    assert ends.why == ["the event loop stood still for 0.2 s"]
    assert "MainThread" in caplog.text
    assert "test_a_stuck_loop" in caplog.text


async def test_a_loop_that_goes_on_is_left_alone(make: Callable[..., tuple[Watchdog, Ends]]) -> None:
    watchdog, ends = make()
    watchdog.watch_loop(0.8)

    for _ in range(100):
        await asyncio.sleep(0.01)

    assert not ends.why


async def test_a_loop_may_take_its_time_once_the_end_is_expected(
    make: Callable[..., tuple[Watchdog, Ends]],
) -> None:
    watchdog, ends = make(1.0)
    watchdog.watch_loop(0.1)

    watchdog.expect_end()
    ends.come.wait(10)

    assert ends.why == ["not stopped within 1 s"]


async def test_a_closed_watchdog_never_fires_and_its_thread_ends(
    make: Callable[..., tuple[Watchdog, Ends]],
) -> None:
    watchdog, ends = make()
    watchdog.watch_loop(0.1)

    watchdog.close()
    watchdog.close()
    watchdog._thread.join(5)

    assert not watchdog._thread.is_alive()
    assert not ends.why


@asynccontextmanager
async def hearing(watchdog: Watchdog, sent: signal.Signals) -> AsyncIterator[None]:
    """Yield a watchdog that listens to SIGUSR1, and a signal that is sent and that the loop has heard in the end."""
    heard = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(sent, heard.set)
    watchdog.listen_to([signal.SIGUSR1])
    try:
        os.kill(os.getpid(), sent)
        yield
        async with asyncio.timeout(5):
            await heard.wait()
    finally:
        watchdog.forget_signals()
        loop.remove_signal_handler(sent)


async def test_a_signal_starts_the_deadline_of_a_stuck_loop(
    make: Callable[..., tuple[Watchdog, Ends]],
) -> None:
    watchdog, ends = make(0.05)
    async with hearing(watchdog, signal.SIGUSR1):
        while_still = ends.come.wait(10)

    assert while_still


async def test_other_signals_reach_the_loop_and_start_nothing(make: Callable[..., tuple[Watchdog, Ends]]) -> None:
    watchdog, ends = make(0.05)
    async with hearing(watchdog, signal.SIGUSR2):
        pass

    assert watchdog._ends_at is None
    assert not ends.why


async def test_another_wakeup_descriptor_is_left_where_it_is(make: Callable[..., tuple[Watchdog, Ends]]) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: None)
    watchdog, _ = make()
    watchdog.listen_to([signal.SIGUSR1])
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)

    watchdog.forget_signals()

    there = signal.set_wakeup_fd(-1)
    loop.remove_signal_handler(signal.SIGUSR1)
    os.close(reader)
    os.close(writer)
    assert before != writer
    assert there == writer


def test_stacks_show_the_main_thread_first_and_every_other_by_name() -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="somebody", daemon=True)
    thread.start()
    time.sleep(0)

    text = stacks()
    go.set()
    thread.join(5)

    assert text.startswith("Thread MainThread:")
    assert "Thread somebody:" in text


async def test_an_interrupted_start_has_its_own_deadline_and_log(
    make: Callable[..., tuple[Watchdog, Ends]], caplog: pytest.LogCaptureFixture
) -> None:
    watchdog, ends = make(60, interrupted=0.05, doing=lambda: "loading weights")

    with caplog.at_level("INFO"):
        watchdog.expect_end(hurried=True)

    assert await ends.wait()
    assert ends.why == ["not stopped within 0.05 s: loading weights"]
    assert "interrupted while starting: loading weights" in caplog.text


async def test_ctrl_c_brings_the_deadline_of_a_start_forward(make: Callable[..., tuple[Watchdog, Ends]]) -> None:
    watchdog, ends = make(60, interrupted=0.05)

    watchdog.expect_end()
    watchdog.expect_end(hurried=True)

    assert await ends.wait()


@pytest.mark.parametrize("hurried", [True, False], ids=["with Ctrl-C", "otherwise"])
async def test_a_process_that_has_started_has_the_whole_deadline(
    make: Callable[..., tuple[Watchdog, Ends]], hurried: bool
) -> None:
    watchdog, ends = make(60, interrupted=0.2)

    watchdog.expect_end(hurried=hurried)
    watchdog.started()
    watchdog.expect_end(hurried=True)

    assert not await asyncio.to_thread(ends.come.wait, 0.5)
