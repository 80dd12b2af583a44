"""Routers that break one promise each, and what of the kit must find it.

Not collected with the other tests: `test_the_kits_find_broken_parts` runs this file and compares.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from itertools import count
from typing import Any, ClassVar

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
    """The route, as if its worker had the whole prompt in blocks of that many tokens."""
    return Route(route.instance, route.dp_rank, len(request.request.token_ids) // size, route.blocks)


class Broken(RouterKit):
    """The kit over one router."""

    CAN_PIN = True
    router: ClassVar[type[Sound]] = Sound
    #: The checks that must fail, and no others may.
    FAILS: ClassVar[frozenset[str]] = frozenset()
    #: The seconds that a check waits which must fail, and any other.
    PATIENCE = (0.5, 10.0)

    @pytest.fixture
    def make_router(self) -> RouterFactory:
        return lambda services: self.router(PluginConfig(), services)

    def held(self, router: Any) -> int:
        held: int = router.waiting
        return held


class TestWithoutAFault(Broken):
    pass


class TestChoosesNobody(Broken):
    class router(Sound):  # noqa: N801 - the part that is exchanged, as the attribute is named
        def pick(self, ranks: list[tuple[Instance, int]]) -> tuple[Instance, int]:
            return Instance(instance_id=ranks[0][0].instance_id), ranks[0][1]

    # Whatever makes a choice.
    FAILS = frozenset(name for name in dir(RouterKit) if name.startswith("test_")) - {
        "test_a_pool_without_workers_is_told",
        "test_a_pool_of_busy_workers_is_told_as_an_overload",
        "test_a_request_that_has_tried_everybody_is_told",
        "test_nobody_stands_in_for_the_worker_that_a_request_names",
        "test_a_worker_out_of_service_is_not_chosen_though_a_request_names_it",
        "test_who_may_be_chosen_is_explained_and_nobody_else",
        "test_it_can_be_closed_without_a_start",
    }


class TestHasAFavourite(Broken):
    class router(Sound):  # noqa: N801
        def pick(self, ranks: list[tuple[Instance, int]]) -> tuple[Instance, int]:
            return ranks[0]

    FAILS = frozenset(
        {
            "test_every_worker_is_chosen_sooner_or_later",
            "test_every_rank_is_chosen_sooner_or_later",
            "test_a_worker_that_leaves_is_not_chosen",
        }
    )


class TestAsksAgainWhoHasRefused(Broken):
    class router(Sound):  # noqa: N801
        def candidates(self, request: RoutingRequest, pool: PoolView) -> Sequence[Instance]:
            return pool.eligible()

    FAILS = frozenset(
        {
            "test_workers_that_were_tried_are_left_out",
            "test_a_request_that_has_tried_everybody_is_told",
            "test_a_worker_that_joins_can_be_chosen",
            "test_nobody_stands_in_for_the_worker_that_a_request_names",
        }
    )


class TestSendsToBusyWorkers(Broken):
    class router(Sound):  # noqa: N801
        def candidates(self, request: RoutingRequest, pool: PoolView) -> Sequence[Instance]:
            return [one for one in pool.instances.values() if one.instance_id not in request.excluded]

    FAILS = frozenset(
        {
            "test_busy_workers_are_left_out",
            "test_a_worker_is_chosen_again_once_it_is_free",
            "test_a_pool_of_busy_workers_is_told_as_an_overload",
            "test_workers_out_of_service_are_left_out",
            "test_a_worker_is_chosen_again_once_it_is_back_in_service",
            "test_a_worker_out_of_service_is_not_chosen_though_a_request_names_it",
        }
    )


class TestRemembersWhoIsFree(Broken):
    class router(Sound):  # noqa: N801
        first: Sequence[Instance] = ()

        def candidates(self, request: RoutingRequest, pool: PoolView) -> Sequence[Instance]:
            self.first = self.first or pool.eligible()
            return [one for one in self.first if one.instance_id not in request.excluded]

    FAILS = frozenset(
        {
            "test_a_worker_is_chosen_again_once_it_is_free",
            "test_a_worker_that_joins_can_be_chosen",
            "test_a_worker_that_leaves_is_not_chosen",
            "test_a_pool_may_run_empty_and_fill_again",
            "test_the_load_is_gone_when_all_requests_are_over",
            "test_what_a_worker_held_is_gone_with_it",
        }
    )


class TestTakesAnEmptyPoolForAFullOne(Broken):
    class router(Sound):  # noqa: N801
        def nobody(self, pool: PoolView) -> Exception:
            return ServiceOverloaded()

    FAILS = frozenset(
        {
            "test_a_pool_without_workers_is_told",
            "test_a_pool_may_run_empty_and_fill_again",
            "test_a_worker_is_chosen_again_once_it_is_back_in_service",
        }
    )


class TestTakesAFullPoolForAnEmptyOne(Broken):
    class router(Sound):  # noqa: N801
        def nobody(self, pool: PoolView) -> Exception:
            return Unavailable("nobody")

    FAILS = frozenset(
        {
            "test_a_pool_of_busy_workers_is_told_as_an_overload",
            "test_a_request_that_has_tried_everybody_is_told",
        }
    )


class TestCountsRanksFromZero(Broken):
    class router(Sound):  # noqa: N801
        def decide(self, request: RoutingRequest, pool: PoolView, instance: Instance, rank: int) -> Route:
            start = pool.cards[instance.instance_id].runtime_config.data_parallel_start_rank
            return super().decide(request, pool, instance, rank - start)

    FAILS = frozenset({"test_a_rank_is_one_of_its_worker", "test_every_rank_is_chosen_sooner_or_later"})


class TestKnowsOneRankOnly(Broken):
    class router(Sound):  # noqa: N801
        def ranks(self, workers: Sequence[Instance], pool: PoolView) -> list[tuple[Instance, int]]:
            cards = pool.cards
            return [(one, cards[one.instance_id].runtime_config.data_parallel_start_rank) for one in workers]

    FAILS = frozenset({"test_every_rank_is_chosen_sooner_or_later", "test_the_rank_that_a_request_names_is_chosen"})


class TestDoesNotHearWhoIsNamed(Broken):
    class router(Sound):  # noqa: N801
        def pinned(self, request: RoutingRequest) -> int | None:
            return None

    FAILS = frozenset(
        {
            "test_the_worker_that_a_request_names_is_chosen",
            "test_either_phase_has_a_worker_of_its_own_to_name",
            "test_nobody_stands_in_for_the_worker_that_a_request_names",
            "test_a_worker_out_of_service_is_not_chosen_though_a_request_names_it",
        }
    )


class TestNamesOneWorkerForBothPhases(Broken):
    class router(Sound):  # noqa: N801
        def pinned(self, request: RoutingRequest) -> int | None:
            hints = request.request.routing
            return (hints.backend_instance_id or hints.prefill_worker_id) if hints is not None else None

    FAILS = frozenset({"test_either_phase_has_a_worker_of_its_own_to_name"})


class TestDoesNotHearWhichRankIsNamed(Broken):
    class router(Sound):  # noqa: N801
        def fits(self, rank: int, wanted: int) -> bool:
            return True

    FAILS = frozenset({"test_the_rank_that_a_request_names_is_chosen"})


class TestFindsSomebodyElseForWhoIsNamed(Broken):
    class router(Sound):  # noqa: N801
        def pinned(self, request: RoutingRequest) -> int | None:
            pinned = super().pinned(request)
            gone = pinned not in self.services.pool.instances or pinned in request.excluded
            return None if gone else pinned

    FAILS = frozenset({"test_nobody_stands_in_for_the_worker_that_a_request_names"})


class TestExplainsWhoIsBusy(Broken):
    class router(Sound):  # noqa: N801
        def explain(self, request: RoutingRequest, pool: PoolView) -> Sequence[ScoredRank] | None:
            ranks = self.ranks(list(pool.instances.values()), pool)
            return [ScoredRank(one.instance_id, rank, 0, 0, 0, 0, 0.0) for one, rank in ranks]

    FAILS = frozenset({"test_who_may_be_chosen_is_explained_and_nobody_else"})


class TestReservesWhenItExplains(Broken):
    class router(Sound):  # noqa: N801
        def explain(self, request: RoutingRequest, pool: PoolView) -> Sequence[ScoredRank] | None:
            self.waiting += 1
            return super().explain(request, pool)

    FAILS = frozenset({"test_who_may_be_chosen_is_explained_and_nobody_else"})


class TestReservesWhenItChooses(Broken):
    class router(Sound):  # noqa: N801
        def decide(self, request: RoutingRequest, pool: PoolView, instance: Instance, rank: int) -> Route:
            self.waiting += 1
            return super().decide(request, pool, instance, rank)

    FAILS = frozenset(
        {
            "test_the_load_is_gone_when_all_requests_are_over",
            "test_a_route_that_is_not_taken_counts_nothing",
            "test_a_request_that_is_given_up_while_it_is_placed_leaves_nothing",
        }
    )


class TestKeepsThePlaceOfWhoGivesUp(Broken):
    class router(Sound):  # noqa: N801
        async def route(self, request: RoutingRequest, pool: PoolView) -> Route:
            self.waiting += 1
            await asyncio.sleep(0)
            self.waiting -= 1
            return self.decide(request, pool, *self.choose(request, pool))

    FAILS = frozenset({"test_a_request_that_is_given_up_while_it_is_placed_leaves_nothing"})


class TestListensForEver(Broken):
    class router(Sound):  # noqa: N801
        async def start(self) -> None:
            self.task = asyncio.create_task(self.listen(), name="for-ever")

    FAILS = frozenset({"test_it_can_be_closed_twice_and_leaves_nothing_running"})


class TestCannotBeClosedTwice(Broken):
    class router(Sound):  # noqa: N801
        closed = False

        async def aclose(self) -> None:
            assert not self.closed
            self.closed = True
            await super().aclose()

    FAILS = frozenset({"test_it_can_be_closed_twice_and_leaves_nothing_running"})


class TestCannotBeClosedWithoutAStart(Broken):
    class router(Sound):  # noqa: N801
        started = False

        async def start(self) -> None:
            self.started = True
            await super().start()

        async def aclose(self) -> None:
            assert self.started
            await super().aclose()

    FAILS = frozenset({"test_it_can_be_closed_without_a_start"})


class TestNamesBlocksByTheirNumber(Broken):
    class router(Sound):  # noqa: N801
        def names(self, request: RoutingRequest, chain: list[int]) -> Sequence[int] | None:
            return super().names(request, chain) or [len(chain) - at for at in range(len(chain))]

    # The tracker loses count of what it takes for beginnings.
    FAILS = frozenset(
        {"test_blocks_are_named_by_all_that_is_before_them", "test_the_load_is_gone_when_all_requests_are_over"}
    )


class TestCountsABlockForAPartOfOne(Broken):
    class router(Sound):  # noqa: N801
        def names(self, request: RoutingRequest, chain: list[int]) -> Sequence[int] | None:
            return super().names(request, chain) or [*chain, *unshared_blocks(1)]

    FAILS = frozenset({"test_blocks_are_named_by_all_that_is_before_them"})


class TestSharesBlocksOfWhoDecodes(Broken):
    class router(Sound):  # noqa: N801
        def names(self, request: RoutingRequest, chain: list[int]) -> Sequence[int] | None:
            return None

    FAILS = frozenset({"test_requests_to_be_decoded_share_no_blocks"})


class TestNamesPrivateBlocksAsAnotherRouterDoes(Broken):
    class router(Sound):  # noqa: N801
        def __init__(self, config: PluginConfig, services: RouterServices) -> None:
            super().__init__(config, services)
            self.own = count(-1, -1)

        def names(self, request: RoutingRequest, chain: list[int]) -> Sequence[int] | None:
            return [next(self.own) for _ in chain] if request.phase is Phase.DECODE else None

    FAILS = frozenset({"test_requests_to_be_decoded_share_no_blocks"})


class TestClaimsAsMuchAsAWorkerHolds(Broken):
    class router(Sound):  # noqa: N801
        def decide(self, request: RoutingRequest, pool: PoolView, instance: Instance, rank: int) -> Route:
            route = super().decide(request, pool, instance, rank)
            held = sum(known[:2] == (instance.instance_id, rank) for known in self.known)
            return Route(instance, rank, held if route.overlap else 0, route.blocks)

    FAILS = frozenset({"test_blocks_are_only_claimed_that_the_prompt_has"})


class TestClaimsWhatNobodyTold(Broken):
    class router(Sound):  # noqa: N801
        def decide(self, request: RoutingRequest, pool: PoolView, instance: Instance, rank: int) -> Route:
            route = super().decide(request, pool, instance, rank)
            size = pool.cards[instance.instance_id].kv_cache_block_size
            if request.phase is Phase.DECODE or not size or len(self.known) == 10:
                return route
            return claiming(route, request, size)

    FAILS = frozenset({"test_no_block_is_claimed_of_a_prompt_that_nobody_knows"})


class TestClaimsBlocksForWhoDecodes(Broken):
    class router(Sound):  # noqa: N801
        def decide(self, request: RoutingRequest, pool: PoolView, instance: Instance, rank: int) -> Route:
            route = super().decide(request, pool, instance, rank)
            return claiming(route, request, 4) if request.phase is Phase.DECODE else route

    FAILS = frozenset({"test_no_block_is_claimed_for_a_worker_that_decodes"})


class TestGuessesHowLargeABlockIs(Broken):
    class router(Sound):  # noqa: N801
        def decide(self, request: RoutingRequest, pool: PoolView, instance: Instance, rank: int) -> Route:
            route = super().decide(request, pool, instance, rank)
            unsaid = pool.cards[instance.instance_id].kv_cache_block_size is None
            return claiming(route, request, 16) if unsaid else route

    FAILS = frozenset({"test_no_block_is_claimed_of_workers_that_do_not_say_how_large_one_is"})


class TestTakesAllCachesForOne(Broken):
    class router(Sound):  # noqa: N801
        def decide(self, request: RoutingRequest, pool: PoolView, instance: Instance, rank: int) -> Route:
            for _, _, block in list(self.known):
                self.known.add((instance.instance_id, rank, block))
            return super().decide(request, pool, instance, rank)

    FAILS = frozenset({"test_what_a_worker_held_is_gone_with_it"})


class TestComparesEveryRankWithEveryOther(Broken):
    class router(Sound):  # noqa: N801
        def pick(self, ranks: list[tuple[Instance, int]]) -> tuple[Instance, int]:
            for _ in ranks:
                self.services.tracker.loads([(one.instance_id, rank) for one, rank in ranks])
            return super().pick(ranks)

    FAILS = frozenset({"test_a_choice_looks_at_the_load_of_each_rank_a_few_times"})


class TestAsksForEveryWorkerWhetherItIsEligible(Broken):
    class router(Sound):  # noqa: N801
        def candidates(self, request: RoutingRequest, pool: PoolView) -> Sequence[Instance]:
            return [one for one in pool.instances.values() if one in pool.eligible(request.excluded)]

    FAILS = frozenset({"test_a_choice_asks_a_few_times_who_is_eligible"})
