"""What the tests share: an admission, models, and clients that ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from dynamo_core import AdmissionServices, Permit, PreprocessedRequest, Principal
from dynamo_core.errors import RateLimited
from dynamo_core.protocol import Instance, ModelCard
from dynamo_plugin_admission_rate_limit.admission import RateLimitAdmission
from dynamo_plugin_admission_rate_limit.config import RateLimitConfig
from dynamo_runtime.dispatch.pools.pool import Pool
from dynamo_telemetry import Metrics

Check = Callable[["Frontend", "ManualClock"], Coroutine[Any, Any, None]]


class ManualClock(asyncio.SelectorEventLoop):
    """An event loop whose time stands still unless a test moves it."""

    now = 1000.0

    def time(self) -> float:
        return self.now


class Frontend:
    """A frontend's admission and its clients."""

    def __init__(self, **config: Any) -> None:
        self.metrics = Metrics()
        services = AdmissionServices(self.metrics, retry_after=lambda model: 7.0)
        self.admission = RateLimitAdmission(RateLimitConfig.model_validate(config), services)
        self._pools: dict[str, Pool] = {}

    def pool(self, model: str) -> Pool:
        pool = self._pools.get(model)
        if pool is None:
            pool = self._pools[model] = Pool(model, "aggregated")
            pool.add(Instance(instance_id=1), ModelCard(name=model, instance_id=1))
        return pool

    def precheck(self, key: str = "a", *, model: str = "m", **who: Any) -> None:
        self.admission.precheck(model, Principal(key_id=key, **who), (self.pool(model),))

    async def ask(self, key: str = "a", *, prompt: int = 1, model: str = "m", **who: Any) -> Permit:
        self.precheck(key, model=model, **who)
        request = PreprocessedRequest(model=model, token_ids=[1] * prompt)
        return await self.admission.admit(request, Principal(key_id=key, **who), (self.pool(model),))

    async def refused(self, *args: Any, **options: Any) -> RateLimited:
        with pytest.raises(RateLimited) as error:
            await self.ask(*args, **options)
        return error.value

    async def answer(self, *args: Any, tokens: int = 0, **options: Any) -> None:
        """Run a request from its begin to its end."""
        (await self.ask(*args, **options)).release(tokens)

    def sample(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"dynamo_admission_{name}", labels)


def run_at_a_manual_time(check: Check, **config: Any) -> None:
    """Run a check at a time of its own making; no permit may be left out."""

    async def whole(loop: ManualClock) -> None:
        frontend = Frontend(**config)
        try:
            await check(frontend, loop)
        finally:
            await frontend.admission.aclose()
        assert frontend.admission.held == 0

    with asyncio.Runner(loop_factory=ManualClock) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, ManualClock)
        runner.run(whole(loop))


@pytest.fixture(scope="session")
def run() -> Callable[..., None]:
    """Run a check on a loop whose time it moves, with a frontend of a config."""
    return run_at_a_manual_time


@pytest.fixture(scope="session")
def make_frontend() -> Callable[..., Frontend]:
    """Make a frontend of a config, not started."""
    return Frontend
