"""The only worker is out of reach for a while, through no fault of its own: every answer is whole all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from dynamo_testing.faults import Cut, Direction

from tests.chaos.client import Client, Crowd
from tests.chaos.history import check
from tests.chaos.processes import ProxiedWorkers
from tests.chaos.scenarios import QUIET, requests

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

#: Streams that run at once, and unary requests beside them.
STREAMS, UNARY = 12, 4

#: Seconds that an answer may take: it waits up to 20 for the worker.
PATIENT = 60.0


async def wire_away(fleet: ProxiedWorkers, seconds: float) -> None:
    """Reset every connection with the worker, or of the worker with the broker, new ones too."""
    plan = fleet.workers[0].plan
    rules = [plan.inject(Cut(), direction=direction, times=None) for direction in Direction]
    fleet.workers[0].proxy.cut()
    await asyncio.sleep(seconds)
    for rule in rules:
        plan.remove(rule)


async def broker_away(fleet: ProxiedWorkers, seconds: float) -> None:
    """Kill the broker, and start it again at the same place, without its data."""
    broker = fleet.servers.broker
    assert broker is not None
    await asyncio.to_thread(broker.kill)
    await asyncio.sleep(seconds)
    await asyncio.to_thread(broker.start)


@pytest.mark.parametrize("seconds", [0.3, 5.0])
@pytest.mark.parametrize(
    ("profile", "away"),
    [
        ("tcp-file", wire_away),
        ("nats-etcd", wire_away),
        ("nats-etcd", broker_away),
        ("redis-redis", wire_away),
        ("redis-redis", broker_away),
    ],
)
async def test_every_answer_of_the_only_worker_is_whole(
    fleet: Any, expect: Any, profile: str, away: Any, seconds: float
) -> None:
    asked = requests(STREAMS, UNARY, deadline=PATIENT)
    expected = await expect(asked)
    async with fleet(profile=profile, workers=1, migration_limit=3, itl=20) as workers, Client(workers.url) as client:
        async with Crowd(client, asked) as crowd:
            await crowd.begun()
            await away(workers, seconds)
            histories = await crowd.end()
        await workers.complete()

        assert check(histories, expected, {}) == [], workers.logs
        assert await workers.moves() >= STREAMS
        assert await workers.quiet(QUIET) == {}
