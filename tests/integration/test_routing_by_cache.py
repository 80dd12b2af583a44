"""The `kv` router over real workers: prompts go back to where their blocks are, whatever happens on the way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from dynamo_core import (
    DisaggregationMode,
    Phase,
    PluginConfig,
    PreprocessedRequest,
    Publisher,
    Route,
    RouterConfigOverride,
    RouterServices,
    RoutingHints,
    RoutingRequest,
    ScoredRank,
    StopConditions,
    WorkerConfig,
)
from dynamo_core.errors import InvalidArgument, ServiceOverloaded, Unavailable
from dynamo_core.protocol import Instance
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.engine import MockerEngine
from dynamo_plugin_router_kv import router as router_module
from dynamo_plugin_router_kv.config import KvConfig
from dynamo_plugin_router_kv.router import KvRouter
from dynamo_runtime.dispatch.execution.pipeline import Deadlines
from dynamo_runtime.dispatch.load.tracker import LoadTracker, Reservation

House = Any
PROMPT = list(range(100, 140))


class Mocker(MockerEngine):
    """Blocks of four tokens, no delays, one rank."""

    ranks = 1

    def __init__(self, config: PluginConfig, worker: WorkerConfig) -> None:
        settings = MockerConfig(
            block_size=4, num_gpu_blocks=64, data_parallel_size=self.ranks, speedup_ratio=0, max_num_batched_tokens=64
        )
        super().__init__(settings, worker)


class TwoRanks(Mocker):
    ranks = 2


class Routers:
    """Makes the routers of a house, and keeps them."""

    def __init__(self, **settings: Any) -> None:
        self.config = KvConfig(seed=1, **settings)
        self.made: list[KvRouter] = []

    def __call__(self, services: RouterServices) -> KvRouter:
        router = KvRouter(self.config, services)
        self.made.append(router)
        return router

    def of(self, role: str) -> KvRouter:
        return next(router for router in self.made if router.services.pool.role == role)


MakeHouse = Callable[..., House]


async def a_house_of(
    make_house: MakeHouse, count: int, engine: type[MockerEngine] = Mocker, *, tells: bool = True, **settings: Any
) -> tuple[House, KvRouter, list[Any]]:
    """Return a house with workers of one kind, its router with these settings, and the workers."""
    routers = Routers(**settings)
    house = make_house(router=routers)
    workers = [await house.run(engine, enable_kv_routing=tells) for _ in range(count)]
    return house, routers.of("aggregated"), workers


def request(prompt: list[int], *, max_tokens: int = 1, **hints: Any) -> PreprocessedRequest:
    return PreprocessedRequest(
        model="m",
        token_ids=prompt,
        stop_conditions=StopConditions(max_tokens=max_tokens),
        routing=RoutingHints(**hints) if hints else None,
    )


async def answer(house: House, asked: PreprocessedRequest) -> tuple[int, int]:
    """Return the worker that answered, and how many tokens of the prompt it had."""
    stream = await house.ask(asked)
    try:
        items = [item async for item in stream]
        return stream.instance_id, items[-1].completion_usage.cached_tokens or 0
    finally:
        await stream.aclose()


def considered(router: KvRouter, prompt: list[int], **hints: Any) -> dict[tuple[int, int], ScoredRank]:
    asked = RoutingRequest(request(prompt, **hints), "r")
    return {(one.instance_id, one.dp_rank): one for one in router.explain(asked, router.services.pool)}


def overlaps(router: KvRouter, prompt: list[int], **hints: Any) -> list[int]:
    return sorted(one.overlap for one in considered(router, prompt, **hints).values())


def assert_nothing_is_counted(tracker: LoadTracker) -> None:
    assert tracker.total_requests == 0
    assert not list(tracker.own_ranks())


async def metric(house: House, name: str) -> dict[str, float]:
    text = (await house.metrics.render()).decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(name)]
    return {name: float(value) for name, value in lines}


async def test_a_prompt_goes_back_to_the_worker_that_has_its_blocks(make_house: MakeHouse) -> None:
    house, router, _ = await a_house_of(make_house, 4)
    first, cached = await answer(house, request(PROMPT))
    assert cached == 0
    await house.eventually(lambda: overlaps(router, PROMPT) == [0, 0, 0, 10])

    for _ in range(8):
        worker, cached = await answer(house, request([*PROMPT, 7, 8]))
        assert (worker, cached) == (first, 40)

    assert_nothing_is_counted(house.tracker)
    applied = await metric(house, "dynamo_component_kv_cache_events_applied")
    assert applied['dynamo_component_kv_cache_events_applied{event_type="stored",status="ok"}'] >= 1
    started = await metric(house, "dynamo_component_router_requests_started_total")
    assert sum(started.values()) == 9


async def test_prompts_that_share_nothing_are_spread(make_house: MakeHouse) -> None:
    house, _, _ = await a_house_of(make_house, 3)

    streams = [await house.ask(request(list(range(n * 50, n * 50 + 40)), max_tokens=50)) for n in range(6)]
    workers = [stream.instance_id for stream in streams]
    for stream in streams:
        await stream.aclose()

    assert sorted(workers.count(worker) for worker in set(workers)) == [2, 2, 2]
    assert_nothing_is_counted(house.tracker)


async def test_a_later_router_learns_cached_blocks_while_routing(make_house: MakeHouse) -> None:
    house, router, _ = await a_house_of(make_house, 2, TwoRanks)
    await answer(house, request(PROMPT))
    await house.eventually(lambda: max(overlaps(router, PROMPT)) == 10)

    later = KvRouter(KvConfig(), router.services)
    await later.start()
    try:
        # It can be asked before it knows anything.
        route = await later.route(RoutingRequest(request(PROMPT), "r"), router.services.pool)
        assert route.overlap == 0
        await house.eventually(lambda: overlaps(later, PROMPT) == [0, 0, 0, 10])
        assert {rank: one.overlap for rank, one in considered(later, PROMPT).items()} == {
            rank: one.overlap for rank, one in considered(router, PROMPT).items()
        }
    finally:
        await later.aclose()


async def test_a_removed_worker_is_forgotten(make_house: MakeHouse) -> None:
    house, router, (_, second) = await a_house_of(make_house, 2)
    await answer(house, request(PROMPT, backend_instance_id=second.instance.instance_id))
    await house.eventually(lambda: overlaps(router, PROMPT) == [0, 10])

    await second.stop(grace=False)
    await house.until(lambda: house.model().instance_count == 1)

    assert overlaps(router, PROMPT) == [0]
    assert second.instance.instance_id not in router._follower.workers
    await house.eventually(lambda: router._index.blocks == 0)


async def test_events_that_were_lost_are_asked_for(make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    house, router, (worker,) = await a_house_of(make_house, 1)
    await answer(house, request(PROMPT))
    await house.eventually(lambda: overlaps(router, PROMPT) == [10])
    publisher: Publisher = worker._publishers._events._publisher
    with monkeypatch.context() as patch:
        patch.setattr(type(publisher), "send", lambda self, payload: False)
        for number in range(3):
            await answer(house, request(list(range(number * 60, number * 60 + 40))))
        worker._publishers._events.flush()
    assert overlaps(router, list(range(60, 100))) == [0]

    await answer(house, request(list(range(1000, 1040))))

    await house.eventually(lambda: overlaps(router, list(range(60, 100))) == [10])
    assert overlaps(router, list(range(1000, 1040))) == [10]
    gaps = await metric(house, "dynamo_component_kv_cache_event_warnings")
    assert gaps['dynamo_component_kv_cache_event_warnings{warning_kind="gap"}'] == 1


async def test_missed_early_events_are_fetched_without_a_new_event(
    make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "SECOND_LOOK", 3600.0)
    house, router, (worker,) = await a_house_of(make_house, 1)
    publisher: Publisher = worker._publishers._events._publisher
    with monkeypatch.context() as patch:
        patch.setattr(type(publisher), "send", lambda self, payload: False)
        await answer(house, request(PROMPT))
        worker._publishers._events.flush()
    assert overlaps(router, PROMPT) == [0]

    router._joined[0] = (0.0, router._joined[0][1])

    await house.eventually(lambda: overlaps(router, PROMPT) == [10])
    assert not router._joined


async def test_a_prompt_goes_back_to_the_rank_that_has_its_blocks(make_house: MakeHouse) -> None:
    house, router, (worker,) = await a_house_of(make_house, 1, TwoRanks)
    instance_id = worker.instance.instance_id

    await answer(house, request(PROMPT, dp_rank=1))
    await house.eventually(lambda: max(overlaps(router, PROMPT)) == 10)
    assert considered(router, PROMPT)[instance_id, 1].overlap == 10

    for _ in range(4):
        assert await answer(house, request([*PROMPT, 1])) == (instance_id, 40)
    assert list(considered(router, PROMPT, dp_rank=0)) == [(instance_id, 0)]
    with pytest.raises(InvalidArgument, match=r"routing\.dp_rank is 7"):
        await house.ask(request(PROMPT, dp_rank=7))


async def test_under_another_adapter_or_salt_nothing_is_found(make_house: MakeHouse) -> None:
    house, router, _ = await a_house_of(make_house, 1)

    await answer(house, request(PROMPT, cache_salt="a"))
    await house.eventually(lambda: overlaps(router, PROMPT, cache_salt="a") == [10])

    assert overlaps(router, PROMPT) == overlaps(router, PROMPT, cache_salt="b") == [0]
    assert (await answer(house, request([*PROMPT, 1], cache_salt="b")))[1] == 0
    assert (await answer(house, request([*PROMPT, 1], cache_salt="a")))[1] == 40


async def test_prefill_is_routed_by_cache_and_decode_by_load(make_house: MakeHouse) -> None:
    routers = Routers()
    house = make_house(router=routers)
    for mode in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE):
        for _ in range(2):
            await house.run(Mocker, disaggregation_mode=mode)
    await house.eventually(lambda: {router.services.pool.role for router in routers.made} == {"prefill", "decode"})
    await house.eventually(lambda: len(routers.of("prefill").services.pool.instances) == 2)
    prefill, decode = routers.of("prefill"), routers.of("decode")

    stream = await house.ask(request(PROMPT, max_tokens=4))
    first = stream.prefill_instance_id
    async for _ in stream:
        pass
    await stream.aclose()
    await house.eventually(lambda: overlaps(prefill, PROMPT) == [0, 10])

    for _ in range(4):
        stream = await house.ask(request([*PROMPT, 1], max_tokens=4))
        assert stream.prefill_instance_id == first
        async for _ in stream:
            pass
        await stream.aclose()
    asked = RoutingRequest(request(PROMPT), "r", phase=Phase.DECODE)
    assert {one.overlap for one in decode.explain(asked, decode.services.pool)} == {0}
    assert_nothing_is_counted(house.tracker)


async def test_router_overrides_of_a_request_are_honoured(make_house: MakeHouse) -> None:
    house, router, workers = await a_house_of(make_house, 3)
    first, second, third = (worker.instance.instance_id for worker in workers)
    await answer(house, request(PROMPT, backend_instance_id=first))
    await house.eventually(lambda: overlaps(router, PROMPT) == [0, 0, 10])

    assert (await answer(house, request(PROMPT, backend_instance_id=third)))[0] == third
    assert {(await answer(house, request(PROMPT, allowed_worker_ids=[second])))[0] for _ in range(3)} == {second}
    with pytest.raises(Unavailable, match="5, which the request names"):
        await house.ask(request(PROMPT, backend_instance_id=5))
    with pytest.raises(Unavailable, match="allowed_worker_ids"):
        await house.ask(request(PROMPT, allowed_worker_ids=[5]))

    asked = request(PROMPT)
    asked.router_config_override = RouterConfigOverride(overlap_score_credit=0.0, assume_kv_reuse=False)
    costs = {one.cost for one in router.explain(RoutingRequest(asked, "r"), router.services.pool)}
    assert costs == {20.0}


async def test_a_token_that_is_none_is_the_callers_fault(make_house: MakeHouse) -> None:
    house, _, _ = await a_house_of(make_house, 1)

    with pytest.raises(InvalidArgument, match="token_ids"):
        await house.ask(request([1, 2, 3, 2**40]))
    assert_nothing_is_counted(house.tracker)


async def test_without_kv_events_routing_uses_past_prompts(make_house: MakeHouse) -> None:
    house, router, _ = await a_house_of(make_house, 3, kv_events=False, ttl_secs=0.6)

    first, _ = await answer(house, request(PROMPT))
    assert overlaps(router, PROMPT) == [0, 0, 10]
    assert await answer(house, request([*PROMPT, 1])) == (first, 40)

    await house.eventually(lambda: overlaps(router, PROMPT) == [0, 0, 0])


async def test_missing_kv_events_raise_an_alarm(
    make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(router_module, "TICK", 0.01)
    house, router, _ = await a_house_of(make_house, 1, tells=False, alarm_secs=0.05)
    with caplog.at_level(logging.INFO, "dynamo_plugin_router_kv"):
        await answer(house, request([1]))
        await asyncio.sleep(0.1)
        assert not router._silent

        await answer(house, request(PROMPT))
        await house.eventually(lambda: router._silent)

        assert "enable_kv_routing" in caplog.text
        text = (await house.metrics.render()).decode()
        assert 'dynamo_router_kv_events_silent{model="m",worker_type="aggregated"} 1.0' in text
        talker = await house.run(Mocker)
        await answer(house, request(PROMPT, backend_instance_id=talker.instance.instance_id))
        await house.eventually(lambda: not router._silent)
        assert "tell of their KV caches again" in caplog.text


async def test_the_alarm_ends_with_the_last_worker(make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "TICK", 0.01)
    house, router, (worker,) = await a_house_of(make_house, 1, tells=False, alarm_secs=0.05)
    await answer(house, request(PROMPT))
    await house.eventually(lambda: router._silent)

    await worker.stop(grace=False)

    silent = 'dynamo_router_kv_events_silent{model="m",worker_type="aggregated"}'
    await house.eventually(lambda: f"{silent} 0.0" in house.metrics.render_now().decode())


class Slow(Mocker):
    """Takes its time, so that prompts are still to be prefilled when others come."""

    def __init__(self, config: PluginConfig, worker: WorkerConfig) -> None:
        settings = MockerConfig(block_size=4, num_gpu_blocks=999, speedup_ratio=1.0, max_num_batched_tokens=64)
        MockerEngine.__init__(self, settings, worker)


def other_load(house: House, worker: Any, tokens: int) -> Reservation:
    """Load the worker with so many tokens to prefill, until they are released."""
    route = Route(Instance(instance_id=worker.instance.instance_id))
    reservation: Reservation = house.tracker.reserve(route, "other", prompt_tokens=tokens, block_size=4, hashes=[])
    return reservation


async def test_with_a_threshold_requests_wait_while_all_workers_have_too_much_to_prefill(make_house: MakeHouse) -> None:
    house, router, (worker,) = await a_house_of(make_house, 1, Slow, queue_threshold=0.5)
    reservation = other_load(house, worker, 40)

    prompts = [list(range(n * 50, n * 50 + 40)) for n in range(6)]
    asking = [asyncio.create_task(answer(house, request(prompt))) for prompt in prompts]
    await house.eventually(lambda: len(router._queue) == 6)
    asking[-1].cancel()
    await house.eventually(lambda: len(router._queue) == 5)
    reservation.release()
    await asyncio.gather(*asking[:-1])

    assert len(router._queue) == 0
    assert_nothing_is_counted(house.tracker)
    text = (await house.metrics.render()).decode()
    labels = 'model="m",policy_class="fcfs",worker_type="aggregated"'
    assert f"dynamo_frontend_router_queue_pending_requests{{{labels}}} 0.0" in text


async def test_a_request_over_the_queue_timeout_is_refused(make_house: MakeHouse) -> None:
    house = make_house(router=Routers(queue_threshold=0.0, queue_timeout=0.01), deadlines=Deadlines(migration_wait=0))
    worker = await house.run(Slow)
    reservation = other_load(house, worker, 10)
    with pytest.raises(ServiceOverloaded):
        await house.ask(request(PROMPT))
    reservation.release()
    assert_nothing_is_counted(house.tracker)
