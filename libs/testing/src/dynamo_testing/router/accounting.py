"""Checks of router accounting: active requests, credit for cached blocks, and nothing left at the end."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from dynamo_core.contracts.router import Phase, Route, RoutingRequest
from dynamo_core.errors import DynamoError
from dynamo_core.protocol.records import DECODE
from dynamo_core.tasks import TaskSet
from dynamo_runtime.dispatch.load.tracker import Reservation

from dynamo_testing.router.harness import BLOCK, Fleet, RouterFactory, RouterHarness, range_of
from dynamo_testing.waiting import turns

#: How many turns of the loop a request has had when it is given up, at most.
TURNS = 6


class AccountChecks(RouterHarness):
    """Core counts; a router says only which blocks are counted, and holds nothing of a request that is over."""

    async def test_no_load_is_left_when_all_requests_have_ended(self, fleet: Fleet) -> None:
        draw = random.Random(7)  # noqa: S311 - the same every time
        open_: list[Reservation] = []
        for step in range(200):
            what = draw.randrange(8)
            if what == 0 and len(fleet.pool.instances) > 1:
                gone = draw.choice(list(fleet.pool.instances))
                if not fleet.load.requests(gone):
                    fleet.pool.remove(gone)
            elif what == 1:
                fleet.add(10 + step)
            elif what < 4 and open_:
                open_.pop(draw.randrange(len(open_))).release()
            elif what == 4 and open_:
                draw.choice(open_).first_item()
            else:
                tokens = range_of(draw.randrange(3), draw.randrange(1, 30))
                phase = draw.choice(list(Phase))
                open_.append((await fleet.placed(fleet.asked(tokens, phase=phase)))[1])
        for reservation in open_:
            reservation.release()
            reservation.release()

        assert fleet.counted() == {}
        assert fleet.load.total_requests == 0
        await self.let_go(fleet.router)

    async def test_a_route_that_is_not_taken_counts_nothing(self, fleet: Fleet) -> None:
        for phase in Phase:
            await fleet.route(fleet.asked(phase=phase))

        assert fleet.counted() == {}
        await self.let_go(fleet.router)

    async def test_a_request_that_is_given_up_while_it_is_placed_leaves_nothing(self, fleet: Fleet) -> None:
        for count in range(TURNS):
            placing = TaskSet()
            for number in range(3):
                placing.spawn(fleet.route(), name=f"kit-placing-{number}")
            await turns(count)
            await placing.aclose()

        await self.let_go(fleet.router)
        assert fleet.counted() == {}
        await fleet.route()

    async def test_the_router_can_be_closed_twice_and_leaves_no_task(self, make_router: RouterFactory) -> None:
        before = _names()
        async with self.running(make_router) as fleet:
            fleet.add(1, 2)
            _, reservation = await fleet.placed()
            reservation.release()
            await fleet.router.aclose()
            await fleet.router.aclose()
            await self.until(lambda: _names() <= before, "what runs is more than before it was made")

    async def test_the_router_can_be_closed_without_a_start(self, make_router: RouterFactory) -> None:
        fleet = Fleet(make_router, self.WAIT)

        await fleet.router.aclose()

    # The blocks.

    async def test_blocks_are_named_by_all_that_is_before_them(self, fleet: Fleet) -> None:
        """For the tracker, who holds a block holds what is before it; two requests share no more than a beginning."""
        before: dict[int, tuple[int, ...]] = {}
        for length in (5, 12, 12, 30, 21, 8):
            for number in range(2):
                asked = fleet.asked(range_of(number, length))
                route, _ = await fleet.placed(asked)
                names = _names_of(route, fleet, asked)
                assert len(names) <= length // BLOCK, "more blocks than the prompt has"
                for at, name in enumerate(names):
                    assert before.setdefault(name, tuple(names[:at])) == tuple(names[:at]), "a name stands for two"

    async def test_requests_to_be_decoded_share_no_blocks(self, make_router: RouterFactory) -> None:
        """Nor do those of another router on the same tracker: a frontend has one for each pool."""
        async with self.running(make_router, DECODE) as fleet:
            other = make_router(fleet.services(fleet.pool))
            await other.start()
            try:
                fleet.add(1)
                seen: set[int] = set()
                for router in (fleet.router, other) * 3:
                    asked = fleet.asked(range_of(0, 12), phase=Phase.DECODE)
                    route = await fleet.route(asked, router=router)
                    names = _names_of(route, fleet, asked)
                    assert seen.isdisjoint(names), "counted as shared with another request"
                    seen.update(names)
            finally:
                await other.aclose()

    async def test_blocks_are_only_claimed_that_the_prompt_has(self, fleet: Fleet) -> None:
        await self._tell_all(fleet)
        for length in (1, 3, 4, 5, 8, 17, 40):
            route = await fleet.route(fleet.asked(range_of(0, length)))
            assert 0 <= route.overlap <= length // BLOCK

    async def test_an_unknown_prompt_has_no_overlap(self, fleet: Fleet) -> None:
        await self._tell_all(fleet)

        assert (await fleet.route(fleet.asked(range_of(5, 20)))).overlap == 0

    async def test_no_block_is_claimed_for_a_worker_that_decodes(self, fleet: Fleet) -> None:
        await self._tell_all(fleet)
        for _ in range(3):
            route, _ = await fleet.placed(fleet.asked(range_of(0, 40), phase=Phase.DECODE))
            assert route.overlap == 0

    async def test_workers_without_a_block_size_have_no_overlap(self, make_router: RouterFactory) -> None:
        async with self.running(make_router) as fleet:
            fleet.add(1, 2, block_size=None)
            await self._tell_all(fleet)
            for _ in range(4):
                route, _ = await fleet.placed(fleet.asked(range_of(0, 40)))
                assert route.overlap == 0

    async def test_the_cached_blocks_of_a_removed_worker_are_forgotten(self, make_router: RouterFactory) -> None:
        async with self.running(make_router) as fleet:
            fleet.add(1)
            await self._tell_all(fleet)
            await fleet.route(fleet.asked(range_of(0, 40)))
            fleet.pool.remove(1)
            with suppress(DynamoError):
                await fleet.route()
            fleet.add(2)

            assert (await fleet.route(fleet.asked(range_of(0, 40)))).overlap == 0

    @staticmethod
    async def _tell_all(fleet: Fleet) -> None:
        # Known to the router before they tell.
        await fleet.route(fleet.asked(range_of(9)))
        await turns()
        for number in fleet.pool.instances:
            fleet.tell(number, range_of(0, 40))
        await turns()


def _names_of(route: Route, fleet: Fleet, asked: RoutingRequest) -> list[int]:
    """Return the blocks that the tracker counts for a route."""
    size = fleet.pool.cards[route.instance.instance_id].kv_cache_block_size
    return list(route.blocks if route.blocks is not None else asked.known_hashes(size))


def _names() -> set[str]:
    """Return what runs now."""
    return {task.get_name() for task in asyncio.all_tasks()}
