"""Checks of the cost of one choice, in looks at loads and workers rather than in time."""

from __future__ import annotations

from dynamo_testing.router.harness import Fleet, RouterFactory, RouterHarness

#: How often a choice may ask for the eligible workers, however many there are.
LOOKS = 4
WORKERS = 24


class CostChecks(RouterHarness):
    """The work for one choice grows with the number of ranks, and no faster."""

    async def test_a_choice_reads_the_load_of_each_rank_a_few_times(self, make_router: RouterFactory) -> None:
        async with self.running(make_router) as fleet:
            for ranks in (1, 2):
                fleet.add(*range(100 * ranks, 100 * ranks + WORKERS), ranks=ranks)
                await self._settled(fleet)
                before = fleet.tracker.reads
                await fleet.route()
                bound = self.READS_PER_RANK * len(fleet.ranks())
                assert fleet.tracker.reads - before <= bound, f"of {len(fleet.ranks())} ranks"

    async def test_a_choice_reads_the_eligible_workers_a_few_times(self, make_router: RouterFactory) -> None:
        async with self.running(make_router) as fleet:
            fleet.add(*range(WORKERS))
            await self._settled(fleet)
            before = fleet.pool.looks
            await fleet.route()

            assert fleet.pool.looks - before <= LOOKS

    @staticmethod
    async def _settled(fleet: Fleet) -> None:
        """Wait until the workers are known and all have something to do."""
        for _ in range(len(fleet.ranks())):
            await fleet.placed()
