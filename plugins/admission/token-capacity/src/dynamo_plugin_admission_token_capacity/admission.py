"""The policy: a worker over its thresholds is busy, and where all are busy a request is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dynamo_core import Admission, Permit, PoolView, PreprocessedRequest, Principal, RankLoad
from dynamo_core.errors import ServiceOverloaded

_PERMIT = Permit()


class TokenCapacityAdmission(Admission):
    """Admission by load. It holds nothing for a request: core counts, and each request reads the free room."""

    NAME = "token-capacity"
    ARMS_THRESHOLDS: ClassVar[bool] = True

    def is_busy(self, model: str, ranks: Sequence[RankLoad]) -> bool:
        """Return whether every rank is over a threshold of the model."""
        return self.services.thresholds.of(model).busy(ranks)

    def precheck(self, model: str, principal: Principal, pools: Sequence[PoolView]) -> None:
        """Refuse while a pool has workers in service but none that is free, before the prompt is looked at.

        A pool without workers in service is another error, which the router tells.
        """
        for pool in pools:
            if pool.in_service and not pool.eligible():
                raise ServiceOverloaded(retry_after=self.services.retry_after(model))

    async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[PoolView]) -> Permit:
        """Look once more, as time has passed since the first look."""
        for pool in pools:
            self.precheck(pool.model, principal, (pool,))
        return _PERMIT
