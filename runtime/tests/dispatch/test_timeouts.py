"""FixedTimeouts go off in time and in order, with one timer; a bounded block ends as with `asyncio.timeout`."""

from __future__ import annotations

import asyncio
import logging

import pytest
from dynamo_runtime.dispatch.timeouts import FixedTimeouts

LONG = 60.0


async def test_alarms_go_off_in_the_order_in_which_they_were_set_except_those_taken_back() -> None:
    timeouts = FixedTimeouts(0.02)
    rang: list[str] = []
    over = asyncio.Event()
    for name in "abc":
        number = timeouts.set(lambda name=name: rang.append(name))  # type: ignore[misc]
        if name == "b":
            timeouts.cancel(number)
            timeouts.cancel(number)
    timeouts.set(over.set)

    async with asyncio.timeout(10):
        await over.wait()

    assert rang == ["a", "c"]
    assert len(timeouts) == 0


async def test_a_timeout_that_is_set_after_another_was_taken_back_goes_off_in_its_own_time() -> None:
    timeouts = FixedTimeouts(0.06)
    timeouts.cancel(timeouts.set(lambda: None))
    await asyncio.sleep(0.03)
    over = asyncio.Event()

    begun = asyncio.get_running_loop().time()
    timeouts.set(over.set)
    async with asyncio.timeout(10):
        await over.wait()

    assert asyncio.get_running_loop().time() - begun >= 0.055


async def test_a_timeout_may_set_the_next_one() -> None:
    timeouts = FixedTimeouts(0.005)
    over = asyncio.Event()

    def again() -> None:
        timeouts.set(over.set)

    timeouts.set(again)

    async with asyncio.timeout(10):
        await over.wait()


async def test_a_failing_timeout_does_not_stop_others(caplog: pytest.LogCaptureFixture) -> None:
    timeouts = FixedTimeouts(0.005)
    over = asyncio.Event()

    def fail() -> None:
        raise ValueError("no")

    timeouts.set(fail)
    timeouts.set(over.set)
    with caplog.at_level(logging.ERROR):
        async with asyncio.timeout(10):
            await over.wait()

    assert "deadline failed" in caplog.text


async def test_a_bounded_block_is_cancelled_with_a_timeout_error() -> None:
    timeouts = FixedTimeouts(0.01)
    cancelled = False

    async def work() -> None:
        nonlocal cancelled
        try:
            await asyncio.sleep(LONG)
        finally:
            cancelled = True

    with pytest.raises(TimeoutError), timeouts.timeout():
        await work()

    assert cancelled
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_block_that_ends_in_time_leaves_nothing_behind() -> None:
    timeouts = FixedTimeouts(LONG)

    with timeouts.timeout():
        await asyncio.sleep(0)
    with pytest.raises(KeyError), timeouts.timeout():
        raise KeyError

    assert len(timeouts) == 0


async def test_a_block_that_is_cancelled_from_outside_stays_cancelled() -> None:
    timeouts = FixedTimeouts(LONG)
    inside = asyncio.Event()

    async def work() -> None:
        with timeouts.timeout():
            inside.set()
            await asyncio.sleep(LONG)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(work())
        await inside.wait()
        task.cancel()

    assert task.cancelled()
    assert len(timeouts) == 0


async def test_a_block_that_is_late_and_cancelled_from_outside_stays_cancelled() -> None:
    timeouts = FixedTimeouts(0.005)
    inside = asyncio.Event()

    async def work() -> None:
        with timeouts.timeout():
            inside.set()
            try:
                await asyncio.sleep(LONG)
            finally:
                current = asyncio.current_task()
                assert current is not None
                current.cancel()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(work())
        await inside.wait()

    assert task.cancelled()
