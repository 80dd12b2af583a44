"""Checks that what is held for a request is released once, however the request ends."""

from __future__ import annotations

import asyncio

from dynamo_core.contracts.admission import Permit

from dynamo_testing.admission.harness import IDLE, OVER_BLOCKS, AdmissionHarness, Hall
from dynamo_testing.optional_packages import pytest
from dynamo_testing.waiting import turns

_ROUNDS = 5


class HoldingChecks(AdmissionHarness):
    """Checks of permits, places in queues, and leftovers."""

    async def test_a_released_permit_leaves_nothing_behind(self, hall: Hall) -> None:
        for tokens in range(_ROUNDS):
            permit = await hall.admit()
            permit.release(tokens)

        assert self.held(hall.admission) == 0

    async def test_permits_are_released_in_any_order(self, hall: Hall) -> None:
        count = self.LIMIT or 3
        permits = [await hall.admit() for _ in range(count)]

        for permit in reversed(permits):
            permit.release(1)

        assert self.held(hall.admission) == 0

    async def test_a_refusal_leaves_nothing_behind(self, by_load: Hall) -> None:
        by_load.load(OVER_BLOCKS)
        await by_load.refusal()

        assert self.held(by_load.admission) == 0

    async def test_a_precheck_holds_nothing(self, hall: Hall) -> None:
        for _ in range(_ROUNDS):
            hall.admission.precheck(hall.pool().model, hall.principal, (hall.pool(),))

        assert self.held(hall.admission) == 0

    async def test_a_request_cancelled_while_asking_leaves_nothing_behind(self, hall: Hall) -> None:
        taken = await self.keep_out(hall)
        asked = [hall.ask() for _ in range(_ROUNDS)]
        await turns()

        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for permit in taken:
            permit.release(0)

        assert self.held(hall.admission) == 0
        hall.load(IDLE)
        permit = await hall.admit()
        permit.release(0)

    async def test_a_released_place_admits_exactly_one_request(self, hall: Hall) -> None:
        limit = self.LIMIT
        if limit is None:
            pytest.skip("LIMIT is not set: any number of permits can be out")
        out: list[Permit] = [await hall.admit() for _ in range(limit)]
        asked = [hall.ask() for _ in range(2)]
        await turns()
        assert not any(_let_in(task) for task in asked), "more permits are out than the limit"

        out.pop().release(1)
        await asyncio.sleep(0)
        # One that does not wait has been refused by now: then the next one to ask is let in.
        more = [hall.ask() for _ in range(2 - len([task for task in asked if not task.done()]))]
        await turns()
        asked += more

        assert len([task for task in asked if _let_in(task)]) == 1


def _let_in(task: asyncio.Task[Permit | None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None and task.result() is not None
