"""Workers die and wires go bad, and answers move: a client notices at most a pause.

Every scenario holds that each answer is whole and equal to the unbroken run with its seed, that it came in time, that
afterwards nothing is held and new requests are answered; and that there was something to survive.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
from dynamo_testing.faults import Delay, Direction

from tests.chaos.client import Client, Crowd
from tests.chaos.history import Asked, End, check
from tests.chaos.processes import until
from tests.chaos.scenarios import QUIET, TROUBLES, Trouble, one_worker_in_trouble, requests, trouble_all_the_time
from tests.chaos.wire import is_rows

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

MIGRATION_LIMIT = 3

#: Streams that run at once, and unary requests beside them.
STREAMS, UNARY = 50, 4

#: Milliseconds between two tokens: none of so many streams is over before something happens.
ITL = 20

#: Seconds that an answer may take, where brokers and stores share the machine.
PATIENT = 50.0

#: Seconds in which everything about a worker that comes or goes has happened.
SOON = 10.0

#: Over tcp, and over each broker: what is done to processes and stores, whatever goes between them.
EVERYWHERE = pytest.mark.parametrize("profile", ["tcp-file", "nats-etcd", "redis-redis"])


def seeds(asked: list[Asked]) -> set[int]:
    return {one.seed for one in asked}


@pytest.mark.parametrize("trouble", TROUBLES, ids=str)
async def test_trouble_with_one_worker_is_noticed_by_no_client(fleet: Any, expect: Any, trouble: Trouble) -> None:
    async with fleet(migration_limit=MIGRATION_LIMIT, itl=ITL) as workers:
        problems = await one_worker_in_trouble(workers, trouble, expect, streams=STREAMS, unary=UNARY)

        assert problems == [], "\n".join([*problems, workers.logs])


async def test_a_worker_that_is_killed_before_its_first_tokens_arrive_is_replaced(fleet: Any, expect: Any) -> None:
    asked = requests(STREAMS, UNARY, tokens=40)
    expected = await expect(asked)
    async with fleet(migration_limit=MIGRATION_LIMIT, itl=ITL) as workers, Client(workers.url) as client:
        struck, other = workers.workers
        # Requests are accepted, and the answers to them never arrive.
        rule = struck.plan.inject(Delay(60), direction=Direction.DOWN, when=is_rows)
        async with Crowd(client, asked) as crowd:
            await rule.hit()
            await until(lambda: struck.requests.seeds | other.requests.seeds == seeds(asked), SOON)
            reached = set(struck.requests.seeds)
            waiting = {history.asked.seed for history in crowd.histories if not history.events}
            await struck.kill()
            struck.proxy.cut()
            histories = await crowd.end()
        struck.plan.clear()
        struck.start()
        await workers.complete()

        assert len(reached) > UNARY
        assert reached <= waiting
        assert check(histories, expected, {}) == [], workers.logs
        assert await workers.moves() == 0
        assert await workers.quiet(QUIET) == {}


@EVERYWHERE
async def test_an_answer_survives_the_worker_that_went_on_with_it_too(fleet: Any, expect: Any, profile: str) -> None:
    asked = requests(STREAMS, UNARY, deadline=PATIENT)
    expected = await expect(asked)
    async with (
        fleet(profile=profile, workers=3, migration_limit=MIGRATION_LIMIT, itl=ITL) as workers,
        Client(workers.url) as client,
    ):
        first, second, third = workers.workers
        async with Crowd(client, asked) as crowd:
            await crowd.begun()
            left = set(first.requests.seeds)
            await first.kill()
            await until(lambda: left <= second.requests.seeds | third.requests.seeds, SOON)
            left_again = left & second.requests.seeds
            await second.kill()
            histories = await crowd.end()
        for worker in (first, second):
            worker.start()
        await workers.complete()

        assert left_again
        assert left_again <= third.requests.seeds
        assert check(histories, expected, {}) == [], workers.logs
        assert await workers.quiet(QUIET) == {}


@EVERYWHERE
async def test_while_no_worker_is_left_answers_wait_for_one_that_starts(fleet: Any, expect: Any, profile: str) -> None:
    asked = requests(STREAMS, 0, deadline=PATIENT)
    expected = await expect(asked)
    async with (
        fleet(profile=profile, migration_limit=MIGRATION_LIMIT, itl=ITL) as workers,
        Client(workers.url) as client,
    ):
        async with Crowd(client, asked) as crowd:
            await crowd.begun()
            for worker in workers.workers:
                await worker.kill()
            for worker in workers.workers:
                worker.start()
            histories = await crowd.end()
        await workers.complete()

        assert check(histories, expected, {}) == [], workers.logs
        assert await workers.moves() >= STREAMS
        assert await workers.quiet(QUIET) == {}


@EVERYWHERE
async def test_an_emptied_discovery_disturbs_no_answer_and_fills_again(fleet: Any, expect: Any, profile: str) -> None:
    asked, later = requests(STREAMS, UNARY, deadline=PATIENT), requests(6, 4, first=100, tokens=20)
    expected = await expect([*asked, *later])
    async with (
        fleet(profile=profile, migration_limit=MIGRATION_LIMIT, itl=ITL) as workers,
        Client(workers.url) as client,
    ):
        async with Crowd(client, asked) as crowd:
            await crowd.begun()
            workers.servers.wipe()
            async with Crowd(client, later) as others:
                histories = [*await others.end(), *await crowd.end()]
        await workers.complete()

        assert check(histories, expected, {}) == [], workers.logs
        assert await workers.moves() == 0
        assert await workers.quiet(QUIET) == {}


@EVERYWHERE
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to end"])
async def test_a_frontend_that_is_restarted_is_noticed_by_no_client_of_another(
    fleet: Any, expect: Any, number: signal.Signals, profile: str
) -> None:
    asked, theirs = requests(STREAMS, UNARY, deadline=PATIENT), requests(STREAMS, 0, first=100, deadline=PATIENT)
    later = requests(6, 4, first=200, tokens=20)
    expected = await expect([*asked, *theirs, *later])
    async with (
        fleet(profile=profile, frontends=2, migration_limit=MIGRATION_LIMIT, itl=ITL) as workers,
        Client(workers.urls[0]) as client,
        Client(workers.urls[1]) as other,
    ):
        async with Crowd(client, asked) as crowd, Crowd(other, theirs) as own:
            await crowd.begun()
            await own.begun()
            workers.frontends[1].signal(number)
            await workers.frontends[1].gone()
            ended = await own.end()
            workers.frontends[1].start()
            histories = await crowd.end()
        await workers.complete()
        async with Crowd(other, later) as crowd:
            histories += await crowd.end()

        assert check(histories, expected, {}) == [], workers.logs
        assert await workers.moves() == 0
        if number == signal.SIGTERM:
            # It takes nothing new, and brings to an end what it has begun.
            assert check(ended, expected, {}) == []
        else:
            assert [kind for history in ended for _, kind in history.ends] == [End.ABORTED] * STREAMS
        assert await workers.quiet(QUIET) == {}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2])
async def test_clients_notice_no_fault_of_a_series_with_migration(fleet: Any, expect: Any, seed: int) -> None:
    async with fleet(workers=3, migration_limit=MIGRATION_LIMIT) as workers:
        problems = await trouble_all_the_time(workers, expect, rounds=12, seed=seed)

        assert problems == [], "\n".join([*problems, workers.logs])
