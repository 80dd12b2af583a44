"""The harness of the admission checks: a model whose workers have the load that a check gives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar, TypeAlias

from dynamo_core.contracts.admission import Admission, AdmissionServices, Permit
from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.contracts.thresholds import RankLoad, Thresholds
from dynamo_core.errors import DynamoError, QuotaExceeded, RateLimited, ServiceOverloaded
from dynamo_core.protocol.records import AGGREGATED, Instance, ModelCard
from dynamo_core.protocol.request import PreprocessedRequest
from dynamo_core.tasks import TaskSet
from dynamo_runtime.dispatch.pools.pool import Pool
from dynamo_telemetry.metrics import Metrics

from dynamo_testing.optional_packages import pytest

#: Makes the admission under test, not yet started.
AdmissionFactory: TypeAlias = Callable[[AdmissionServices], Admission]

#: How an admission refuses: for the load of workers, or for a limit or a quota of the client.
REFUSALS: tuple[type[DynamoError], ...] = (ServiceOverloaded, RateLimited, QuotaExceeded)
MODEL, OTHER = "kit-model", "kit-other"
#: Loads with nothing to do, exactly at both thresholds of `MODEL`, and over one of them.
IDLE = RankLoad(0, 100, 0, 1000)
EQUAL = RankLoad(50, 100, 200, 1000)
OVER_BLOCKS = RankLoad(51, 100, 0, 1000)
OVER_TOKENS = RankLoad(0, 100, 201, 1000)


class _Thresholds:
    """Half of the blocks and 200 tokens for `MODEL`; nothing for any other."""

    def of(self, model: str) -> Thresholds:
        return Thresholds(0.5, 200) if model == MODEL else Thresholds()


class Hall:
    """One admission, and a pool of two workers for each role and model that a check asks for."""

    def __init__(self, admission: Admission, wait: float) -> None:
        self.admission = admission
        self.wait = wait
        self.principal = Principal()
        self._pools: dict[tuple[str, str], Pool] = {}
        self._asking = TaskSet()

    def pool(self, role: str = AGGREGATED, *, model: str = MODEL, workers: int = 2) -> Pool:
        """Return the pool of a role."""
        pool = self._pools.get((model, role))
        if pool is None:
            pool = self._pools[model, role] = Pool(model, role)
            for number in range(1, workers + 1):
                card = ModelCard(name=model, instance_id=number, worker_type=role)
                pool.add(Instance(instance_id=number), card)
        return pool

    def load(self, load: RankLoad, *, pool: Pool | None = None, workers: Sequence[int] = (1, 2)) -> None:
        """Give workers of a pool a load, as the worker monitor does: the admission says who is busy."""
        pool = pool or self.pool()
        for number in workers:
            busy = self.admission.ARMS_THRESHOLDS and self.admission.is_busy(pool.model, [load])
            pool.set_busy(number, busy)

    async def admit(self, *pools: Pool, principal: Principal | None = None) -> Permit:
        """Return a request for these pools, or for that of the aggregated workers, as core makes one."""
        asked = pools or (self.pool(),)
        principal = principal or self.principal
        request = PreprocessedRequest(model=asked[0].model, token_ids=[1, 2, 3])
        try:
            async with asyncio.timeout(self.wait):
                self.admission.precheck(request.model, principal, asked)
                return await self.admission.admit(request, principal, asked)
        except TimeoutError:
            raise AssertionError(f"neither a permit nor a refusal within {self.wait} s") from None

    async def refusal(self, *pools: Pool, principal: Principal | None = None) -> DynamoError:
        """Return the refusal of such a request, of any kind; a permit is a failure."""
        try:
            permit = await self.admit(*pools, principal=principal)
        except REFUSALS as error:
            return error
        permit.release(0)
        raise AssertionError("a request was let in that should have been refused")

    async def overload(self, *pools: Pool, principal: Principal | None = None) -> ServiceOverloaded:
        """Return the refusal of such a request for the load of the workers; anything else is a failure."""
        refused = await self.refusal(*pools, principal=principal)
        assert isinstance(refused, ServiceOverloaded), f"it was refused by {refused!r}, and not for the load of workers"
        return refused

    def ask(self) -> asyncio.Task[Permit | None]:
        """Return a request that may wait; its result is None if it is refused."""
        return self._asking.spawn(self._ask(), name="kit-request")

    async def _ask(self) -> Permit | None:
        try:
            return await self.admit()
        except REFUSALS:
            return None

    async def aclose(self) -> None:
        """End what a check has left waiting."""
        await self._asking.aclose()


@pytest.mark.asyncio
class AdmissionHarness:
    """The author's part of an admission kit: the fixture `make_admission`, `held`, and two attributes."""

    #: Seconds that anything may take before a check fails, the longest wait in a queue included.
    WAIT: ClassVar[float] = 5.0
    #: How many permits can be out at once, for an admission made with a small limit; None: any number.
    LIMIT: ClassVar[int | None] = None
    #: How many requests are let in one after the other before one is refused for a limit or a quota of the client, for
    #: an admission made with such a limit, of at least 8; None: any number.
    BUDGET: ClassVar[int | None] = None

    @pytest.fixture
    def make_admission(self) -> AdmissionFactory:
        """Make the admission from its services. Every author writes this one."""
        raise NotImplementedError("write a fixture `make_admission` that returns a function of AdmissionServices")

    def held(self, admission: Admission) -> int:
        """Return how much the admission holds now: permits that are out, and places in a queue.

        0 for one that counts none.
        """
        raise NotImplementedError("write a method `held` that tells how many permits and places are held")

    @pytest.fixture
    async def hall(self, make_admission: AdmissionFactory) -> AsyncIterator[Hall]:
        """Yield the started admission, and workers with nothing to do."""
        async with running(make_admission, self.WAIT) as hall:
            yield hall

    @pytest.fixture
    def by_load(self, hall: Hall) -> Hall:
        """Return the same, for checks of an admission that refuses by the load of the workers."""
        if not hall.admission.REFUSES_BY_LOAD:
            pytest.skip("REFUSES_BY_LOAD is not set: the load of workers is no reason to refuse")
        return hall

    async def keep_out(self, hall: Hall) -> list[Permit]:
        """Make the admission keep requests out: by the load, or by permits, which are returned."""
        if hall.admission.REFUSES_BY_LOAD:
            hall.load(OVER_BLOCKS)
            return []
        if self.LIMIT is None:
            pytest.skip("neither REFUSES_BY_LOAD nor LIMIT is set: nothing keeps requests out for a while")
        return [await hall.admit() for _ in range(self.LIMIT)]


@asynccontextmanager
async def running(make_admission: AdmissionFactory, wait: float) -> AsyncIterator[Hall]:
    """Yield a started admission."""
    services = AdmissionServices(Metrics(), thresholds=_Thresholds(), retry_after=lambda model: 7.0)
    admission = make_admission(services)
    hall = Hall(admission, wait)
    await admission.start()
    try:
        yield hall
    finally:
        await hall.aclose()
        await admission.aclose()
