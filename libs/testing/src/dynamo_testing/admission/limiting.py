"""Checks of client limits: the reason in the refusal, and no mention of worker load."""

from __future__ import annotations

import math

from dynamo_core.errors import DynamoError, QuotaExceeded, RateLimited

from dynamo_testing.admission.harness import OVER_BLOCKS, AdmissionHarness, Hall
from dynamo_testing.optional_packages import pytest

_LEAST = 8


class LimitChecks(AdmissionHarness):
    """Checks that a client over its own limit hears of that limit, and not of busy workers."""

    async def test_a_client_over_its_limit_is_refused_with_the_reason(self, hall: Hall) -> None:
        refused = await self._over_the_limit(hall)

        assert isinstance(refused, RateLimited | QuotaExceeded), f"{refused!r} says nothing of a limit of the client"
        assert str(refused).strip(), "a client can do nothing with a refusal that says nothing"
        if isinstance(refused, RateLimited):
            assert math.isfinite(refused.retry_after)
            assert refused.retry_after > 0

    async def test_a_refusal_for_a_limit_leaves_nothing_behind(self, hall: Hall) -> None:
        await self._over_the_limit(hall)

        assert self.held(hall.admission) == 0

    async def test_an_admission_that_ignores_load_admits_while_workers_are_busy(self, hall: Hall) -> None:
        """Another plugin decides by the load: in a chain each has its own reasons."""
        if hall.admission.REFUSES_BY_LOAD:
            pytest.skip("REFUSES_BY_LOAD is set")
        hall.load(OVER_BLOCKS)

        permit = await hall.admit()

        permit.release(0)

    async def _over_the_limit(self, hall: Hall) -> DynamoError:
        if self.BUDGET is None:
            pytest.skip("BUDGET is not set: a client has no limit")
        assert self.BUDGET >= _LEAST, f"BUDGET is less than {_LEAST}, which other checks need"
        for _ in range(self.BUDGET):
            (await hall.admit()).release(0)
        return await hall.refusal()
