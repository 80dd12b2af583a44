"""Which worker a session has: whose it stays, how many one can have, and what the inner router has to say."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from dynamo_core import (
    Phase,
    PluginConfig,
    PluginRef,
    PoolView,
    PreprocessedRequest,
    Principal,
    Route,
    Router,
    RouterServices,
    RoutingRequest,
    ScoredRank,
    no_worker,
)
from dynamo_core.errors import ServiceOverloaded, Unavailable
from dynamo_core.protocol import Instance, ModelCard, RuntimeConfig
from dynamo_plugin_router_affinity.rendezvous_hash import within_bound
from dynamo_plugin_router_affinity.router import AffinityConfig, AffinityRouter
from dynamo_runtime.dispatch.load.tracker import LoadTracker, Reservation
from dynamo_telemetry import Metrics
from hypothesis import given
from hypothesis import strategies as st

SESSIONS = [f"session-{number}" for number in range(300)]


class Fleet:
    """Workers as a pool shows them; `sizes` says how many requests each runs at once, None if it does not say."""

    model = "m"
    role = "aggregated"
    version = 1

    def __init__(self, sizes: Mapping[int, int | None], ranks: int = 1) -> None:
        self.instances = {number: Instance(instance_id=number) for number in sizes}
        self.cards = {
            number: ModelCard(
                name="m",
                instance_id=number,
                runtime_config=RuntimeConfig(max_num_seqs=size, data_parallel_size=ranks, data_parallel_start_rank=1),
            )
            for number, size in sizes.items()
        }
        self.in_service = self.instances.keys()
        self.gone: set[int] = set()

    def eligible(self, excluded: Collection[int] = ()) -> Sequence[Instance]:
        return [one for one in self.instances.values() if one.instance_id not in {*excluded, *self.gone}]


class Inner(Router):
    """Takes the cheapest worker that it may take, by costs that a test gives; without any, the first."""

    NAME = "inner"

    def __init__(
        self, services: RouterServices, ranks: Sequence[ScoredRank] | None = None, known: bool = False
    ) -> None:
        super().__init__(PluginConfig(), services)
        self.ranks = ranks
        self.known = known
        self.steps: list[str] = []
        #: What happens while it waits.
        self.meanwhile: Callable[[], object] = lambda: None

    @property
    def follows_caches(self) -> bool:
        return self.known

    async def start(self) -> None:
        self.steps.append("start")

    async def aclose(self) -> None:
        self.steps.append("close")

    async def route(self, request: RoutingRequest, pool: PoolView) -> Route:
        self.steps.append("route")
        self.meanwhile()
        left = pool.eligible(request.excluded)
        if not left:
            raise no_worker(pool)
        costs = {one.instance_id: one.cost for one in self.ranks or ()}
        return Route(min(left, key=lambda one: costs.get(one.instance_id, 0.0)), dp_rank=1)

    def explain(self, request: RoutingRequest, pool: PoolView) -> Sequence[ScoredRank] | None:
        return self.ranks


def rated(worker: int, overlap: int = 0, cost: float = 0.0) -> ScoredRank:
    return ScoredRank(worker, 1, overlap, 0, 0, 0, cost)


def services_of(pool: PoolView, tracker: LoadTracker | None = None) -> RouterServices:
    none = cast(Any, None)
    return RouterServices(pool, tracker or LoadTracker(), none, none, Metrics(), none)


def alone(pool: PoolView, tracker: LoadTracker | None = None) -> AffinityRouter:
    return AffinityRouter(AffinityConfig(), services_of(pool, tracker))


def around(inner: Inner) -> AffinityRouter:
    services = replace(inner.services, inner=lambda ref: inner)
    return AffinityRouter(AffinityConfig(then=PluginRef(use="inner")), services)


def asked(session: str, request_id: str = "r", **more: Any) -> RoutingRequest:
    principal = Principal(session=session)
    return RoutingRequest(PreprocessedRequest(token_ids=[1, 2, 3]), request_id, principal=principal, **more)


async def chosen(router: Router, pool: PoolView, session: str, **more: Any) -> int:
    return (await router.route(asked(session, **more), pool)).instance.instance_id


def homes(router: Router, pool: PoolView) -> dict[str, tuple[int, int]]:
    """Return the worker and the rank of every session, while nothing runs."""

    async def ask() -> dict[str, tuple[int, int]]:
        routes = {session: await router.route(asked(session), pool) for session in SESSIONS}
        return {session: (route.instance.instance_id, route.dp_rank) for session, route in routes.items()}

    return asyncio.run(ask())


def home_of(pool: Fleet, session: str = "s") -> int:
    explained = alone(pool).explain(asked(session), pool)
    assert explained is not None
    return min(explained, key=lambda one: one.cost).instance_id


workers = st.dictionaries(st.integers(1, 2**64 - 1), st.none() | st.integers(1, 512), min_size=2, max_size=8)

# Whose a session is.


@given(workers, st.integers(1, 3), st.data())
def test_a_worker_that_leaves_and_comes_back_moves_its_own_sessions_only(
    sizes: dict[int, int | None], ranks: int, data: st.DataObject
) -> None:
    pool = Fleet(sizes, ranks)
    router = alone(pool)
    before = homes(router, pool)
    leaving = data.draw(st.sampled_from(list(sizes)))

    pool.gone = {leaving}
    without = homes(router, pool)
    pool.gone = set()

    assert {session for session in SESSIONS if without[session] != before[session]} == {
        session for session in SESSIONS if before[session][0] == leaving
    }
    assert homes(router, pool) == before


@given(workers, st.integers(1, 2**64 - 1))
def test_a_worker_that_joins_takes_sessions_and_moves_no_others(sizes: dict[int, int | None], joining: int) -> None:
    after = homes(alone(pool := Fleet({**sizes, joining: 256})), pool)
    before = homes(alone(pool := Fleet({number: size for number, size in sizes.items() if number != joining})), pool)

    assert all(after[session] == before[session] or after[session][0] == joining for session in SESSIONS)


@given(workers, st.integers(1, 3), st.randoms())
def test_routers_with_equal_views_choose_alike(sizes: dict[int, int | None], ranks: int, shuffle: Any) -> None:
    turned = list(sizes.items())
    shuffle.shuffle(turned)
    one, other = Fleet(sizes, ranks), Fleet(dict(turned), ranks)

    assert homes(alone(one), one) == homes(alone(other), other)


def test_workers_have_sessions_by_their_capacity_and_ranks_alike() -> None:
    pool = Fleet({1: 100, 2: 100, 3: 400, 4: None}, ranks=2)

    found = Counter(homes(alone(pool), pool).values())

    # Of 856 requests at once; within four standard deviations of a fixed draw.
    for worker, size in ((1, 100), (2, 100), (3, 400), (4, 256)):
        for rank in (1, 2):
            share = size / 856 / 2
            deviation = (len(SESSIONS) * share * (1 - share)) ** 0.5
            assert abs(found[worker, rank] - len(SESSIONS) * share) < 4 * deviation, found


async def test_requests_without_a_session_are_spread() -> None:
    pool = Fleet({1: 8, 2: 8, 3: 8})
    router = alone(pool)

    assert {await chosen(router, pool, "", request_id=f"r{number}") for number in range(40)} == {1, 2, 3}


# The bound.


@given(
    st.dictionaries(st.integers(1, 8), st.none() | st.integers(1, 64), min_size=1),
    st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=120),
)
def test_no_worker_gets_more_than_its_share_however_the_load_is_skewed(
    sizes: dict[int, int | None], steps: list[tuple[bool, int]]
) -> None:
    pool, tracker = Fleet(sizes), LoadTracker()
    router = alone(pool, tracker)
    weights = {number: size or 256 for number, size in sizes.items()}

    async def play() -> None:
        running: list[Reservation] = []
        for number, (ends, session) in enumerate(steps):
            if ends and running:
                running.pop(session % len(running)).release()
                continue
            total = tracker.total_requests
            # Half of all belong to one session.
            route = await router.route(asked(f"s{max(0, session - 5)}"), pool)
            running.append(tracker.reserve(route, f"a{number}", prompt_tokens=0, block_size=None, hashes=()))
            worker = route.instance.instance_id
            share = 1.25 * (total + 1) * weights[worker] / sum(weights.values())
            assert tracker.requests(worker) < share + 1 + 1e-9

    asyncio.run(play())


@given(st.dictionaries(st.integers(1, 8), st.tuples(st.integers(0, 50), st.integers(1, 999)), min_size=1))
def test_at_least_one_worker_is_within_the_bound(loads: dict[int, tuple[int, int]]) -> None:
    requests = {worker: active for worker, (active, _) in loads.items()}

    assert within_bound(requests, {worker: capacity for worker, (_, capacity) in loads.items()})


@pytest.mark.parametrize(
    ("requests", "room"),
    [
        # ceil(1.25 × 1 / 4) = 1
        ((0, 0, 0, 0), {0, 1, 2, 3}),
        ((1, 0, 0, 0), {1, 2, 3}),
        # ceil(1.25 × 7 / 4) = 3
        ((3, 2, 1, 0), {1, 2, 3}),
        ((6, 0, 0, 0), {1, 2, 3}),
    ],
)
def test_the_bound_of_equal_workers_is_five_quarters_of_the_mean(requests: tuple[int, ...], room: set[int]) -> None:
    assert within_bound(dict(enumerate(requests)), dict.fromkeys(range(4), 256)) == room


async def test_a_session_over_the_bound_goes_to_the_same_next_worker() -> None:
    pool, tracker = Fleet(dict.fromkeys(range(1, 6), 8)), LoadTracker()
    router = alone(pool, tracker)
    first = await router.route(asked("s"), pool)
    running = tracker.reserve(first, "a", prompt_tokens=0, block_size=None, hashes=())

    nexts = {await chosen(router, pool, "s") for _ in range(5)}
    running.release()

    assert len(nexts) == 1
    assert first.instance.instance_id not in nexts
    assert nexts == {await chosen(router, pool, "s", excluded=frozenset({first.instance.instance_id}))}
    assert await chosen(router, pool, "s") == first.instance.instance_id


# The inner router.


async def test_the_inner_router_lives_as_long_as_the_outer() -> None:
    inner = Inner(services_of(Fleet({1: 1})))
    router = around(inner)

    await router.start()
    await router.aclose()

    assert inner.steps == ["start", "close"]


async def test_the_inner_router_serves_requests_without_a_session() -> None:
    pool = Fleet(dict.fromkeys(range(1, 6), 8))
    router = around(Inner(services_of(pool)))

    assert {await chosen(router, pool, "", request_id=f"r{number}") for number in range(20)} == {1}


async def test_the_inner_router_chooses_the_decode_worker() -> None:
    pool = Fleet(dict.fromkeys(range(1, 6), 8))
    router = around(Inner(services_of(pool)))

    found = {phase: {await chosen(router, pool, f"s{number}", phase=phase) for number in range(40)} for phase in Phase}

    assert found[Phase.DECODE] == {1}
    assert found[Phase.PREFILL] == found[Phase.AGGREGATED] == {1, 2, 3, 4, 5}


async def test_a_session_keeps_its_rank_around_a_router_that_knows_no_costs() -> None:
    pool = Fleet(dict.fromkeys(range(1, 4), 8), ranks=4)
    router = around(Inner(services_of(pool)))

    one = [await router.route(asked("s"), pool) for _ in range(3)]
    all_ = [await router.route(asked(session), pool) for session in SESSIONS]

    assert len({(route.instance.instance_id, route.dp_rank) for route in one}) == 1
    assert {route.dp_rank for route in all_} == {1, 2, 3, 4}


@pytest.mark.parametrize("known", [False, True], ids=["predicted", "reported"])
async def test_a_larger_overlap_chooses_among_workers_with_room(known: bool) -> None:
    pool, tracker = Fleet(dict.fromkeys(range(1, 5), 8)), LoadTracker()
    home = home_of(pool)
    holder, full, other = (worker for worker in pool.instances if worker != home)
    ranks = [rated(home, 1, 1.0), rated(holder, 3, 5.0), rated(full, 9, 0.0), rated(other, 2, 0.0)]
    router = around(Inner(services_of(pool, tracker), ranks, known))
    for number in range(3):
        route = Route(pool.instances[full])
        tracker.reserve(route, f"a{number}", prompt_tokens=0, block_size=None, hashes=())

    assert await chosen(router, pool, "s") == holder


async def test_equal_overlaps_are_decided_by_the_session() -> None:
    pool = Fleet(dict.fromkeys(range(1, 5), 8))
    home = home_of(pool)
    ranks = [rated(worker, 2, 9.0 if worker == home else 1.0) for worker in pool.instances]

    assert await chosen(around(Inner(services_of(pool), ranks)), pool, "s") == home


async def test_equal_overlaps_are_decided_by_cost_if_caches_are_known() -> None:
    pool = Fleet(dict.fromkeys(range(1, 5), 8))
    home = home_of(pool)
    cheap = next(worker for worker in pool.instances if worker != home)
    costs = dict.fromkeys(pool.instances, 5.0)

    def router() -> AffinityRouter:
        return around(Inner(services_of(pool), [rated(worker, 0, cost) for worker, cost in costs.items()], known=True))

    assert await chosen(router(), pool, "s") == home, "all cost the same"
    costs[cheap] = 4.0
    assert await chosen(router(), pool, "s") == cheap


async def test_only_workers_that_the_inner_router_rates_are_chosen() -> None:
    pool = Fleet(dict.fromkeys(range(1, 5), 8))
    router = around(Inner(services_of(pool), [rated(2)]))

    assert {await chosen(router, pool, session) for session in SESSIONS[:30]} == {2}


async def test_a_worker_that_leaves_while_the_inner_router_waits_is_replaced() -> None:
    pool = Fleet(dict.fromkeys(range(1, 5), 8))
    inner = Inner(services_of(pool))
    home = home_of(pool)
    inner.meanwhile = lambda: pool.gone.add(home)

    assert await chosen(around(inner), pool, "s") != home
    assert inner.steps == ["route", "route"]


async def test_a_refusal_of_the_inner_router_is_raised() -> None:
    pool = Fleet(dict.fromkeys(range(1, 5), 8))
    inner = Inner(services_of(pool))

    def full() -> None:
        raise ServiceOverloaded("the queue is full")

    inner.meanwhile = full

    with pytest.raises(ServiceOverloaded, match="the queue is full"):
        await chosen(around(inner), pool, "s")
    assert inner.steps == ["route"]


@pytest.mark.parametrize("router", [alone, lambda pool: around(Inner(services_of(pool)))], ids=["alone", "around"])
async def test_without_workers_the_model_is_unavailable(router: Any) -> None:
    with pytest.raises(Unavailable, match="'m'"):
        await chosen(router(pool := Fleet({})), pool, "s")


# What operators see.


def test_the_inner_routers_costs_are_shown_with_the_choice_marked() -> None:
    pool = Fleet(dict.fromkeys(range(1, 5), 8))
    home = home_of(pool)
    router = around(Inner(services_of(pool), [rated(worker, 2, float(worker)) for worker in pool.instances]))

    explained = router.explain(asked("s"), pool) or ()

    assert [(one.instance_id, one.cost) for one in explained] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert [one.instance_id for one in explained if one.preferred] == [home]
    assert not any(one.preferred for one in router.explain(asked(""), pool) or ())


@pytest.mark.parametrize("router", [alone, lambda pool, tracker: around(Inner(services_of(pool, tracker)))])
async def test_without_costs_the_order_of_the_session_is_shown(router: Any) -> None:
    pool, tracker = Fleet(dict.fromkeys(range(1, 5), 8), ranks=2), LoadTracker()
    made = router(pool, tracker)
    route = await made.route(asked("s"), pool)

    def cheapest() -> tuple[int, int]:
        explained = made.explain(asked("s"), pool)
        assert sorted(one.cost for one in explained) == list(range(8))
        best = min(explained, key=lambda one: one.cost)
        return best.instance_id, best.dp_rank

    assert cheapest() == (route.instance.instance_id, route.dp_rank)
    tracker.reserve(route, "a", prompt_tokens=0, block_size=None, hashes=())
    again = await made.route(asked("s"), pool)
    assert cheapest() == (again.instance.instance_id, again.dp_rank)
    assert made.explain(asked(""), pool) is None


async def test_decisions_are_counted_by_their_reason() -> None:
    pool, tracker = Fleet(dict.fromkeys(range(1, 5), 8)), LoadTracker()
    home = home_of(pool)
    holder = next(worker for worker in pool.instances if worker != home)
    inner = Inner(services_of(pool, tracker), [rated(worker) for worker in pool.instances])
    router = around(inner)

    await chosen(router, pool, "s")
    await chosen(router, pool, "")
    inner.ranks = [rated(worker, overlap=int(worker == holder)) for worker in pool.instances]
    await chosen(router, pool, "s")
    inner.ranks = [rated(worker) for worker in pool.instances]
    tracker.reserve(Route(pool.instances[home]), "a", prompt_tokens=0, block_size=None, hashes=())
    await chosen(router, pool, "s")

    text = (await cast(Metrics, inner.services.metrics).render()).decode()
    for source in ("session", "other", "overlap", "bound"):
        assert f'dynamo_router_affinity_decisions_total{{source="{source}"}} 1.0' in text
