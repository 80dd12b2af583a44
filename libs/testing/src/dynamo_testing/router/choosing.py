"""Checks of the eligible workers, and of the error where none is eligible."""

from __future__ import annotations

import math

from dynamo_core.contracts.router import Phase
from dynamo_core.errors import ServiceOverloaded, Unavailable
from dynamo_core.protocol.records import CORDONED, DRAINING, SERVING
from dynamo_core.protocol.request import RoutingHints

from dynamo_testing.optional_packages import pytest
from dynamo_testing.router.harness import Fleet, RouterFactory, RouterHarness

#: Requests that are enough for every one of a few ranks to be chosen, even by chance.
MANY = 150


class ChoiceChecks(RouterHarness):
    """A router chooses among the workers that are eligible now, and among all of them."""

    async def test_a_worker_of_the_pool_is_chosen(self, fleet: Fleet) -> None:
        for phase in Phase:
            await fleet.route(fleet.asked(phase=phase))

    async def test_every_worker_is_chosen_sooner_or_later(self, fleet: Fleet) -> None:
        chosen = {(await fleet.placed())[0].instance.instance_id for _ in range(MANY)}

        assert chosen == {1, 2, 3}

    async def test_workers_that_were_tried_are_left_out(self, fleet: Fleet) -> None:
        for left in (1, 2, 3):
            excluded = [number for number in (1, 2, 3) if number != left]
            for phase in Phase:
                assert (await fleet.route(fleet.asked(excluded=excluded, phase=phase))).instance.instance_id == left

    async def test_busy_workers_are_left_out(self, fleet: Fleet) -> None:
        fleet.pool.set_busy(1, True)
        fleet.pool.set_busy(3, True)

        assert {(await fleet.placed())[0].instance.instance_id for _ in range(12)} == {2}

    async def test_a_worker_is_chosen_again_once_it_is_free(self, fleet: Fleet) -> None:
        fleet.pool.set_busy(1, True)
        await fleet.route()
        fleet.pool.set_busy(1, False)
        fleet.pool.set_busy(2, True)
        fleet.pool.set_busy(3, True)

        assert (await fleet.route()).instance.instance_id == 1

    async def test_workers_out_of_service_are_left_out(self, fleet: Fleet) -> None:
        fleet.set_state(1, CORDONED)
        fleet.set_state(3, DRAINING)

        assert {(await fleet.placed())[0].instance.instance_id for _ in range(12)} == {2}

    async def test_a_worker_is_chosen_again_once_it_is_back_in_service(self, fleet: Fleet) -> None:
        for number in (1, 2, 3):
            fleet.set_state(number, CORDONED)
        assert isinstance(await fleet.refusal(), Unavailable)
        fleet.set_state(1, SERVING)

        assert (await fleet.route()).instance.instance_id == 1

    async def test_an_empty_pool_is_unavailable(self, make_router: RouterFactory) -> None:
        async with self.running(make_router) as fleet:
            assert isinstance(await fleet.refusal(), Unavailable)

    async def test_a_pool_of_busy_workers_is_an_overload(self, fleet: Fleet) -> None:
        for number in (1, 2, 3):
            fleet.pool.set_busy(number, True)

        assert isinstance(await fleet.refusal(), ServiceOverloaded)

    async def test_a_request_that_has_tried_every_worker_is_an_overload(self, fleet: Fleet) -> None:
        assert isinstance(await fleet.refusal(fleet.asked(excluded=(1, 2, 3))), ServiceOverloaded)

    async def test_a_worker_that_joins_can_be_chosen(self, fleet: Fleet) -> None:
        await fleet.route()
        fleet.add(4)

        assert (await fleet.route(fleet.asked(excluded=(1, 2, 3)))).instance.instance_id == 4

    async def test_a_worker_that_leaves_is_not_chosen(self, fleet: Fleet) -> None:
        for _ in range(3):
            await fleet.placed()
        fleet.pool.remove(2)

        assert {(await fleet.placed())[0].instance.instance_id for _ in range(MANY)} == {1, 3}

    async def test_a_pool_may_run_empty_and_fill_again(self, fleet: Fleet) -> None:
        await fleet.route()
        for number in (1, 2, 3):
            fleet.pool.remove(number)
        assert isinstance(await fleet.refusal(), Unavailable)
        fleet.add(2)

        assert (await fleet.route()).instance.instance_id == 2

    async def test_a_rank_is_one_of_its_worker(self, make_router: RouterFactory) -> None:
        async with self.running(make_router) as fleet:
            fleet.add(1)
            fleet.add(2, ranks=3, first_rank=2)
            ranks = set(fleet.ranks())

            for _ in range(20):
                route, _ = await fleet.placed()
                assert (route.instance.instance_id, route.dp_rank) in ranks

    async def test_every_rank_is_chosen_sooner_or_later(self, make_router: RouterFactory) -> None:
        async with self.running(make_router) as fleet:
            fleet.add(1, 2, ranks=2, first_rank=1)

            routes = [(await fleet.placed())[0] for _ in range(MANY)]

            assert {(route.instance.instance_id, route.dp_rank) for route in routes} >= set(fleet.ranks())

    async def test_explain_lists_exactly_the_eligible_workers(self, fleet: Fleet) -> None:
        fleet.pool.set_busy(2, True)
        before = fleet.counted()

        explained = [fleet.router.explain(fleet.asked(phase=phase), fleet.pool) for phase in Phase]

        for considered in explained:
            if considered is None:
                pytest.skip("the router explains nothing")
            assert [(one.instance_id, one.dp_rank) for one in considered] == [(1, 0), (3, 0)]
            assert all(math.isfinite(one.cost) for one in considered)
        assert fleet.counted() == before
        await self.let_go(fleet.router)

    # Requests that name their worker.

    async def test_the_worker_that_a_request_names_is_chosen(self, fleet: Fleet) -> None:
        self._pins()
        for number in (1, 2, 3) * 3:
            hints = RoutingHints(backend_instance_id=number)
            assert (await fleet.placed(fleet.asked(hints=hints)))[0].instance.instance_id == number

    async def test_either_phase_has_a_worker_of_its_own_to_name(self, fleet: Fleet) -> None:
        self._pins()
        hints = RoutingHints(prefill_worker_id=1, decode_worker_id=2)
        for phase, number in ((Phase.PREFILL, 1), (Phase.DECODE, 2)):
            for _ in range(5):
                route, _ = await fleet.placed(fleet.asked(hints=hints, phase=phase))
                assert route.instance.instance_id == number

    async def test_the_rank_that_a_request_names_is_chosen(self, make_router: RouterFactory) -> None:
        self._pins()
        async with self.running(make_router) as fleet:
            fleet.add(1, 2, ranks=3)
            for rank in (0, 1, 2) * 3:
                assert (await fleet.placed(fleet.asked(hints=RoutingHints(dp_rank=rank))))[0].dp_rank == rank

    async def test_no_other_worker_replaces_a_pinned_one(self, fleet: Fleet) -> None:
        self._pins()
        assert isinstance(await fleet.refusal(fleet.asked(hints=RoutingHints(backend_instance_id=9))), Unavailable)
        await fleet.refusal(fleet.asked(hints=RoutingHints(backend_instance_id=1), excluded=(1,)))

    async def test_a_worker_out_of_service_is_not_chosen_though_a_request_names_it(self, fleet: Fleet) -> None:
        self._pins()
        fleet.set_state(1, CORDONED)

        await fleet.refusal(fleet.asked(hints=RoutingHints(backend_instance_id=1)))

    def _pins(self) -> None:
        if not self.CAN_PIN:
            pytest.skip("CAN_PIN is False: requests cannot name a worker")
