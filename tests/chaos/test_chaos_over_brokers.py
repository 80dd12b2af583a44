"""Over a message broker: workers die, ways to the broker go bad, brokers and stores go away and forget. Answers move.

As in `test_chaos_with_migration.py`, each answer must be whole and equal to the unbroken run, and in time, and nothing
may be held afterwards; where the broker stays away for longer than answers wait for it, whatever breaks must say so.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from tests.chaos.client import Client, Crowd
from tests.chaos.history import Asked, Outcome, check
from tests.chaos.scenarios import BROKER_TROUBLES, QUIET, Trouble, asked_again, one_worker_in_trouble, requests

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

#: How every fleet here runs: answers move, and none of so many streams is over before something happens.
SETTINGS: dict[str, Any] = {"migration_limit": 3, "itl": 20}

#: Streams that run at once, and unary requests beside them.
STREAMS, UNARY = 50, 4

#: Seconds in which a worker finds out by itself that its way to the broker is dead, and is asked again.
FOUND_OUT = 40.0

#: Seconds that an answer may take: the broker, the store and more processes share the machine with those over tcp.
PATIENT = 50.0

OVER_BROKERS = pytest.mark.parametrize("profile", ["nats-etcd", "redis-redis"])


@OVER_BROKERS
@pytest.mark.parametrize("trouble", BROKER_TROUBLES, ids=str)
async def test_trouble_between_one_worker_and_the_broker_is_noticed_by_no_client(
    fleet: Any, expect: Any, trouble: Trouble, profile: str
) -> None:
    async with fleet(profile=profile, **SETTINGS) as workers:
        problems = await one_worker_in_trouble(workers, trouble, expect, streams=STREAMS, unary=UNARY, deadline=PATIENT)

        assert problems == [], "\n".join([*problems, workers.logs])
        async with Client(workers.url) as client:
            await asked_again(client, workers.workers[0], itertools.count(10_000), within=FOUND_OUT)


async def asked_around_an_outage(expect: Any) -> tuple[list[Asked], list[Asked], list[Asked], Any]:
    """Return what is asked before the outage, during it, and after it; and the answers to expect."""
    asked = requests(STREAMS, UNARY, deadline=PATIENT)
    meanwhile, later = (requests(6, 4, first=first, tokens=20, deadline=PATIENT) for first in (100, 200))
    return asked, meanwhile, later, await expect([*asked, *meanwhile, *later])


@OVER_BROKERS
@pytest.mark.parametrize("away", [0, 10])
async def test_a_broker_that_is_away_and_comes_back_empty_breaks_no_answer(
    fleet: Any, expect: Any, profile: str, away: int
) -> None:
    asked, meanwhile, later, expected = await asked_around_an_outage(expect)
    async with fleet(profile=profile, **SETTINGS) as workers, Client(workers.url) as client:
        async with Crowd(client, asked) as crowd:
            await crowd.begun()
            running = [history for history in crowd.histories if not history.ends]
            workers.servers.broker.kill()
            async with Crowd(client, meanwhile) as others:
                await asyncio.sleep(away)
                await asyncio.to_thread(workers.servers.broker.start)
                histories = [*await others.end(), *await crowd.end()]
        await workers.complete()
        async with Crowd(client, later) as crowd:
            histories += await crowd.end()

        # Of a unary request the first token may not have come yet: such ones wait less, as new ones do.
        early = [*meanwhile, *(one for one in asked if not one.stream)]
        may = {one.seed: {Outcome.FAILED, Outcome.WHOLE} for one in early} if away else {}
        assert check(histories, expected, may) == [], workers.logs
        assert len(running) == STREAMS + UNARY
        assert await workers.moves() >= STREAMS
        assert await workers.quiet(QUIET) == {}


@pytest.mark.parametrize("profile", ["nats-etcd", "tcp-redis"])
async def test_a_store_that_is_away_for_a_minute_is_noticed_by_no_client(fleet: Any, expect: Any, profile: str) -> None:
    # They take longer than the minute.
    asked = requests(STREAMS, UNARY, tokens=400, deadline=180)
    rounds = [requests(6, 4, first=100 * turn, tokens=10, deadline=PATIENT) for turn in range(1, 7)]
    later = requests(6, 4, first=1000, tokens=10, deadline=PATIENT)
    expected = await expect(itertools.chain(asked, *rounds, later))
    async with fleet(profile=profile, **SETTINGS | {"itl": 200}) as workers, Client(workers.url) as client:
        store = workers.servers.store
        async with Crowd(client, asked) as crowd:
            await crowd.begun()
            store.kill()
            histories = []
            for turn in rounds:
                pause = asyncio.create_task(asyncio.sleep(10))
                async with Crowd(client, turn) as others:
                    histories += await others.end()
                await pause
            running = [history for history in crowd.histories if not history.ends]
            await asyncio.to_thread(store.start)
            async with Crowd(client, later) as others:
                histories += [*await others.end(), *await crowd.end()]
        await workers.complete()

        assert check(histories, expected, {}) == [], workers.logs
        assert running
        assert await workers.moves() == 0
        assert await workers.quiet(QUIET) == {}


@OVER_BROKERS
async def test_a_broker_outage_breaks_answers_with_errors_and_recovers(fleet: Any, expect: Any, profile: str) -> None:
    asked, meanwhile, later, expected = await asked_around_an_outage(expect)
    async with fleet(profile=profile, **SETTINGS) as workers, Client(workers.url) as client:
        async with Crowd(client, asked) as crowd:
            await crowd.begun()
            workers.servers.broker.kill()
            back = asyncio.create_task(asyncio.sleep(60))
            async with Crowd(client, meanwhile) as others:
                histories = [*await others.end(), *await crowd.end()]
            assert not back.done()
            held = await workers.quiet(QUIET)
            await back
        await asyncio.to_thread(workers.servers.broker.start)
        await workers.complete()
        async with Crowd(client, later) as crowd:
            histories += await crowd.end()

        may = {one.seed: {Outcome.BROKEN if one.stream else Outcome.FAILED} for one in asked}
        may |= {one.seed: {Outcome.FAILED} for one in meanwhile}
        assert check(histories, expected, may) == [], workers.logs
        assert held == {}
        assert await workers.quiet(QUIET) == {}
