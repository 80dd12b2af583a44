"""Turns: every eligible worker, every rank, no other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from typing import Any, cast

import pytest
from dynamo_core import PluginConfig, PreprocessedRequest, RouterServices, RoutingRequest
from dynamo_core.errors import ServiceOverloaded, Unavailable
from dynamo_plugin_router_round_robin.router import RoundRobinRouter
from dynamo_testing.router.workers import Workers
from hypothesis import given
from hypothesis import strategies as st


def router(pool: Workers) -> RoundRobinRouter:
    services = RouterServices(
        pool=pool,
        tracker=cast(Any, None),
        events=cast(Any, None),
        directory=cast(Any, None),
        metrics=cast(Any, None),
        call=cast(Any, None),
    )
    return RoundRobinRouter(PluginConfig(), services)


def ask(excluded: Collection[int] = ()) -> RoutingRequest:
    return RoutingRequest(PreprocessedRequest(token_ids=[1]), "r", frozenset(excluded))


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 3), st.integers(1, 5))
def test_all_workers_and_all_their_ranks_get_the_same_share(count: int, ranks: int, start: int, laps: int) -> None:
    pool = Workers(count, ranks, start)
    turns = router(pool)

    async def play() -> Counter[tuple[int, int]]:
        shares: Counter[tuple[int, int]] = Counter()
        for _ in range(count * ranks * laps):
            route = await turns.route(ask(), pool)
            shares[route.instance.instance_id, route.dp_rank] += 1
        return shares

    shares = asyncio.run(play())

    assert len(shares) == count * ranks
    assert set(shares.values()) == {laps}
    assert {rank for _, rank in shares} == set(range(start, start + ranks))


async def test_an_excluded_worker_is_passed_over() -> None:
    pool = Workers(3)
    turns = router(pool)

    served = {(await turns.route(ask({2}), pool)).instance.instance_id for _ in range(6)}

    assert served == {1, 3}


async def test_without_workers_the_model_is_unavailable() -> None:
    pool = Workers(0)

    with pytest.raises(Unavailable, match="'m'"):
        await router(pool).route(ask(), pool)


async def test_with_workers_of_which_none_is_eligible_the_service_is_overloaded() -> None:
    pool = Workers(2)

    with pytest.raises(ServiceOverloaded):
        await router(pool).route(ask({1, 2}), pool)
