"""Workers that are cordoned or draining, in one process: nothing new comes to them, and what they have goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from dynamo_core import (
    BackendError,
    DisaggregationMode,
    EngineContext,
    GenerateContext,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    Principal,
    RankView,
    RoutingHints,
    StopConditions,
    WorkerConfig,
)
from dynamo_core.contracts.transports.call import WORKER_STATE
from dynamo_core.errors import Unavailable
from dynamo_core.protocol.records import CORDONED, DRAINING, SERVING, WorkerStateReport, WorkerStateRequest
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.engine import MockerEngine
from dynamo_plugin_router_kv.config import KvConfig
from dynamo_plugin_router_kv.router import KvRouter
from dynamo_runtime.dispatch.execution.pipeline import Deadlines
from dynamo_runtime.worker.worker import Worker, WorkerLimits

from tests.integration.parts import Plain

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
ONE_AT_A_TIME = WorkerLimits(engine_requests=1, queued_requests=0, grace_period=0, drain_timeout=1)


class Held(Plain):
    """Gives one token, and the rest of the prompt once its gate is open.

    It gives none before the gate if it is `silent`, and `dies` there if it is told to.
    """

    def __init__(self, config: PluginConfig, worker: WorkerConfig) -> None:
        super().__init__(config, worker)
        self.gate = asyncio.Event()
        self.dies = False
        self.silent = False
        self.asked = 0

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        self.asked += 1
        if self.worker.disaggregation_mode is PREFILL:
            end = LLMEngineOutput.length().with_tokens(request.token_ids[:1])
            end.disaggregated_params = {"kv": 1}
            yield end
            return
        if not self.silent:
            yield LLMEngineOutput(request.token_ids[:1])
        forget = ctx.on_stop(self.gate.set)
        await self.gate.wait()
        forget()
        if self.dies:
            raise BackendError.EngineShutdown("the engine is gone")
        if ctx.is_stopped():
            yield LLMEngineOutput.cancelled()
            return
        yield LLMEngineOutput.length().with_tokens(request.token_ids[1:])


def engine_of(worker: Worker) -> Held:
    assert isinstance(worker._engine, Held)
    return worker._engine


def number_of(worker: Worker) -> int:
    assert worker.instance is not None
    return worker.instance.instance_id


async def tell(house: Any, worker: Worker, state: str | None = None) -> WorkerStateReport:
    """Ask a worker as a frontend does; return once the house goes by its answer."""
    assert worker.instance is not None
    number = number_of(worker)
    (report,) = await house.caller(worker.instance, WORKER_STATE, WorkerStateRequest(state), timeout=10)
    await house.until(
        lambda: (number, report.state) in {(one.instance_id, one.state) for one in house.models.instances()}
    )
    assert isinstance(report, WorkerStateReport)
    return report


async def workers(house: Any, *names: str, **options: Any) -> list[Worker]:
    return [await house.run(Held, worker=name, **options) for name in names]


async def rest(stream: Any) -> list[int]:
    try:
        return [token async for item in stream for token in item.token_ids]
    finally:
        await stream.aclose()


async def answer(house: Any, prompt: list[int]) -> list[int]:
    return await rest(await house.generate(prompt))


@pytest.mark.parametrize("state", [CORDONED, DRAINING])
async def test_a_running_request_goes_on_and_new_ones_go_elsewhere(house: Any, state: str) -> None:
    one, other = await workers(house, "one", "other")
    running = [await house.begun([1, 2, 3]) for _ in range(2)]

    at_first = await tell(house, one, state)
    engine_of(other).gate.set()
    answers = [await answer(house, [5, 6]) for _ in range(6)]
    before = engine_of(one).asked
    engine_of(one).gate.set()
    ends = [await rest(stream) for stream in running]

    assert at_first == WorkerStateReport(state, 1, False)
    assert answers == [[5, 6]] * 6
    assert (before, engine_of(other).asked) == (1, 7)
    assert ends == [[2, 3], [2, 3]]
    async with asyncio.timeout(60):
        while (report := await tell(house, one)).requests:
            pass
    assert report == WorkerStateReport(state, 0, True)


async def test_a_model_with_only_cordoned_workers_stays_listed(house: Any) -> None:
    (worker,) = await workers(house, "one")
    await tell(house, worker, CORDONED)

    assert [model.name for model in house.models.list()] == ["m"]
    assert house.model().missing_roles == ()
    house.model().precheck(Principal())


@pytest.mark.parametrize("closed", ["aggregated", "prefill", "decode"])
async def test_a_request_takes_the_plan_with_workers_in_service(house: Any, closed: str) -> None:
    engines = {
        "aggregated": (await workers(house, "whole"))[0],
        "prefill": (await workers(house, "p", disaggregation_mode=PREFILL))[0],
        "decode": (await workers(house, "d", disaggregation_mode=DECODE))[0],
    }
    await house.until(lambda: len(house.model().groups) == 3)
    for worker in engines.values():
        engine_of(worker).gate.set()

    await tell(house, engines[closed], CORDONED)
    for _ in range(3):
        assert await answer(house, [1, 2]) == [1, 2]

    asked = {role: engine_of(worker).asked for role, worker in engines.items()}
    expected = {"aggregated": 0, "prefill": 3, "decode": 3}
    assert asked == (expected if closed == "aggregated" else {"aggregated": 3, "prefill": 0, "decode": 0})


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_pair_names_the_role_without_workers_in_service(house: Any, role: str) -> None:
    pair = {
        "prefill": (await workers(house, "p", disaggregation_mode=PREFILL))[0],
        "decode": (await workers(house, "d", disaggregation_mode=DECODE))[0],
    }
    await house.until(lambda: not house.model().missing_roles)

    await tell(house, pair[role], DRAINING)

    with pytest.raises(Unavailable, match=f"all {role} workers of model 'm' are cordoned or draining"):
        await house.generate([1])


# While a request waits.


async def busy_pair(house: Any) -> tuple[Worker, Worker, asyncio.Task[Any], Any]:
    """Return a request that waits for a decode worker: one is cordoned, the other full. And what runs on the other."""
    await workers(house, "p", disaggregation_mode=PREFILL)
    full, cordoned = await workers(house, "full", "cordoned", disaggregation_mode=DECODE, limits=ONE_AT_A_TIME)
    await house.until(lambda: not house.model().missing_roles)
    await tell(house, cordoned, CORDONED)
    running = await house.begun([7, 8])
    pool = house.model().groups["decode"].pool
    looks = 0
    eligible = pool.eligible

    def looked(excluded: Any = ()) -> Any:
        nonlocal looks
        looks += 1
        return eligible(excluded)

    pool.eligible = looked
    waiting = asyncio.ensure_future(house.generate([1, 2]))
    await house.eventually(lambda: looks >= 4)
    assert not waiting.done()
    return full, cordoned, waiting, running


async def test_a_request_that_waits_for_a_decode_worker_gets_one_that_comes_back_into_service(house: Any) -> None:
    full, cordoned, waiting, running = await busy_pair(house)

    before = engine_of(cordoned).asked
    engine_of(cordoned).gate.set()
    await tell(house, cordoned, SERVING)
    tokens = await rest(await waiting)

    assert (before, tokens) == (0, [1, 2])
    engine_of(full).gate.set()
    assert await rest(running) == [8]


async def test_a_request_that_waits_for_a_decode_worker_is_not_given_to_one_out_of_service(house: Any) -> None:
    full, cordoned, waiting, running = await busy_pair(house)

    engine_of(full).gate.set()
    ended = await rest(running)
    tokens = await rest(await waiting)

    assert (ended, tokens, engine_of(cordoned).asked) == ([8], [1, 2], 0)


async def test_a_request_waiting_for_decode_fails_when_none_is_left_in_service(house: Any) -> None:
    full, _, waiting, running = await busy_pair(house)

    await tell(house, full, DRAINING)
    with pytest.raises(Unavailable, match="all decode workers of model 'm' are cordoned or draining"):
        await waiting
    engine_of(full).gate.set()

    assert await rest(running) == [8]


async def test_a_migration_waits_for_a_worker_back_in_service(
    make_house: Callable[..., Any],
) -> None:
    house = make_house(deadlines=Deadlines(migration_wait=30))
    options = {"migration_limit": 1}
    (dying,) = await workers(house, "dying", **options)
    (cordoned,) = await workers(house, "cordoned", **options)
    engine_of(cordoned).gate.set()
    await tell(house, cordoned, CORDONED)
    stream = await house.generate([1, 2], max_tokens=4)
    await anext(stream)
    end = asyncio.ensure_future(rest(stream))

    engine_of(dying).dies = True
    engine_of(dying).gate.set()
    model = house.model()
    await house.eventually(lambda: model.groups["aggregated"].pool.state(number_of(dying)) == "down")
    early = engine_of(cordoned).asked
    await tell(house, cordoned, SERVING)

    # The other worker is asked to go on after the token that came.
    assert early == 0
    assert await end == [1, 2, 1]
    assert engine_of(cordoned).asked == 1


async def test_a_new_request_does_not_wait_for_workers_out_of_service(make_house: Callable[..., Any]) -> None:
    house = make_house(deadlines=Deadlines(migration_wait=3600))
    one, other = await workers(house, "one", "other")
    await tell(house, other, CORDONED)
    engine = engine_of(one)
    engine.silent = engine.dies = True
    stream = await house.generate([1])

    engine.gate.set()
    with pytest.raises(Unavailable, match="the workers that took the request were lost"):
        async with asyncio.timeout(60):
            await rest(stream)

    assert engine_of(other).asked == 0


# What goes on.


class Mocker(MockerEngine):
    """Blocks of four tokens, no delays."""

    def __init__(self, config: PluginConfig, worker: WorkerConfig) -> None:
        super().__init__(MockerConfig(block_size=4, num_gpu_blocks=64, speedup_ratio=0), worker)


async def test_the_kv_router_keeps_the_blocks_of_a_worker_out_of_service(
    make_house: Callable[..., Any],
) -> None:
    house = make_house(router=lambda services: KvRouter(KvConfig(seed=1), services))
    one, other = await house.run(Mocker), await house.run(Mocker)
    prompt = list(range(100, 142))
    asked = PreprocessedRequest(model="m", token_ids=prompt, stop_conditions=StopConditions(max_tokens=1))

    def seen(worker: Worker) -> RankView:
        ranks: list[RankView] = house.model().explain(asked)[0].ranks
        return next(rank for rank in ranks if rank.instance_id == number_of(worker))

    await rest(await house.ask(asked))
    await house.eventually(lambda: 10 in (seen(one).overlap, seen(other).overlap))
    holder = one if seen(one).overlap else other

    await tell(house, holder, CORDONED)
    cordoned = (seen(holder).state, seen(holder).overlap)
    named = PreprocessedRequest(
        model="m", token_ids=prompt, routing=RoutingHints(backend_instance_id=number_of(holder))
    )
    with pytest.raises(Unavailable, match="which the request names, is cordoned"):
        await house.ask(named)
    # The other one computes the prompt, and its events are heard; then both hold it.
    await rest(await house.ask(asked))
    await tell(house, holder, SERVING)
    await house.eventually(lambda: (seen(one).overlap, seen(other).overlap) == (10, 10))

    assert cordoned == ("cordoned", None)


async def test_a_context_of_a_request_is_not_stopped_by_a_drain(house: Any) -> None:
    (worker,) = await workers(house, "one")
    ctx = EngineContext("r")
    stream = await house.begun([1, 2], ctx=ctx)

    await tell(house, worker, DRAINING)

    assert not ctx.is_stopped()
    engine_of(worker).gate.set()
    assert await rest(stream) == [2]
