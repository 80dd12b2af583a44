"""Between being let in and being placed a request may wait: others that are let in meanwhile do not slip through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, ClassVar

from dynamo_core import (
    AdmissionServices,
    EngineContext,
    GenerateContext,
    LLMEngineOutput,
    PluginConfig,
    PoolView,
    PreprocessedRequest,
    Principal,
    RankLoad,
    Route,
    Router,
    RouterServices,
    RoutingRequest,
    Thresholds,
)
from dynamo_core.errors import ServiceOverloaded
from dynamo_plugin_admission_token_capacity.admission import TokenCapacityAdmission
from dynamo_plugin_router_round_robin.router import RoundRobinRouter
from dynamo_runtime.dispatch.load.monitor import WorkerMonitor
from dynamo_runtime.dispatch.pools.pool import Pool
from dynamo_telemetry import Metrics

from tests.integration.parts import Plain

BURST = 50
#: Of 64 blocks of four tokens; a prompt has 25.
THRESHOLDS = Thresholds(active_decode_blocks_threshold=0.2)


class Endless(Plain):
    """Never answers."""

    facts: ClassVar[dict[str, Any]] = {"kv_cache_block_size": 4, "total_kv_blocks": 64}

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        await ctx.stopped()
        yield LLMEngineOutput.cancelled()


class Hesitant(RoundRobinRouter):
    """Chooses no worker before the whole burst has been let in."""

    def __init__(self, services: RouterServices) -> None:
        super().__init__(PluginConfig(), services)
        self.asked = 0
        self.all_asked = asyncio.Event()

    async def route(self, request: RoutingRequest, pool: PoolView) -> Route:
        self.asked += 1
        if self.asked == BURST:
            self.all_asked.set()
        await self.all_asked.wait()
        return await super().route(request, pool)


class Fixed:
    """The same thresholds for every model."""

    def of(self, model: str) -> Thresholds:
        return THRESHOLDS


async def test_requests_admitted_together_are_placed_only_where_room_is_left(
    make_house: Callable[..., Any], stack: AsyncExitStack
) -> None:
    def busy(model: str, ranks: Sequence[RankLoad]) -> bool:
        return THRESHOLDS.busy(ranks)

    def make_router(services: RouterServices) -> Router:
        assert isinstance(services.pool, Pool)
        monitor.take(services.pool)
        return Hesitant(services)

    admission = TokenCapacityAdmission(PluginConfig(), AdmissionServices(Metrics(), thresholds=Fixed()))
    house = make_house(admission=admission, router=make_router)
    monitor = WorkerMonitor(house.tracker, house.transport.events(), house.discovery, rule=busy)
    stack.push_async_callback(monitor.aclose)
    for _ in range(2):
        await house.run(Endless)

    async def ask(number: int) -> Any:
        request = PreprocessedRequest(model="m", token_ids=[number] * 100)
        with suppress(ServiceOverloaded):
            return await house.model().generate(request, EngineContext(f"r{number}"), Principal())

    async with asyncio.timeout(30):
        let_in = [stream for stream in await asyncio.gather(*map(ask, range(BURST))) if stream is not None]
    for stream in let_in:
        await stream.aclose()

    # One at each worker, which it makes busy.
    assert len(let_in) == 2
