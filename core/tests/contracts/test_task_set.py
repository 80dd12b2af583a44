from __future__ import annotations

import asyncio

import pytest
from dynamo_core import tasks as module
from dynamo_core.tasks import TaskSet

DEADLINE = 10.0


async def test_a_task_is_kept_while_it_runs_and_returns_its_result() -> None:
    tasks = TaskSet()
    gate = asyncio.Event()

    async def work() -> str:
        await gate.wait()
        return "done"

    task = tasks.spawn(work(), name="work")
    assert (len(tasks), task.get_name()) == (1, "work")
    gate.set()

    assert await asyncio.wait_for(task, DEADLINE) == "done"
    await asyncio.sleep(0)
    assert len(tasks) == 0


async def test_a_task_that_fails_is_reported_by_name(caplog: pytest.LogCaptureFixture) -> None:
    tasks = TaskSet()

    async def fail() -> None:
        raise ZeroDivisionError("why")

    tasks.spawn(fail(), name="doomed")

    assert await tasks.join(DEADLINE)
    assert "task doomed failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_a_task_that_is_cancelled_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    tasks = TaskSet()
    task = tasks.spawn(asyncio.Event().wait(), name="idle")

    task.cancel()

    assert await tasks.join(DEADLINE)
    assert not caplog.records


async def test_join_returns_whether_all_tasks_ended_and_cancels_none() -> None:
    tasks = TaskSet()
    gate = asyncio.Event()
    task = tasks.spawn(gate.wait(), name="slow")

    assert not await tasks.join(0)
    assert not task.done()
    gate.set()

    assert await tasks.join(DEADLINE)
    assert not task.cancelled()


async def test_join_of_nothing_returns_at_once() -> None:
    assert await TaskSet().join(0)


async def test_aclose_returns_when_every_finally_has_run() -> None:
    tasks = TaskSet()
    started = asyncio.Event()
    steps: list[str] = []

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            steps.append("cleaned")

    tasks.spawn(work(), name="work")
    await asyncio.wait_for(started.wait(), DEADLINE)

    await tasks.aclose()

    assert steps == ["cleaned"]
    assert len(tasks) == 0
    await tasks.aclose()


async def test_a_task_may_close_the_set_it_runs_in() -> None:
    tasks = TaskSet()
    other = tasks.spawn(asyncio.Event().wait(), name="other")

    async def closer() -> str:
        await tasks.aclose()
        return "survived"

    task = tasks.spawn(closer(), name="closer")

    assert await asyncio.wait_for(task, DEADLINE) == "survived"
    assert other.cancelled()


async def test_a_task_that_swallows_its_cancelling_is_cancelled_again_and_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN", 0.01)
    tasks = TaskSet()
    swallowed = asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            swallowed.set()
        await asyncio.Event().wait()

    task = tasks.spawn(stubborn(), name="stubborn")
    await asyncio.sleep(0)

    await asyncio.wait_for(tasks.aclose(), DEADLINE)

    assert swallowed.is_set()
    assert task.cancelled()
    assert "task stubborn goes on" in caplog.text
