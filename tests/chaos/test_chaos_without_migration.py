"""Workers die and wires go bad, and answers do not move: what breaks says so, and no other request notices.

Every scenario holds that each request ends once and in time, that what came of an answer is the beginning of the
unbroken one, that a stream which says ``[DONE]`` is whole, and that afterwards nothing is held and new requests are
answered.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from tests.chaos.client import Client, Crowd
from tests.chaos.history import Outcome, check, judge
from tests.chaos.scenarios import TROUBLES, Trouble, one_worker_in_trouble, requests, trouble_all_the_time

MIGRATION_LIMIT = 0

#: What every run of the tests shows; the others take minutes together.
SAMPLE = {"killed"}


def marked(trouble: Trouble) -> Any:
    return pytest.param(trouble, id=str(trouble), marks=() if trouble.name in SAMPLE else pytest.mark.full)


@pytest.mark.parametrize("trouble", [marked(one) for one in TROUBLES])
async def test_a_faulty_worker_breaks_only_its_own_requests(fleet: Any, expect: Any, trouble: Trouble) -> None:
    async with fleet(migration_limit=MIGRATION_LIMIT) as workers:
        problems = await one_worker_in_trouble(workers, trouble, expect)

        assert problems == [], "\n".join([*problems, workers.logs])


@pytest.mark.full
async def test_answers_of_a_frozen_worker_end_with_the_life_of_its_lease(fleet: Any, expect: Any) -> None:
    asked = requests(6, 0)
    async with fleet(migration_limit=MIGRATION_LIMIT, silence=None) as workers, Client(workers.url) as client:
        async with Crowd(client, asked) as crowd:
            await crowd.begun()
            frozen = asyncio.get_running_loop().time()
            workers.workers[0].signal(signal.SIGSTOP)
            histories = await crowd.end()
        workers.workers[0].signal(signal.SIGCONT)

        expected = await expect(asked)
        assert check(histories, expected, {one.seed: {Outcome.BROKEN, Outcome.WHOLE} for one in asked}) == []
        lost = [one for one in histories if judge(one, expected[one.asked.seed])[0] is Outcome.BROKEN]
        assert lost
        # The lease lives for 2 s, and calls end within 2 s more; the rest is for a machine that is busy.
        assert max(one.ends[0][0] - frozen for one in lost) < 2 + 2 + 4


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_series_of_faults_breaks_only_affected_requests(fleet: Any, expect: Any, seed: int) -> None:
    async with fleet(workers=3, migration_limit=MIGRATION_LIMIT) as workers:
        problems = await trouble_all_the_time(workers, expect, rounds=12, seed=seed)

        assert problems == [], "\n".join([*problems, workers.logs])
