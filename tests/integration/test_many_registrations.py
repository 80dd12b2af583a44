"""Hundreds of workers that come and go, held by few processes: all are known, all are routed to, none that left is."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from dynamo_core import EngineContext, PreprocessedRequest, Principal

from benchmarks.registrations import ROUTERS, Fleet, Watcher, directory

SIZES = [33, *(pytest.param(size, marks=pytest.mark.full) for size in (200, 1000))]
#: Workers that leave, one after the other, each followed by one that comes.
CHURN = 10

numbers = count()


async def world(discovery: str, folder: Path, stack: AsyncExitStack, router: str) -> tuple[Fleet, Watcher]:
    """Return workers that are still to come, and a frontend that watches them; over files each looks for itself."""
    workers = await stack.enter_async_context(directory(discovery, str(folder) if discovery == "file" else None))
    frontends = workers
    if discovery == "file":
        frontends = await stack.enter_async_context(directory(discovery, str(folder)))
    watcher = Watcher(frontends, stack, router)
    return Fleet(workers), watcher


async def ask(watcher: Watcher) -> None:
    """Send one request and read its answer."""
    request = PreprocessedRequest(model="many", token_ids=[1, 2, 3])
    stream = await watcher.model.generate(request, EngineContext(f"r{next(numbers)}"), Principal())
    try:
        async for _ in stream:
            pass
    finally:
        await stream.aclose()


async def ask_many(watcher: Watcher, requests: int) -> Counter[int]:
    """Send so many requests, ten at a time; return how many each worker answered."""
    before = Counter(watcher.answered)
    for _ in range(requests // 10):
        await asyncio.gather(*(ask(watcher) for _ in range(10)))
    return Counter(watcher.answered) - before


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("discovery", ["memory", "file"])
async def test_all_are_known_and_served_in_turn_while_some_come_and_go(
    discovery: str, size: int, tmp_path: Path, stack: AsyncExitStack
) -> None:
    fleet, watcher = await world(discovery, tmp_path / "discovery", stack, "round-robin")
    await watcher.serve(await fleet.add(size))
    watcher.models.start()
    await watcher.until(lambda: len(watcher.known) == size)
    assert watcher.known == set(fleet.leases)

    gone = set()
    for _ in range(CHURN):
        left, came = await fleet.churn()
        await watcher.serve([came])
        gone.add(left)
        await watcher.until(lambda: watcher.known == set(fleet.leases))
        await ask(watcher)
    assert watcher.known == set(fleet.leases)
    assert (watcher.announced.count("dynamo_instance_added"), watcher.announced.count("dynamo_instance_removed")) == (
        size + CHURN,
        CHURN,
    )

    answered = await ask_many(watcher, size // 10 * 10)
    assert max(answered.values()) == 1, "each in its turn"
    assert not gone & answered.keys()
    assert watcher.tracker.total_requests == 0

    # Most leave at once.
    rest = await leave_but(fleet, 3)
    await watcher.until(lambda: watcher.known == rest)
    assert set(await ask_many(watcher, 30)) == rest


async def leave_but(fleet: Fleet, number: int) -> set[int]:
    ids = list(fleet.leases)
    await fleet.remove(ids[:-number])
    return set(ids[-number:])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("router", ROUTERS)
async def test_every_router_finds_the_workers_that_are_there(
    router: str, size: int, tmp_path: Path, stack: AsyncExitStack
) -> None:
    fleet, watcher = await world("memory", tmp_path, stack, router)
    await watcher.serve(await fleet.add(size))
    watcher.models.start()
    await watcher.until(lambda: len(watcher.known) == size)
    gone = list(fleet.leases)[: size // 2]
    await fleet.remove(gone)
    await watcher.until(lambda: watcher.known == set(fleet.leases))

    asked = 2 * size // 10 * 10
    answered: Any = await ask_many(watcher, asked)

    assert answered.keys() <= fleet.leases.keys()
    # About four requests for each of those who are left: none is preferred by much.
    assert len(answered) > 0.8 * len(fleet.leases)
    assert sum(answered.values()) == asked
    assert watcher.tracker.total_requests == 0


async def test_loop_runs_on_while_a_whole_fleet_leaves(tmp_path: Path, stack: AsyncExitStack) -> None:
    fleet, watcher = await world("memory", tmp_path, stack, "round-robin")
    await fleet.add(1000)
    watcher.models.start()
    await watcher.until(lambda: len(watcher.known) == 1000)
    loop, turns, seen = asyncio.get_running_loop(), count(), set()

    def turn() -> None:
        seen.add((next(turns), len(watcher.pool.instances)) if watcher.models.list() else (next(turns), 0))
        ticking[0] = loop.call_soon(turn)

    ticking = [loop.call_soon(turn)]
    await asyncio.gather(*(lease.aclose() for lease in fleet.leases.values()))
    await watcher.until(lambda: not watcher.models.list())
    ticking[0].cancel()

    # Between none gone and all gone there were turns in which some were.
    assert {left for _, left in seen} - {0, 1000}
