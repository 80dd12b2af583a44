"""Explaining a route: what every router shows of real workers, without reserving anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dynamo_core import (
    DisaggregationMode,
    PluginConfig,
    PreprocessedRequest,
    Router,
    RouterServices,
    StopConditions,
    WorkerConfig,
)
from dynamo_core.contracts.requests.explain import RouteView
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.engine import MockerEngine
from dynamo_plugin_router_kv.config import KvConfig
from dynamo_plugin_router_kv.router import KvRouter
from dynamo_runtime.dispatch.models.model import Model

MakeHouse = Callable[..., Any]
PROMPT = list(range(100, 142))


class Mocker(MockerEngine):
    """Blocks of four tokens, no delays, two ranks."""

    def __init__(self, config: PluginConfig, worker: WorkerConfig) -> None:
        settings = MockerConfig(block_size=4, num_gpu_blocks=64, data_parallel_size=2, speedup_ratio=0)
        super().__init__(settings, worker)


def asked(prompt: list[int] = PROMPT) -> PreprocessedRequest:
    return PreprocessedRequest(model="m", token_ids=prompt, stop_conditions=StopConditions(max_tokens=1))


def kv(services: RouterServices) -> Router:
    return KvRouter(KvConfig(seed=1), services)


async def run(house: Any) -> None:
    stream = await house.ask(asked())
    async for _ in stream:
        pass
    await stream.aclose()


async def test_the_rank_that_holds_the_prompt_is_the_best(make_house: MakeHouse) -> None:
    house = make_house(router=kv)
    for _ in range(2):
        await house.run(Mocker)
    await run(house)
    model = house.models.get("m")

    await house.eventually(lambda: any(rank.overlap for rank in model.explain(asked())[0].ranks))
    (view,) = model.explain(asked())

    assert (view.role, view.router, view.tokens, view.block_size, view.refusal) == ("aggregated", "kv", 42, 4, None)
    assert len(view.ranks) == 4
    (best,) = [rank for rank in view.ranks if rank.best]
    assert best.overlap == 10
    assert best.cost == min(rank.cost for rank in view.ranks)
    assert {rank.overlap for rank in view.ranks if not rank.best} == {0}
    assert {rank.state for rank in view.ranks} == {"free"}


async def test_explain_shows_ineligible_workers_with_their_state(make_house: MakeHouse) -> None:
    house = make_house(router=kv)
    for _ in range(2):
        await house.run(Mocker)
    model = house.models.get("m")
    pool = model.groups["aggregated"].pool
    one, other = pool.instances
    pool.set_busy(one, True)

    (view,) = model.explain(asked())
    assert {(rank.state, rank.best is True, rank.cost is None) for rank in view.ranks if rank.instance_id == one} == {
        ("busy", False, True)
    }
    pool.set_busy(other, True)
    (view,) = model.explain(asked())

    assert view.refusal is not None
    assert {(rank.state, rank.best) for rank in view.ranks} == {("busy", None)}


@pytest.mark.parametrize(("role", "overlap", "dearest"), [("prefill", 10, 20.5), ("decode", 0, 10.0)])
async def test_either_role_is_shown_as_its_worker_would_be_chosen(
    make_house: MakeHouse, role: str, overlap: int, dearest: float
) -> None:
    """Blocks to be computed and blocks to be held for the one, the latter alone for the other."""
    house = make_house(router=kv)
    for mode in (DisaggregationMode.DECODE, DisaggregationMode.PREFILL):
        await house.run(Mocker, disaggregation_mode=mode)
    await run(house)
    model: Model = house.models.get("m")

    def view(role: str) -> RouteView:
        return next(view for view in model.explain(asked()) if view.role == role)

    await house.eventually(lambda: any(rank.overlap for rank in view("prefill").ranks))

    assert max(rank.overlap or 0 for rank in view(role).ranks) == overlap
    assert max(rank.cost or 0 for rank in view(role).ranks) == dearest
