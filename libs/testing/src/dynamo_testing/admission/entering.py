"""Checks of the requests that are admitted, and of the errors for refused ones."""

from __future__ import annotations

import asyncio
import math

from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.protocol.records import DECODE, PREFILL

from dynamo_testing.admission.harness import (
    EQUAL,
    IDLE,
    OTHER,
    OVER_BLOCKS,
    OVER_TOKENS,
    AdmissionFactory,
    AdmissionHarness,
    Hall,
    running,
)

_SHORTEST, _LONGEST = 1.0, 60.0


class EntryChecks(AdmissionHarness):
    """While a worker is free a request is let in, and while none is it is refused in time."""

    async def test_a_request_is_admitted_while_workers_are_free(self, hall: Hall) -> None:
        permit = await hall.admit()

        permit.release(3)

    async def test_one_free_worker_is_enough(self, hall: Hall) -> None:
        hall.load(OVER_BLOCKS, workers=(1,))

        permit = await hall.admit()

        permit.release(0)

    async def test_a_request_is_refused_while_all_workers_are_busy(self, by_load: Hall) -> None:
        by_load.load(OVER_BLOCKS)

        await by_load.overload()

    async def test_a_refusal_has_a_retry_after(self, by_load: Hall) -> None:
        by_load.load(OVER_TOKENS)

        refused = await by_load.overload()

        assert math.isfinite(refused.retry_after)
        assert _SHORTEST <= refused.retry_after <= _LONGEST

    async def test_every_pool_that_is_needed_must_have_a_free_worker(self, by_load: Hall) -> None:
        prefill, decode = by_load.pool(PREFILL), by_load.pool(DECODE)
        for full in (prefill, decode):
            by_load.load(OVER_BLOCKS, pool=full)
            await by_load.overload(prefill, decode)
            by_load.load(IDLE, pool=full)

        permit = await by_load.admit(prefill, decode)

        permit.release(0)

    async def test_a_pool_without_workers_is_not_an_overload(self, hall: Hall) -> None:
        """The router tells that there is no worker; coming back later is no advice then."""
        permit = await hall.admit(hall.pool(workers=0))

        permit.release(0)

    async def test_a_model_is_not_refused_for_the_load_of_another(self, hall: Hall) -> None:
        hall.load(OVER_BLOCKS)

        permit = await hall.admit(hall.pool(model=OTHER))

        permit.release(0)

    async def test_requests_are_admitted_again_once_a_worker_is_free(self, by_load: Hall) -> None:
        by_load.load(OVER_BLOCKS)
        await by_load.overload()

        by_load.load(IDLE, workers=(2,))

        permit = await by_load.admit()
        permit.release(0)

    async def test_the_clients_deadline_bounds_a_wait(self, by_load: Hall) -> None:
        by_load.load(OVER_BLOCKS)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + by_load.wait / 20

        await by_load.overload(principal=Principal(deadline=deadline))

        assert loop.time() < deadline + by_load.wait / 4, "a wait went on past the deadline of who asked"

    async def test_the_admission_can_be_closed_twice_and_without_a_start(
        self, make_admission: AdmissionFactory
    ) -> None:
        async with running(make_admission, self.WAIT) as hall:
            await hall.admission.aclose()
            unstarted = make_admission(hall.admission.services)

            await unstarted.aclose()

    async def test_a_load_at_the_threshold_is_not_over_it(self, hall: Hall) -> None:
        hall.load(EQUAL)

        permit = await hall.admit()

        permit.release(0)
