"""Closing last first, whatever becomes of each part."""

from __future__ import annotations

import asyncio

import pytest
from dynamo_core.resources import AsyncResource, ClosingStack
from dynamo_core.tasks import TaskSet


class Part(AsyncResource):
    """Notes that it was closed, and may wait or fail meanwhile."""

    def __init__(self, name: str, closed: list[str], error: Exception | None = None) -> None:
        self.name = name
        self.closed = closed
        self.error = error
        self.closing = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def aclose(self) -> None:
        self.closing.set()
        await self.go_on.wait()
        self.closed.append(self.name)
        if self.error is not None:
            raise self.error


async def test_a_resource_is_closed_where_its_block_ends() -> None:
    closed: list[str] = []

    async with Part("a", closed) as part:
        assert (part.name, closed) == ("a", [])

    assert closed == ["a"]


async def test_tasks_end_with_the_block_also_if_it_raises() -> None:
    tasks = TaskSet()
    task = tasks.spawn(asyncio.Event().wait(), name="waits")

    with pytest.raises(ValueError, match="on purpose"):
        async with tasks:
            raise ValueError("on purpose")

    assert task.cancelled()


async def test_the_last_part_is_closed_first_and_all_of_them_once() -> None:
    closed: list[str] = []
    stack = ClosingStack("the test")
    for name in "abc":
        stack.enter(Part(name, closed))

    await stack.aclose()
    await stack.aclose()

    assert closed == ["c", "b", "a"]
    assert not stack.cut


async def test_a_part_that_fails_is_logged_and_keeps_no_other_from_being_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed: list[str] = []
    stack = ClosingStack("the test")
    stack.enter(Part("a", closed))
    stack.enter(Part("b", closed, RuntimeError("on purpose")))
    stack.push("wait for the third", Part("c", closed, TimeoutError()).aclose)

    await stack.aclose()

    assert closed == ["c", "b", "a"]
    assert [record.message for record in caplog.records] == [
        "the test could not wait for the third in time",
        "the test could not close its Part",
    ]


async def test_cancellation_ends_the_patience_but_skips_no_step(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[str] = []
    cuts: list[bool] = []
    stack = ClosingStack("the test")
    stack.enter(Part("a", closed, RuntimeError("after the cut")))

    async def note() -> None:
        cuts.append(stack.cut)

    stack.push("note", note)
    held = stack.enter(Part("b", closed))
    held.go_on.clear()
    stack.push("note", note)

    closing = asyncio.create_task(stack.aclose())
    await held.closing.wait()
    closing.cancel()

    with pytest.raises(asyncio.CancelledError):
        await closing
    assert closed == ["a"]
    assert cuts == [False, True]
    assert "the test could not close its Part" in caplog.text


async def test_an_inner_stack_sets_its_stage_when_closed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    stages: list[str] = []
    stack = ClosingStack("the test")

    async def note() -> None:
        stages.append(stack.stage)

    last, first = stack.part("the end"), stack.part("the beginning of the end")
    last.push("note", note)
    first.push("note", note)
    stack.push("note", note)

    await stack.aclose()

    assert stages == ["", "the beginning of the end", "the end"]
    assert caplog.messages == stages[1:]


async def test_cancellation_within_a_part_cuts_the_whole_stack() -> None:
    closed: list[str] = []
    stack = ClosingStack("the test")
    stack.enter(Part("a", closed))
    part = stack.part("the end")
    part.enter(Part("b", closed))
    held = part.enter(Part("c", closed))
    held.go_on.clear()

    closing = asyncio.create_task(stack.aclose())
    await held.closing.wait()
    closing.cancel()

    with pytest.raises(asyncio.CancelledError):
        await closing
    assert closed == ["b", "a"]
    assert stack.cut
