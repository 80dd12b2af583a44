"""The router `affinity`: keeps a session with its worker, and leaves the rest to another router."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from dynamo_core import (
    Phase,
    PluginConfig,
    PluginRef,
    PoolView,
    Route,
    Router,
    RouterServices,
    RoutingRequest,
    ScoredRank,
    no_worker,
)
from dynamo_core.errors import ServiceOverloaded, Unavailable
from pydantic import Field

from dynamo_plugin_router_affinity.rendezvous_hash import SessionHash, capacity_of, within_bound


class AffinityConfig(PluginConfig):
    """Settings of the router."""

    then: PluginRef | None = Field(
        default=None,
        description="The router that serves requests without a session, and that knows of cached prompts; null means "
        "that requests without a session are spread by the capacity of the workers.",
    )


@dataclass(frozen=True, slots=True)
class _Choice:
    """The workers that a session can go to. `distances` are of all eligible workers; `room` are those with room."""

    session: SessionHash
    distances: Mapping[int, float]
    room: Collection[int]
    #: The inner router's view of all ranks that may be chosen; None if it reports no costs.
    ranks: Sequence[ScoredRank] | None
    #: Whether that is what workers report of their caches.
    known: bool
    #: The worker of the session, or the next one that has room.
    home: int

    def allowed(self) -> set[int]:
        """Return the workers with room whose caches hold most of the prompt.

        Of several the home of the session, if possible. Where the caches are known, the home must also cost no more
        than the others.
        """
        overlaps = dict.fromkeys(self.room, 0)
        costs = dict.fromkeys(self.room, inf)
        for one in self.ranks or ():
            worker = one.instance_id
            if worker in overlaps:
                overlaps[worker] = max(overlaps[worker], one.overlap)
                costs[worker] = min(costs[worker], one.cost)
        most = max(overlaps.values())
        best = {worker for worker, overlap in overlaps.items() if overlap == most}
        if self.home in best and (not self.known or costs[self.home] <= min(costs[worker] for worker in best)):
            return {self.home}
        return best

    def source(self, chosen: int) -> str:
        """Return what a choice was made from, for metrics."""
        if chosen != self.home:
            return "overlap"
        return "session" if self.home == min(self.distances, key=self.distances.__getitem__) else "bound"

    def rank(self, worker: int, pool: PoolView) -> int:
        """Return the rank of a worker that the session belongs to."""
        return min(_ranks_of(worker, pool), key=lambda rank: self.rank_distance(worker, rank))

    def rank_distance(self, worker: int, rank: int) -> float:
        """Return how far the session is from a rank of a worker."""
        return self.session.distance(f"{worker:x}/{rank}")


class AffinityRouter(Router):
    """Gives all requests of a session to one worker, unless that has more than its share of all requests.

    It has no state: routers with equal views choose alike.
    """

    NAME = "affinity"
    Config = AffinityConfig

    def __init__(self, config: AffinityConfig, services: RouterServices) -> None:
        super().__init__(config, services)
        self._tracker = services.tracker
        self._inner = None if config.then is None else services.inner(config.then)
        decisions = services.metrics.counter(
            "dynamo_router_affinity_decisions_total",
            "Decisions by source: session (its own worker), bound (the next one, as that was full), overlap (another "
            "one for its cache), other (no session).",
            ("source",),
        )
        self._decisions = {source: decisions.labels(source) for source in ("session", "bound", "overlap", "other")}

    async def start(self) -> None:
        """Start the inner router."""
        if self._inner is not None:
            await self._inner.start()

    async def route(self, request: RoutingRequest, pool: PoolView) -> Route:
        """Return the worker of the session; see `Router.route`. What the inner router raises is raised."""
        inner, session = self._inner, self._session(request)
        if inner is None:
            choice = self._choose(session or request.request_id, request, pool)
            self._decisions[choice.source(choice.home) if session else "other"].inc()
            return Route(pool.instances[choice.home], choice.rank(choice.home, pool))
        if not session:
            self._decisions["other"].inc()
            return await inner.route(request, pool)
        choice = self._choose(session, request, pool)
        allowed = choice.allowed()
        try:
            route = await inner.route(replace(request, excluded=frozenset(pool.instances.keys() - allowed)), pool)
        except (ServiceOverloaded, Unavailable):
            if any(one.instance_id in allowed for one in pool.eligible(request.excluded)):
                raise
            # The workers left while the inner router waited.
            self._decisions["other"].inc()
            return await inner.route(request, pool)
        worker = route.instance.instance_id
        self._decisions[choice.source(worker)].inc()
        if choice.ranks is None and route.watcher is None:
            # An inner router without costs does not know which rank has the session's cache.
            return replace(route, dp_rank=choice.rank(worker, pool))
        return route

    def explain(self, request: RoutingRequest, pool: PoolView) -> Sequence[ScoredRank] | None:
        """Return the costs of the inner router, with the ranks marked that the session can go to.

        Without such costs a rank costs its place in the order of the session, with workers over their bound last.

        Raises:
            DynamoError: as `route`.
        """
        session = self._session(request)
        if not session:
            return None if self._inner is None else self._inner.explain(request, pool)
        choice = self._choose(session, request, pool)
        if choice.ranks is not None:
            allowed = choice.allowed()
            return [replace(one, preferred=one.instance_id in allowed) for one in choice.ranks]
        ranks = [(worker, rank) for worker in choice.distances for rank in _ranks_of(worker, pool)]

        def far(key: tuple[int, int]) -> tuple[bool, float, float]:
            return key[0] not in choice.room, choice.distances[key[0]], choice.rank_distance(*key)

        order = sorted(ranks, key=far)
        places = {key: float(place) for place, key in enumerate(order)}
        loads = self._tracker.loads(ranks)
        return [
            ScoredRank(*key, 0, prefill, blocks, shared, places[key])
            for key, (prefill, blocks, shared) in zip(ranks, loads, strict=True)
        ]

    async def aclose(self) -> None:
        """Close the inner router."""
        if self._inner is not None:
            await self._inner.aclose()

    @staticmethod
    def _session(request: RoutingRequest) -> str:
        """Return the session that the choice goes by; empty if there is none, or if no cache is of use."""
        return "" if request.phase is Phase.DECODE else request.principal.session

    def _choose(self, session: str, request: RoutingRequest, pool: PoolView) -> _Choice:
        """Return where a session can go now.

        Raises:
            DynamoError: no worker may be chosen.
        """
        ranks = None if self._inner is None else self._inner.explain(request, pool)
        if ranks is None:
            workers = [one.instance_id for one in pool.eligible(request.excluded)]
        else:
            workers = list(dict.fromkeys(one.instance_id for one in ranks))
        if not workers:
            raise no_worker(pool)
        belongs = SessionHash(session)
        capacities = {worker: capacity_of(pool.cards[worker]) for worker in workers}
        distances = {worker: belongs.distance(f"{worker:x}", capacity) for worker, capacity in capacities.items()}
        room = within_bound({worker: self._tracker.requests(worker) for worker in workers}, capacities)
        known = self._inner is not None and self._inner.follows_caches
        return _Choice(belongs, distances, room, ranks, known, min(room, key=distances.__getitem__))


def _ranks_of(worker: int, pool: PoolView) -> range:
    facts = pool.cards[worker].runtime_config
    return range(facts.data_parallel_start_rank, facts.data_parallel_start_rank + facts.data_parallel_size)
