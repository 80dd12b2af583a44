"""Routers that break one promise each, and what of the kit must find it.

Not collected with the other tests: `test_kits_on_broken_parts` runs this file and compares.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from itertools import count
from typing import Any

import msgspec
import pytest
from dynamo_core import (
    KV_EVENTS,
    KvStored,
    Phase,
    PluginConfig,
    PoolView,
    Route,
    Router,
    RouterEvent,
    RouterServices,
    RoutingRequest,
    ScoredRank,
    TaskSet,
    no_worker,
)
from dynamo_core.errors import ServiceOverloaded, Unavailable
from dynamo_core.kv import unshared_blocks
from dynamo_core.protocol import Instance
from dynamo_testing.router_kit import RouterFactory, RouterKit

from libs.testing.tests.planted import Planted, adding, closes_once, needs_a_start, notes_its_start, own

DECODER = msgspec.msgpack.Decoder(list[RouterEvent])


class Sound(Router):
    """Without a fault: workers and ranks in turn, pinned ones first, and what their caches hold by events."""

    NAME = "sound"

    def __init__(self, config: PluginConfig, services: RouterServices) -> None:
        super().__init__(config, services)
        self.turn = 0
        self.waiting = 0
        self.known: set[tuple[int, int, int]] = set()
        self.tasks = TaskSet()

    async def start(self) -> None:
        self.tasks.spawn(self.listen(), name="listen")

    async def listen(self) -> None:
        events = self.services.events.subscribe(KV_EVENTS, self.services.directory)
        async with aclosing(events):
            async for _, _, payload in events:
                for event in DECODER.decode(payload):
                    assert isinstance(event.event.data, KvStored)
                    for block in event.event.data.blocks:
                        self.known.add((event.worker_id, event.event.dp_rank, block.block_hash))

    async def route(self, request: RoutingRequest, pool: PoolView) -> Route:
        self.waiting += 1
        try:
            await asyncio.sleep(0)
        finally:
            self.given_up()
        instance, rank = self.choose(request, pool)
        return self.decide(request, pool, instance, rank)

    def given_up(self) -> None:
        self.waiting -= 1

    def nobody(self, pool: PoolView) -> Exception:
        return no_worker(pool)

    def pinned(self, request: RoutingRequest) -> int | None:
        hints = request.request.routing
        if hints is None:
            return None
        if request.phase is Phase.PREFILL:
            return hints.prefill_worker_id
        return hints.decode_worker_id or hints.backend_instance_id

    def candidates(self, request: RoutingRequest, pool: PoolView) -> Sequence[Instance]:
        return pool.eligible(request.excluded)

    def choose(self, request: RoutingRequest, pool: PoolView) -> tuple[Instance, int]:
        workers = self.candidates(request, pool)
        pinned = self.pinned(request)
        if pinned is not None:
            workers = [one for one in workers if one.instance_id == pinned]
            if pinned not in pool.instances:
                raise Unavailable("not there")
        if not workers:
            raise self.nobody(pool)
        ranks = self.ranks(workers, pool)
        hints = request.request.routing
        if hints is not None and hints.dp_rank is not None:
            ranks = [rank for rank in ranks if self.fits(rank[1], hints.dp_rank)]
        return self.pick(ranks)

    def fits(self, rank: int, wanted: int) -> bool:
        return rank == wanted

    def pick(self, ranks: list[tuple[Instance, int]]) -> tuple[Instance, int]:
        self.turn += 1
        return ranks[self.turn % len(ranks)]

    def ranks(self, workers: Sequence[Instance], pool: PoolView) -> list[tuple[Instance, int]]:
        found = []
        for one in workers:
            facts = pool.cards[one.instance_id].runtime_config
            start = facts.data_parallel_start_rank
            found += [(one, rank) for rank in range(start, start + facts.data_parallel_size)]
        return found

    def decide(self, request: RoutingRequest, pool: PoolView, instance: Instance, rank: int) -> Route:
        size = pool.cards[instance.instance_id].kv_cache_block_size
        chain = request.hashes(size)[1] if size else []
        overlap = 0
        if request.phase is not Phase.DECODE:
            while overlap < len(chain) and (instance.instance_id, rank, chain[overlap]) in self.known:
                overlap += 1
        return Route(instance, rank, overlap, self.names(request, chain))

    def names(self, request: RoutingRequest, chain: list[int]) -> Sequence[int] | None:
        return unshared_blocks(len(chain)) if request.phase is Phase.DECODE else None

    def explain(self, request: RoutingRequest, pool: PoolView) -> Sequence[ScoredRank] | None:
        ranks = self.ranks(pool.eligible(request.excluded), pool)
        return [ScoredRank(one.instance_id, rank, 0, 0, 0, 0, 0.0) for one, rank in ranks]

    async def aclose(self) -> None:
        await self.tasks.aclose()


def claiming(route: Route, request: RoutingRequest, size: int) -> Route:
    """Return the route, as if its worker had the whole prompt in blocks of that many tokens."""
    return Route(route.instance, route.dp_rank, len(request.request.token_ids) // size, route.blocks)


class Broken(Planted, RouterKit):
    """The kit over one router."""

    CAN_PIN = True
    PART = Sound
    #: The seconds that a check waits which must fail, and any other.
    PATIENCE = (0.5, 10.0)

    @pytest.fixture
    def make_router(self) -> RouterFactory:
        return lambda services: self.PART(PluginConfig(), services)

    def held(self, router: Any) -> int:
        held: int = router.waiting
        return held


class TestWithoutAFault(Broken):
    pass


TestChoosesNobody = Broken.failing(
    *(
        frozenset(name for name in dir(RouterKit) if name.startswith("test_"))
        - {
            "test_an_empty_pool_is_unavailable",
            "test_a_pool_of_busy_workers_is_an_overload",
            "test_a_request_that_has_tried_every_worker_is_an_overload",
            "test_no_other_worker_replaces_a_pinned_one",
            "test_a_worker_out_of_service_is_not_chosen_though_a_request_names_it",
            "test_explain_lists_exactly_the_eligible_workers",
            "test_the_router_can_be_closed_without_a_start",
        }
    ),
    pick=lambda real, self, ranks: (Instance(instance_id=ranks[0][0].instance_id), ranks[0][1]),
)


TestHasAFavourite = Broken.failing(
    "test_every_worker_is_chosen_sooner_or_later",
    "test_every_rank_is_chosen_sooner_or_later",
    "test_a_worker_that_leaves_is_not_chosen",
    pick=lambda real, self, ranks: ranks[0],
)


TestAsksAgainWhoHasRefused = Broken.failing(
    "test_workers_that_were_tried_are_left_out",
    "test_a_request_that_has_tried_every_worker_is_an_overload",
    "test_a_worker_that_joins_can_be_chosen",
    "test_no_other_worker_replaces_a_pinned_one",
    candidates=lambda real, self, request, pool: pool.eligible(),
)


TestSendsToBusyWorkers = Broken.failing(
    "test_busy_workers_are_left_out",
    "test_a_worker_is_chosen_again_once_it_is_free",
    "test_a_pool_of_busy_workers_is_an_overload",
    "test_workers_out_of_service_are_left_out",
    "test_a_worker_is_chosen_again_once_it_is_back_in_service",
    "test_a_worker_out_of_service_is_not_chosen_though_a_request_names_it",
    candidates=lambda real, self, request, pool: [
        one for one in pool.instances.values() if one.instance_id not in request.excluded
    ],
)


def _remembers_who_is_free(real: Any, self: Any, request: Any, pool: Any) -> Any:
    self.first = self.first or pool.eligible()
    return [one for one in self.first if one.instance_id not in request.excluded]


TestRemembersWhoIsFree = Broken.failing(
    "test_a_worker_is_chosen_again_once_it_is_free",
    "test_a_worker_that_joins_can_be_chosen",
    "test_a_worker_that_leaves_is_not_chosen",
    "test_a_pool_may_run_empty_and_fill_again",
    "test_no_load_is_left_when_all_requests_have_ended",
    "test_the_cached_blocks_of_a_removed_worker_are_forgotten",
    first=(),
    candidates=_remembers_who_is_free,
)


TestTakesAnEmptyPoolForAFullOne = Broken.failing(
    "test_an_empty_pool_is_unavailable",
    "test_a_pool_may_run_empty_and_fill_again",
    "test_a_worker_is_chosen_again_once_it_is_back_in_service",
    nobody=lambda real, self, pool: ServiceOverloaded(),
)


TestTakesAFullPoolForAnEmptyOne = Broken.failing(
    "test_a_pool_of_busy_workers_is_an_overload",
    "test_a_request_that_has_tried_every_worker_is_an_overload",
    nobody=lambda real, self, pool: Unavailable("nobody"),
)


def _counts_ranks_from_zero(real: Any, self: Any, request: Any, pool: Any, instance: Any, rank: Any) -> Any:
    start = pool.cards[instance.instance_id].runtime_config.data_parallel_start_rank
    return real(request, pool, instance, rank - start)


TestCountsRanksFromZero = Broken.failing(
    "test_a_rank_is_one_of_its_worker", "test_every_rank_is_chosen_sooner_or_later", decide=_counts_ranks_from_zero
)


def _knows_one_rank_only(real: Any, self: Any, workers: Any, pool: Any) -> Any:
    cards = pool.cards
    return [(one, cards[one.instance_id].runtime_config.data_parallel_start_rank) for one in workers]


TestKnowsOneRankOnly = Broken.failing(
    "test_every_rank_is_chosen_sooner_or_later",
    "test_the_rank_that_a_request_names_is_chosen",
    ranks=_knows_one_rank_only,
)


TestDoesNotHearWhoIsNamed = Broken.failing(
    "test_the_worker_that_a_request_names_is_chosen",
    "test_either_phase_has_a_worker_of_its_own_to_name",
    "test_no_other_worker_replaces_a_pinned_one",
    "test_a_worker_out_of_service_is_not_chosen_though_a_request_names_it",
    pinned=lambda real, self, request: None,
)


def _names_one_worker_for_both_phases(real: Any, self: Any, request: Any) -> Any:
    hints = request.request.routing
    return hints.backend_instance_id or hints.prefill_worker_id if hints is not None else None


TestNamesOneWorkerForBothPhases = Broken.failing(
    "test_either_phase_has_a_worker_of_its_own_to_name", pinned=_names_one_worker_for_both_phases
)


TestDoesNotHearWhichRankIsNamed = Broken.failing(
    "test_the_rank_that_a_request_names_is_chosen", fits=lambda real, self, rank, wanted: True
)


def _finds_somebody_else_for_who_is_named(real: Any, self: Any, request: Any) -> Any:
    pinned = real(request)
    gone = pinned not in self.services.pool.instances or pinned in request.excluded
    return None if gone else pinned


TestFindsSomebodyElseForWhoIsNamed = Broken.failing(
    "test_no_other_worker_replaces_a_pinned_one", pinned=_finds_somebody_else_for_who_is_named
)


def _explains_who_is_busy(real: Any, self: Any, request: Any, pool: Any) -> Any:
    ranks = self.ranks(list(pool.instances.values()), pool)
    return [ScoredRank(one.instance_id, rank, 0, 0, 0, 0, 0.0) for one, rank in ranks]


TestExplainsWhoIsBusy = Broken.failing("test_explain_lists_exactly_the_eligible_workers", explain=_explains_who_is_busy)


TestReservesWhenItExplains = Broken.failing(
    "test_explain_lists_exactly_the_eligible_workers", explain=adding("waiting")
)


TestReservesWhenItChooses = Broken.failing(
    "test_no_load_is_left_when_all_requests_have_ended",
    "test_a_route_that_is_not_taken_counts_nothing",
    "test_a_request_that_is_given_up_while_it_is_placed_leaves_nothing",
    decide=adding("waiting"),
)


async def _keeps_the_place_of_who_gives_up(real: Any, self: Any, request: Any, pool: Any) -> Any:
    self.waiting += 1
    await asyncio.sleep(0)
    self.waiting -= 1
    return self.decide(request, pool, *self.choose(request, pool))


TestKeepsThePlaceOfWhoGivesUp = Broken.failing(
    "test_a_request_that_is_given_up_while_it_is_placed_leaves_nothing", route=_keeps_the_place_of_who_gives_up
)


async def _listens_for_ever(real: Any, self: Any) -> Any:
    self.task = asyncio.create_task(self.listen(), name="for-ever")


TestListensForEver = Broken.failing("test_the_router_can_be_closed_twice_and_leaves_no_task", start=_listens_for_ever)


TestCannotBeClosedTwice = Broken.failing("test_the_router_can_be_closed_twice_and_leaves_no_task", aclose=closes_once)


TestCannotBeClosedWithoutAStart = Broken.failing(
    "test_the_router_can_be_closed_without_a_start",
    start=notes_its_start,
    aclose=needs_a_start,
)


TestNamesBlocksByTheirNumber = Broken.failing(
    "test_blocks_are_named_by_all_that_is_before_them",
    "test_no_load_is_left_when_all_requests_have_ended",
    names=lambda real, self, request, chain: real(request, chain) or [len(chain) - at for at in range(len(chain))],
)


TestCountsABlockForAPartOfOne = Broken.failing(
    "test_blocks_are_named_by_all_that_is_before_them",
    names=lambda real, self, request, chain: real(request, chain) or [*chain, *unshared_blocks(1)],
)


TestSharesBlocksOfWhoDecodes = Broken.failing(
    "test_requests_to_be_decoded_share_no_blocks", names=lambda real, self, request, chain: None
)


TestNamesPrivateBlocksAsAnotherRouterDoes = Broken.failing(
    "test_requests_to_be_decoded_share_no_blocks",
    __init__=own(own=lambda self: count(-1, -1)),
    names=lambda real, self, request, chain: [next(self.own) for _ in chain] if request.phase is Phase.DECODE else None,
)


def _claims_as_much_as_a_worker_holds(real: Any, self: Any, request: Any, pool: Any, instance: Any, rank: Any) -> Any:
    route = real(request, pool, instance, rank)
    held = sum(known[:2] == (instance.instance_id, rank) for known in self.known)
    return Route(instance, rank, held if route.overlap else 0, route.blocks)


TestClaimsAsMuchAsAWorkerHolds = Broken.failing(
    "test_blocks_are_only_claimed_that_the_prompt_has", decide=_claims_as_much_as_a_worker_holds
)


def _claims_what_nobody_told(real: Any, self: Any, request: Any, pool: Any, instance: Any, rank: Any) -> Any:
    route = real(request, pool, instance, rank)
    size = pool.cards[instance.instance_id].kv_cache_block_size
    if request.phase is Phase.DECODE or not size or len(self.known) == 10:
        return route
    return claiming(route, request, size)


TestClaimsWhatNobodyTold = Broken.failing("test_an_unknown_prompt_has_no_overlap", decide=_claims_what_nobody_told)


def _claims_blocks_for_who_decodes(real: Any, self: Any, request: Any, pool: Any, instance: Any, rank: Any) -> Any:
    route = real(request, pool, instance, rank)
    return claiming(route, request, 4) if request.phase is Phase.DECODE else route


TestClaimsBlocksForWhoDecodes = Broken.failing(
    "test_no_block_is_claimed_for_a_worker_that_decodes", decide=_claims_blocks_for_who_decodes
)


def _guesses_how_large_a_block_is(real: Any, self: Any, request: Any, pool: Any, instance: Any, rank: Any) -> Any:
    route = real(request, pool, instance, rank)
    unsaid = pool.cards[instance.instance_id].kv_cache_block_size is None
    return claiming(route, request, 16) if unsaid else route


TestGuessesHowLargeABlockIs = Broken.failing(
    "test_workers_without_a_block_size_have_no_overlap", decide=_guesses_how_large_a_block_is
)


def _takes_all_caches_for_one(real: Any, self: Any, request: Any, pool: Any, instance: Any, rank: Any) -> Any:
    for _, _, block in list(self.known):
        self.known.add((instance.instance_id, rank, block))
    return real(request, pool, instance, rank)


TestTakesAllCachesForOne = Broken.failing(
    "test_the_cached_blocks_of_a_removed_worker_are_forgotten", decide=_takes_all_caches_for_one
)


def _compares_every_rank_with_every_other(real: Any, self: Any, ranks: Any) -> Any:
    for _ in ranks:
        self.services.tracker.loads([(one.instance_id, rank) for one, rank in ranks])
    return real(ranks)


TestComparesEveryRankWithEveryOther = Broken.failing(
    "test_a_choice_reads_the_load_of_each_rank_a_few_times", pick=_compares_every_rank_with_every_other
)


TestAsksForEveryWorkerWhetherItIsEligible = Broken.failing(
    "test_a_choice_reads_the_eligible_workers_a_few_times",
    candidates=lambda real, self, request, pool: [
        one for one in pool.instances.values() if one in pool.eligible(request.excluded)
    ],
)
