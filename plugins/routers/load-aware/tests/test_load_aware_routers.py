"""Which worker is chosen: among which, by what load, and with what chance."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from dynamo_core import PreprocessedRequest, RouterServices, RoutingRequest
from dynamo_core.errors import ServiceOverloaded
from dynamo_core.plugins.loader import PluginLoader
from dynamo_core.protocol import Instance
from dynamo_plugin_router_load_aware.routers import (
    LeastLoadedRouter,
    LoadAwareConfig,
    LoadAwareRouter,
    PowerOfTwoRouter,
    RandomRouter,
)
from dynamo_testing.router.workers import Workers
from hypothesis import given
from hypothesis import strategies as st

ROUTERS: list[type[LoadAwareRouter]] = [RandomRouter, PowerOfTwoRouter, LeastLoadedRouter]

each_router = pytest.mark.parametrize("kind", ROUTERS, ids=lambda kind: kind.NAME)


@dataclass
class Tracker:
    """Loads as written down, and how often they were read."""

    active: Mapping[int, int] = field(default_factory=dict)
    prefill: Mapping[tuple[int, int], int] = field(default_factory=dict)
    held: Mapping[tuple[int, int], int] = field(default_factory=dict)
    looks: int = 0

    def requests(self, instance_id: int) -> int:
        self.looks += 1
        return self.active.get(instance_id, 0)

    def prefill_tokens(self, instance_id: int, dp_rank: int = 0) -> int:
        self.looks += 1
        return self.prefill.get((instance_id, dp_rank), 0)

    def blocks(self, instance_id: int, dp_rank: int = 0) -> int:
        self.looks += 1
        return self.held.get((instance_id, dp_rank), 0)

    def loads(self, ranks: Sequence[tuple[int, int]], chain: Sequence[int] = ()) -> Sequence[tuple[int, int, int]]:
        return [(self.prefill_tokens(*rank), self.blocks(*rank), 0) for rank in ranks]

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        return callback


def make(
    kind: type[LoadAwareRouter], pool: Workers, tracker: Tracker | None = None, seed: int | None = 1
) -> LoadAwareRouter:
    services = RouterServices(
        pool=pool,
        tracker=tracker or Tracker(),
        events=cast(Any, None),
        directory=cast(Any, None),
        metrics=cast(Any, None),
        call=cast(Any, None),
    )
    return kind(LoadAwareConfig(seed=seed), services)


def ask(excluded: Collection[int] = ()) -> RoutingRequest:
    return RoutingRequest(PreprocessedRequest(token_ids=[1]), "r", frozenset(excluded))


async def draw(
    router: LoadAwareRouter, pool: Workers, times: int, excluded: Collection[int] = ()
) -> list[tuple[int, int]]:
    routes = [await router.route(ask(excluded), pool) for _ in range(times)]
    return [(route.instance.instance_id, route.dp_rank) for route in routes]


def assert_even(counts: Counter[Any], kinds: int, times: int) -> None:
    """Assert that every kind came about as often as it should: within six standard deviations, with a fixed seed."""
    share = times / kinds
    deviation = (share * (1 - 1 / kinds)) ** 0.5
    assert len(counts) == kinds
    assert all(abs(count - share) < 6 * deviation for count in counts.values()), counts


@each_router
@given(
    count=st.integers(1, 8),
    excluded=st.sets(st.integers(1, 8)),
    active=st.dictionaries(st.integers(1, 8), st.integers(0, 5)),
    ranks=st.integers(1, 3),
    start=st.integers(0, 2),
    seed=st.integers(),
)
def test_a_chosen_worker_is_eligible_and_has_the_chosen_rank(
    kind: type[LoadAwareRouter],
    count: int,
    excluded: set[int],
    active: dict[int, int],
    ranks: int,
    start: int,
    seed: int,
) -> None:
    pool = Workers(count, ranks, start)
    router = make(kind, pool, Tracker(active), seed)
    left = set(pool.instances) - excluded
    if not left:
        with pytest.raises(ServiceOverloaded):
            asyncio.run(draw(router, pool, 1, excluded))
        return

    drawn = asyncio.run(draw(router, pool, 20, excluded))

    assert {instance_id for instance_id, _ in drawn} <= left
    assert {rank for _, rank in drawn} <= set(range(start, start + ranks))


@each_router
async def test_workers_and_ranks_that_are_alike_get_even_shares(kind: type[LoadAwareRouter]) -> None:
    pool = Workers(5, ranks=2, start=1)

    drawn = await draw(make(kind, pool), pool, 5000)

    assert_even(Counter(drawn), 10, 5000)


@each_router
async def test_the_same_seed_makes_the_same_choices(kind: type[LoadAwareRouter]) -> None:
    pool = Workers(7, ranks=3)

    first = await draw(make(kind, pool, seed=5), pool, 50)
    second = await draw(make(kind, pool, seed=5), pool, 50)
    other = await draw(make(kind, pool, seed=6), pool, 50)

    assert first == second
    assert first != other


async def test_random_ignores_the_load() -> None:
    pool = Workers(4)
    tracker = Tracker({1: 100, 2: 5})

    drawn = await draw(make(RandomRouter, pool, tracker), pool, 4000)

    assert_even(Counter(drawn), 4, 4000)
    assert tracker.looks == 0


@pytest.mark.parametrize("ranking", [(1, 2, 3, 4), (4, 3, 2, 1), (2, 4, 1, 3)])
async def test_power_of_two_takes_the_less_loaded_of_each_pair(ranking: tuple[int, ...]) -> None:
    pool = Workers(4)
    tracker = Tracker({worker: load for load, worker in enumerate(ranking)})

    drawn = Counter(worker for worker, _ in await draw(make(PowerOfTwoRouter, pool, tracker), pool, 6000))

    # Of the six pairs, the least loaded wins three, the next two, the next one; the last can never win.
    assert ranking[3] not in drawn
    for worker, pairs in zip(ranking, (3, 2, 1), strict=False):
        share = 6000 * pairs / 6
        assert abs(drawn[worker] - share) < 6 * (share * (1 - pairs / 6)) ** 0.5


async def test_power_of_two_serves_a_single_worker_however_busy() -> None:
    pool = Workers(3)

    drawn = await draw(make(PowerOfTwoRouter, pool, Tracker({2: 50})), pool, 5, excluded={1, 3})

    assert {worker for worker, _ in drawn} == {2}


@pytest.mark.parametrize("kind", [RandomRouter, PowerOfTwoRouter], ids=lambda kind: kind.NAME)
async def test_the_cost_of_a_choice_is_independent_of_the_number_of_workers(kind: type[LoadAwareRouter]) -> None:
    class Counting(Sequence[Instance]):
        """Eligible workers that count how often one is looked at."""

        def __init__(self, items: Sequence[Instance]) -> None:
            self.items = items
            self.looks = 0

        def __len__(self) -> int:
            return len(self.items)

        def __getitem__(self, index: Any) -> Any:
            self.looks += 1
            return self.items[index]

    looks = set()
    for count in (10, 1000):
        pool, tracker = Workers(count), Tracker()
        eligible = Counting(pool.eligible())
        pool.eligible = lambda excluded=(), eligible=eligible: eligible  # type: ignore[method-assign, misc]
        await make(kind, pool, tracker).route(ask(), pool)
        looks.add((eligible.looks, tracker.looks))

    assert len(looks) == 1


@given(
    active=st.dictionaries(st.integers(1, 6), st.integers(0, 3), min_size=6),
    prefill=st.dictionaries(st.tuples(st.integers(1, 6), st.integers(0, 1)), st.integers(0, 2)),
    seed=st.integers(),
)
def test_least_loaded_takes_the_fewest_requests_then_the_fewest_tokens_to_prefill(
    active: dict[int, int], prefill: dict[tuple[int, int], int], seed: int
) -> None:
    # A worker without requests has nothing to prefill, as on the real tracker.
    prefill = {key: tokens for key, tokens in prefill.items() if active[key[0]]}
    pool = Workers(6, ranks=2)
    router = make(LeastLoadedRouter, pool, Tracker(active, prefill), seed)

    def load(worker: int) -> tuple[int, int]:
        return active[worker], prefill.get((worker, 0), 0) + prefill.get((worker, 1), 0)

    ((worker, _),) = asyncio.run(draw(router, pool, 1))

    assert load(worker) == min(load(other) for other in active)


@pytest.mark.parametrize("kind", [PowerOfTwoRouter, LeastLoadedRouter], ids=lambda kind: kind.NAME)
async def test_the_rank_with_the_least_to_prefill_then_the_fewest_blocks_is_taken(kind: type[LoadAwareRouter]) -> None:
    pool = Workers(1, ranks=4)
    tracker = Tracker(
        active={1: 4},
        prefill={(1, 0): 9, (1, 1): 2, (1, 2): 2, (1, 3): 2},
        held={(1, 0): 0, (1, 1): 7, (1, 2): 3, (1, 3): 3},
    )

    drawn = Counter(rank for _, rank in await draw(make(kind, pool, tracker), pool, 400))

    assert_even(drawn, 2, 400)
    assert set(drawn) == {2, 3}


@each_router
def test_the_router_is_loaded_by_its_name(kind: type[LoadAwareRouter]) -> None:
    assert PluginLoader().load("router", kind.NAME) is kind
