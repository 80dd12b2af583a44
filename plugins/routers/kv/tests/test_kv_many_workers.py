"""Many workers that come and go: each costs the same, however many there are."""

from __future__ import annotations

import time
from typing import cast

import pytest
from dynamo_plugin_router_kv.config import KvConfig
from dynamo_plugin_router_kv.router import KvRouter
from dynamo_testing.router.harness import Fleet

WORKERS = 300


async def cost(workers: int, **settings: object) -> float:
    """Return the processor time in which so many workers come, each telling of its cache, and go all at once."""
    fleet = Fleet(lambda services: KvRouter(KvConfig.model_validate(settings), services), 10.0)
    router = cast(KvRouter, fleet.router)
    fleet.events.send = lambda subject, payload: router._on_message(1, payload)  # type: ignore[method-assign]
    begun = time.process_time()
    for worker in range(workers):
        fleet.add(worker)
        fleet.tell(worker, range(4))
    await fleet.route()
    for worker in range(1, workers):
        fleet.pool.remove(worker)
    await fleet.route()
    return time.process_time() - begun


@pytest.mark.parametrize("kv_events", [True, False], ids=["events", "guesses"])
async def test_twice_as_many_workers_cost_about_twice_as_much(kv_events: bool) -> None:
    some = min([await cost(WORKERS, kv_events=kv_events) for _ in range(3)])
    twice = min([await cost(2 * WORKERS, kv_events=kv_events) for _ in range(3)])

    assert twice < 3 * some
