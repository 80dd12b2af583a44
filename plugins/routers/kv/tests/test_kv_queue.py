"""Requests that wait for room: in order, one by one, never for ever, and nothing is left of those that give up."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from dynamo_core.errors import ServiceOverloaded
from dynamo_plugin_router_kv.queue import RouteQueue


class Room:
    """Places that requests take when they are let go."""

    def __init__(self, places: int = 0, *, timeout: float = 30.0, limit: int = 100) -> None:
        self.places = places
        self.queue = RouteQueue(timeout, limit)
        self.went: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str, order: float = 0.0) -> asyncio.Task[None]:
        self.tasks[name] = task = asyncio.create_task(self._ask(name, order))
        await settle()
        return task

    async def _ask(self, name: str, order: float) -> None:
        await self.queue.wait(lambda: self.places > 0, (0.0, order))
        self.went.append(name)
        self.places -= 1

    async def free(self, places: int) -> None:
        self.places += places
        self.queue.notify()
        await settle()


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def test_requests_do_not_wait_while_there_is_room() -> None:
    room = Room(2)
    await room.ask("a")

    assert room.went == ["a"]
    assert len(room.queue) == 0


async def test_requests_are_released_in_order_of_arrival_up_to_the_room() -> None:
    room = Room()
    for name in "abc":
        await room.ask(name)
    assert (room.went, len(room.queue)) == ([], 3)

    await room.free(2)

    assert (room.went, len(room.queue), room.places) == (["a", "b"], 1, 0)
    await room.free(1)
    assert room.went == ["a", "b", "c"]


async def test_a_lower_order_is_released_first_without_overtaking() -> None:
    room = Room()
    await room.ask("late", 9)
    await room.ask("early", 1)
    room.places = 1
    await room.ask("middle", 5)

    assert room.went == ["early"]
    await room.free(2)
    assert room.went == ["early", "middle", "late"]


async def test_a_cancelled_request_leaves_its_place_to_the_next() -> None:
    room = Room()
    for name in "abc":
        await room.ask(name)
    room.tasks["a"].cancel()
    await settle()
    assert len(room.queue) == 2

    # It has been let go, and is cancelled before it could.
    room.places = 1
    room.queue.notify()
    room.tasks["b"].cancel()
    await settle()

    assert (room.went, len(room.queue)) == (["c"], 0)


async def test_a_wait_over_the_timeout_is_refused() -> None:
    room = Room(timeout=0.01)
    task = await room.ask("a")

    with pytest.raises(ServiceOverloaded):
        await task
    assert len(room.queue) == 0


async def test_no_more_wait_than_allowed() -> None:
    room = Room(limit=2)
    await room.ask("a")
    await room.ask("b")
    task = await room.ask("c")

    with pytest.raises(ServiceOverloaded):
        await task
    await room.free(2)
    assert room.went == ["a", "b"]


async def test_unannounced_room_is_noticed_by_polling() -> None:
    room = Room()
    task = await room.ask("a")
    room.places = 1

    async with asyncio.timeout(5):
        await task


async def test_cancelled_requests_are_dropped_from_the_queue() -> None:
    room = Room()
    await room.ask("first")
    for number in range(200):
        task = await room.ask(f"r{number}", order=1.0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    assert len(room.queue._heap) < 40
    await room.free(1)
    assert room.went == ["first"]


async def test_closing_refuses_waiting_requests() -> None:
    room = Room()
    task = await room.ask("a")

    room.queue.close()

    with pytest.raises(ServiceOverloaded):
        await task
