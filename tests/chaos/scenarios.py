"""Trouble with one of several workers while a crowd runs, and what must hold whatever the trouble was.

`migration_limit` says which promise is held: 0, and what ran on the worker in trouble may break, with an error; more,
and every answer must be whole and equal to an unbroken run.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dynamo_testing.faults import (
    BlackHole,
    Corrupt,
    Cut,
    Delay,
    Direction,
    Drop,
    Duplicate,
    Fault,
    HalfOpen,
    Reorder,
    Throttle,
)

from tests.chaos.client import Client, Crowd
from tests.chaos.history import DEADLINE, Answer, Asked, Outcome, check, judge
from tests.chaos.processes import ProxiedWorkers, Worker
from tests.chaos.wire import is_anything, is_last, is_published, is_rows, is_running, is_taken

DOWN, UP = Direction.DOWN, Direction.UP

#: Seconds in which all is given back after the last answer: the two that a stopped engine has, the second that /metrics
#: is cached for, and room for a slow machine. What a silent connection holds comes on top.
QUIET = 2 + 1 + 5

#: Tokens of an answer that still runs when something happens, at 10 ms each.
LONG = 200

#: Seconds after which a worker that has failed must be asked again: the ten for which it is passed over, and some room.
PASSED_OVER = 15.0

Act = Callable[[Worker], Awaitable[Any]]


class Effect(Enum):
    """What a trouble does to the requests that run on its worker, if nothing moves them to another."""

    ALL = "every one of them is broken"
    SOME = "one at least is broken"
    NONE = "none notices more than a pause"


@dataclass(frozen=True)
class Trouble:
    """Something done to a worker, or to the wire to it, and how it is put right."""

    name: str
    strike: Act
    effect: Effect = Effect.ALL
    mend: Act | None = None

    def __str__(self) -> str:
        return self.name


def wire(
    name: str,
    fault: Fault,
    direction: Direction,
    when: Callable[[bytes], bool],
    *,
    at: int = 20,
    times: int | None = 1,
    effect: Effect = Effect.ALL,
) -> Trouble:
    """Return a fault at a chosen frame."""

    async def strike(worker: Worker) -> None:
        await worker.plan.inject(fault, direction=direction, when=when, at=at, times=times).hit()

    async def mend(worker: Worker) -> None:
        worker.plan.clear()

    return Trouble(name, strike, effect, mend)


async def kill(worker: Worker) -> None:
    await worker.kill()


async def restart(worker: Worker) -> None:
    worker.start()


async def freeze(worker: Worker) -> None:
    worker.signal(signal.SIGSTOP)


async def thaw(worker: Worker) -> None:
    worker.signal(signal.SIGCONT)


TROUBLES = [
    Trouble("killed", kill, mend=restart),
    Trouble("frozen", freeze, mend=thaw),
    wire("cut", Cut(), DOWN, is_rows),
    wire("cut in the middle of a frame", Cut(keep=7), DOWN, is_rows),
    wire("a frame of rows dropped", Drop(), DOWN, is_running, effect=Effect.SOME),
    wire("a frame of rows doubled", Duplicate(), DOWN, is_running, effect=Effect.SOME),
    # Between the last rows of a stream and its end there may be a frame of others, and then nothing is lost: so always.
    wire("last rows after the next frame", Reorder(), DOWN, is_last, at=0, times=None, effect=Effect.SOME),
    wire("a frame of rows corrupted", Corrupt(), DOWN, is_running),
    wire("a frame to the worker dropped", Drop(), UP, is_taken, effect=Effect.SOME),
    wire("a frame to the worker doubled", Duplicate(), UP, is_taken, effect=Effect.SOME),
    wire("a frame to the worker corrupted", Corrupt(), UP, is_taken),
    wire("a black hole", BlackHole(), DOWN, is_rows),
    wire("half open, answers lost", HalfOpen(), DOWN, is_rows),
    wire("half open, questions lost", HalfOpen(), UP, is_taken),
    wire("late by less than the silence", Delay(0.5), DOWN, is_rows, effect=Effect.NONE),
    wire("slow", Throttle(20_000), DOWN, is_rows, effect=Effect.NONE),
]

#: What can happen between a worker and a broker, where no frame is known; and the connections that it has.
BROKER_TROUBLES = [
    Trouble("killed", kill, mend=restart),
    Trouble("frozen", freeze, mend=thaw),
    wire("cut", Cut(), UP, is_published),
    # Of every connection, also of one that is made meanwhile.
    wire("a black hole", BlackHole(), UP, is_published, times=None),
    wire("half open, answers lost", HalfOpen(), UP, is_published, times=None),
    wire("half open, questions lost", HalfOpen(), DOWN, is_anything, times=None),
]


def requests(
    streams: int, unary: int, *, first: int = 0, tokens: int = LONG, deadline: float = DEADLINE
) -> list[Asked]:
    """Stream, then unary requests; no two are alike, or end together."""
    return [
        Asked(first + number, f"question {number}", tokens + 5 * number, stream=number < streams, deadline=deadline)
        for number in range(streams + unary)
    ]


def allowed(asked: Asked, *, whole: bool, migration_limit: int) -> set[Outcome]:
    """Return what a request may become that ran on a worker in trouble; `whole`: also what it must be elsewhere."""
    broken = Outcome.BROKEN if asked.stream else Outcome.FAILED
    if migration_limit:
        return {Outcome.WHOLE}
    # Nobody sees whether a request that is no stream had its first token: before it, another worker may begin anew.
    return {broken, Outcome.WHOLE} if whole or not asked.stream else {broken}


async def one_worker_in_trouble(
    fleet: ProxiedWorkers,
    trouble: Trouble,
    expect: Callable[..., Awaitable[Mapping[int, Answer]]],
    *,
    streams: int = 8,
    unary: int = 4,
    deadline: float = DEADLINE,
) -> list[str]:
    """Strike the first worker while a crowd runs on all of them; what is wrong with what came of it."""
    asked = requests(streams, unary, deadline=deadline)
    later = requests(6, 4, first=100, tokens=20, deadline=deadline)
    expected = await expect([*asked, *later])
    struck = fleet.workers[0]
    async with Client(fleet.url) as client:
        async with Crowd(client, asked) as crowd:
            await crowd.begun()
            over = [history for history in crowd.histories if history.ends]
            reached = [one for one in asked if one.seed in struck.requests.seeds]
            await trouble.strike(struck)
            histories = await crowd.end()
        if trouble.mend is not None:
            await trouble.mend(struck)
        await fleet.complete()
        async with Crowd(client, later) as crowd:
            afterwards = await crowd.end()
    held = await fleet.quiet(QUIET)
    moves = await fleet.moves()

    may: dict[int, Collection[Outcome]] = {}
    if trouble.effect is not Effect.NONE:
        whole = trouble.effect is not Effect.ALL
        may = {one.seed: allowed(one, whole=whole, migration_limit=fleet.migration_limit) for one in reached}
    problems = check([*histories, *afterwards], expected, may)
    if over or not 0 < len(reached) < len(asked):
        problems.append(f"of {len(asked)} requests {len(over)} were over too early, {len(reached)} on the worker")
    if bool(moves) != (trouble.effect is not Effect.NONE and fleet.migration_limit > 0):
        problems.append(f"{moves:.0f} answers were moved")
    if trouble.effect is not Effect.NONE and not fleet.migration_limit:
        outcomes = {judge(history, expected[history.asked.seed])[0] for history in histories}
        if outcomes == {Outcome.WHOLE}:
            problems.append("nothing was broken: the trouble was none")
    problems += [f"not the request's own ids: {line}" for line in fleet.misattributed]
    return problems + [f"still held: {name} = {value}" for name, value in held.items()]


async def asked_again(client: Client, worker: Worker, numbers: Iterator[int], *, within: float = PASSED_OVER) -> None:
    """Return when a worker gets requests: one that has failed is passed over for a while."""
    async with asyncio.timeout(within):
        while True:
            sent = {next(numbers) for _ in range(4)}
            await asyncio.gather(*(client.ask(Asked(seed, max_tokens=1, stream=False)) for seed in sent))
            if worker.requests.seeds & sent:
                return
            await asyncio.sleep(0.2)


async def trouble_all_the_time(
    fleet: ProxiedWorkers, expect: Callable[..., Awaitable[Mapping[int, Answer]]], *, rounds: int, seed: int
) -> list[str]:
    """Strike one worker after the other, in an order that `seed` draws, under clients of every kind."""
    dice = random.Random(seed)
    problems: list[str] = []
    numbers = itertools.count(1000 * rounds)
    for turn in range(rounds):
        trouble, struck = dice.choice(TROUBLES), dice.choice(fleet.workers)
        asked = requests(dice.randint(6, 12), dice.randint(1, 5), first=1000 * turn, tokens=dice.randint(100, LONG))
        expected = await expect(asked)
        async with Client(fleet.url) as client:
            await asked_again(client, struck, numbers)
            async with Crowd(client, asked, leaving=dice.randint(0, 3)) as crowd:
                await crowd.begun()
                before = set(struck.requests.seeds)
                await trouble.strike(struck)
                crowd.leave()
                histories = await crowd.end()
            if trouble.mend is not None:
                await trouble.mend(struck)
        await fleet.complete()
        may = {one.seed: {Outcome.LEFT} for one in crowd.leaving}
        for one in asked:
            # A request that another worker's death sends here has not been seen before, and begins anew.
            if one.seed in before and trouble.effect is not Effect.NONE:
                may.setdefault(one.seed, set()).update(allowed(one, whole=True, migration_limit=fleet.migration_limit))
        for one in crowd.leaving:
            may[one.seed].add(Outcome.WHOLE)
        problems += [f"round {turn}, {trouble}: {what}" for what in check(histories, expected, may)]
    held = await fleet.quiet(QUIET)
    return problems + [f"still held: {name} = {value}" for name, value in held.items()]
