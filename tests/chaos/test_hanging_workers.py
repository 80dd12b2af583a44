"""Workers that hang in every way and every phase: how soon their requests are given up, and what becomes of them.

A process that is suspended, or behind a wire that is half open, is given up within the life of its lease and two
seconds; an engine that is frozen behind a live event loop within the stall timeout and two seconds, and never without
one. Requests without a token are then answered by another worker, whatever the migration limit.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.client import Client, Crowd
from tests.chaos.hanging import (
    HANGS,
    MODELS,
    Hang,
    HangingFleet,
    Struck,
    all_are_asked,
    crowd_of,
    kill_and_strike,
)
from tests.chaos.history import History, Outcome, check

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

#: Seconds beyond the promise for a machine that is busy with ten processes.
ROOM = 5.0

#: Seconds for which an engine is frozen that nothing gives up.
FROZEN = 8.0

#: Seconds for which tokens may be under way from a worker that has been struck.
UNDER_WAY = 1.0

#: Seconds in which every request must have ended.
DEADLINE = 75.0

STALL = 5.0

PROFILES = ["tcp-file", "nats-etcd", "redis-redis"]


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Callable[..., HangingFleet]]:
    """Make fleets; `async with` runs one."""
    made: list[HangingFleet] = []

    def make(profile: str, **settings: Any) -> HangingFleet:
        made.append(HangingFleet(tmp_path, profile, **settings))
        return made[-1]

    yield make
    for fleet in made:
        fleet.abandon()


@pytest.mark.parametrize("stall", [None, STALL], ids=["no stall timeout", "stall timeout"])
@pytest.mark.parametrize("profile", PROFILES)
async def test_a_hanging_worker_times_out_and_its_requests_migrate(
    hanging: Any, expect: Any, report: list[str], profile: str, stall: float | None
) -> None:
    numbers = itertools.count(1, 100)
    async with hanging(profile, stall=stall) as fleet:
        for hang in HANGS:
            await one_hang(fleet, hang, expect, report, stall, next(numbers))
            for model in MODELS:
                fleet.workers[model][0].start()
            await fleet.complete()


async def one_hang(
    fleet: HangingFleet, hang: Hang, expect: Any, report: list[str], stall: float | None, first: int
) -> None:
    """Hang a worker of both models while a crowd is on it, and check what became of the crowd."""
    asked = [one for at, model in enumerate(MODELS) for one in crowd_of(model, first + 50 * at, DEADLINE)]
    expected = await expect(asked)
    async with Client(fleet.url) as client:
        await all_are_asked(fleet, client, itertools.count(10_000 * first))
    async with Client(fleet.url) as client, Crowd(client, asked) as crowd:
        histories = {history.asked.seed: history for history in crowd.histories}
        for history in crowd.histories:
            if history.asked.stream and len(history.asked.prompt) < 1000:
                await history.begun.wait()
        struck = dict(
            zip(MODELS, await asyncio.gather(*(_strike(fleet, m, hang, histories) for m in MODELS)), strict=True)
        )
        struck_at = asyncio.get_running_loop().time()
        given_up = bound(fleet, hang, stall)
        if given_up is None:
            await asyncio.sleep(FROZEN)
            early = {model: _given_up(fleet, model, histories, one, struck_at) for model, one in struck.items()}
            assert early == {model: {} for model in MODELS}, fleet.logs
            await _mend(fleet, hang)
        await crowd.end()
        ended = asyncio.get_running_loop().time()
    if given_up is not None:
        await _mend(fleet, hang)

    problems = _unheld(fleet, hang, struck)
    for model, limit in MODELS.items():
        mine = [history for history in crowd.histories if history.asked.model == model]
        problems += check(mine, expected, _allowed(mine, limit, struck[model], struck_at, thawed=given_up is None))
        if given_up is None:
            continue
        waits = _given_up(fleet, model, histories, struck[model], struck_at)
        late = {seed: wait for seed, wait in waits.items() if wait > given_up + ROOM}
        problems += [f"{model}: request {seed} was given up after {wait:.1f} s" for seed, wait in late.items()]
        took = f"{len(waits)} given up after {min(waits.values()):.1f} to {max(waits.values()):.1f} s"
        report.append(f"{fleet.profile}, {hang}, {model}: {took}, promised {given_up:.0f} s")
    report.append(f"{fleet.profile}, {hang}: all requests ended {ended - struck_at:.1f} s after the strike")
    assert problems == [], "\n".join([*problems, fleet.logs])


async def _strike(fleet: HangingFleet, model: str, hang: Hang, histories: dict[int, History]) -> Struck:
    mine = {seed: history for seed, history in histories.items() if history.asked.model == model}
    return await kill_and_strike(fleet, model, hang, mine)


async def _mend(fleet: HangingFleet, hang: Hang) -> None:
    for workers in fleet.workers.values():
        await hang.mend(workers[1])


def bound(fleet: HangingFleet, hang: Hang, stall: float | None) -> float | None:
    """Return seconds within which the promise is that a worker is given up; None: never."""
    promises = [] if hang.alive else [fleet.lease + 2]
    if stall is not None:
        promises.append(stall + 2)
    return min(promises, default=None)


def _given_up(
    fleet: HangingFleet, model: str, histories: dict[int, History], struck: Struck, struck_at: float
) -> dict[int, float]:
    """Return seconds after which each request that was struck came to the third worker, or ended.

    It may have done neither.
    """
    waits = {}
    third = fleet.workers[model][2].requests.times
    for seed in struck.all:
        ends = [at for at, _ in histories[seed].ends]
        times = [at for at in (*ends, third.get(seed)) if at is not None]
        if times:
            waits[seed] = min(times) - struck_at
    return waits


def _unheld(fleet: HangingFleet, hang: Hang, struck: dict[str, Struck]) -> list[str]:
    """Return which phases had no request, so that nothing was shown of them."""
    problems = []
    for model, limit in MODELS.items():
        phases = {
            "its own before the first token": struck[model].own_before_first,
            "its own in mid-answer": struck[model].own_in_mid_answer,
            "moved, before the first token": struck[model].moved_before_first,
        }
        if limit:
            phases["moved in mid-answer"] = struck[model].moved_in_mid_answer
        problems += [f"{hang}: {model} had no request {phase}" for phase, seeds in phases.items() if not seeds]
    return problems


def _allowed(
    histories: list[History], limit: int, struck: Struck, struck_at: float, *, thawed: bool
) -> dict[int, set[Outcome]]:
    """Return the allowed outcomes of requests that do not migrate: of the killed worker, and those struck."""
    if limit:
        return {}
    allowed = {}
    for history in histories:
        seed = history.asked.seed
        if thawed and seed in struck.all:
            continue
        # The first tokens of some were under way when the worker was struck.
        begun = any('"content"' in event and at < struck_at + UNDER_WAY for at, event in history.events)
        if seed in struck.own_before_first | struck.moved_before_first and history.asked.stream and not begun:
            continue
        # Of the worker that was killed, or struck in mid-answer; or it had never to do with either.
        allowed[seed] = {Outcome.BROKEN if history.asked.stream else Outcome.FAILED, Outcome.WHOLE}
    return allowed
