"""Gauges of models and workers are looked up when /metrics is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import msgspec
import pytest
from dynamo_core import (
    ActiveLoad,
    DisaggregationMode,
    GenerateContext,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
)
from dynamo_core.protocol import RequestRecord
from dynamo_runtime.dispatch.load.monitor import WorkerMonitor
from dynamo_runtime.dispatch.models.gauges import FrontGauges
from dynamo_telemetry import Metrics
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.parts import Plain


class Slow(Plain):
    """Two ranks and a small cache; an answer waits until it is let go."""

    facts: ClassVar[dict[str, Any]] = {"kv_cache_block_size": 16, "total_kv_blocks": 100, "context_length": 500}

    def __init__(self, config: PluginConfig, worker: Any) -> None:
        super().__init__(config, worker)
        self.go = asyncio.Event()

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        await self.go.wait()
        yield LLMEngineOutput.stop().with_tokens([1])


class TwoRanks(Slow):
    facts: ClassVar[dict[str, Any]] = {**Slow.facts, "data_parallel_size": 2}


@pytest.fixture
def gauges(house: Any) -> FrontGauges:
    gauges = FrontGauges(house.models, house.tracker, "f")
    house.metrics.registry.register(gauges)
    return gauges


def shown(metrics: Metrics) -> dict[str, dict[tuple[str, ...], float]]:
    """Return every sample by name and the values of its labels, in the order of their names."""
    text = generate_latest(metrics.registry).decode()
    return {
        family.name.removeprefix("f_"): {tuple(sample.labels.values()): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(text)
        if family.name.startswith("f_")
    }


def record(instance_id: int | None, **fields: Any) -> RequestRecord:
    """Return a request of 11 tokens: the first after 1 s, the others in another second."""
    known: dict[str, Any] = {
        **{"request_id": "r", "model": "m", "endpoint": "e", "request_type": "stream", "status": "success"},
        **{"error_type": "", "http_status": 200, "prompt_tokens": 40, "output_tokens": 11, "duration": 2.0},
        **{"time_to_first_token": 1.0, "finish_reason": "stop", "trace_id": "", "span_id": "", "x_request_id": None},
    }
    return RequestRecord(instance_id=instance_id, **{**known, **fields})


async def test_a_model_shows_the_facts_of_its_card_while_it_has_workers_and_then_that_it_is_not_ready(
    house: Any, gauges: FrontGauges
) -> None:
    assert shown(house.metrics)["model_ready"] == {}

    worker = await house.run(Slow)
    there = shown(house.metrics)
    await worker.stop(grace=False)
    await house.until(lambda: not house.models.list())

    assert there["model_ready"] == {("m",): 1}
    assert there["model_context_length"] == {("m",): 500}
    assert there["model_kv_cache_block_size"] == {("m",): 16}
    assert there["model_total_kv_blocks"] == {("m",): 100}
    # What the card does not tell is not made up.
    assert there["model_max_num_seqs"] == {}
    assert {name: told for name, told in shown(house.metrics).items() if told} == {"model_ready": {("m",): 0}}


async def test_a_model_of_the_config_is_not_ready_before_its_first_worker_comes(make_house: Any) -> None:
    house = make_house(expected=("m",))
    house.metrics.registry.register(FrontGauges(house.models, house.tracker, "f"))
    before = shown(house.metrics)["model_ready"]

    await house.run(Slow)

    assert before == {("m",): 0}
    assert shown(house.metrics)["model_ready"] == {("m",): 1}


@pytest.mark.parametrize("role", [DisaggregationMode.DECODE, DisaggregationMode.PREFILL])
async def test_a_model_without_a_role_it_needs_is_not_ready(
    house: Any, gauges: FrontGauges, role: DisaggregationMode
) -> None:
    await house.run(Slow, disaggregation_mode=role)

    assert shown(house.metrics)["model_ready"] == {("m",): 0}


async def test_a_worker_shows_its_model_whether_it_is_busy_and_its_state(house: Any, gauges: FrontGauges) -> None:
    worker = await house.run(Slow)
    name = f"{worker.instance.instance_id:016x}"
    (pool,) = house.models.pools()

    before = shown(house.metrics)
    pool.set_busy(worker.instance.instance_id, True)

    assert before["worker_state"] == {("m", "serving", name, "aggregated"): 1}
    assert before["worker_busy"] == {("m", name, "aggregated"): 0}
    assert shown(house.metrics)["worker_busy"] == {("m", name, "aggregated"): 1}


async def test_gauges_show_the_load_of_a_rank(house: Any, gauges: FrontGauges) -> None:
    worker = await house.run(Slow)
    key = ("0", f"{worker.instance.instance_id:016x}", "aggregated")

    stream = await house.ask(PreprocessedRequest(model="m", token_ids=list(range(40))))
    busy = shown(house.metrics)
    await stream.aclose()

    assert busy["worker_active_prefill_tokens"] == {key: 40}
    assert shown(house.metrics)["worker_active_prefill_tokens"] == {key: 0}


async def test_the_used_blocks_gauge_is_the_report_plus_placements(house: Any) -> None:
    monitor = WorkerMonitor(house.tracker, house.transport.events(), house.discovery)
    house.metrics.registry.register(FrontGauges(house.models, house.tracker, "f", monitor))
    worker = await house.run(Slow)
    worker_id = worker.instance.instance_id
    monitor.apply(msgspec.msgpack.encode([ActiveLoad(worker_id, active_decode_blocks=30)]), 0.0)

    stream = await house.ask(PreprocessedRequest(model="m", token_ids=list(range(40))))
    busy = shown(house.metrics)
    await stream.aclose()

    # What the thresholds bound, and for comparison what the worker knows of.
    assert list(busy["worker_active_decode_blocks"].values()) == [33]
    assert list(busy["worker_kv_blocks_active"].values()) == [30]
    assert list(shown(house.metrics)["worker_active_decode_blocks"].values()) == [30]


async def test_the_last_request_gauges_last_until_the_worker_leaves(house: Any, gauges: FrontGauges) -> None:
    worker = await house.run(Slow)
    instance_id = worker.instance.instance_id
    key = ("0", f"{instance_id:016x}", "aggregated")

    gauges.finished(record(instance_id))
    gauges.finished(record(None, prompt_tokens=1))
    gauges.finished(record(instance_id, prompt_tokens=2, time_to_first_token=None))
    gauges.finished(record(instance_id + 1))
    first = shown(house.metrics)
    gauges.finished(record(instance_id, prompt_tokens=50, output_tokens=1, time_to_first_token=0.5))
    second = shown(house.metrics)

    assert first["worker_last_time_to_first_token_seconds"] == {key: 1}
    assert first["worker_last_inter_token_latency_seconds"] == {key: 0.1}
    assert first["worker_last_input_sequence_tokens"] == {key: 40}
    assert second["worker_last_time_to_first_token_seconds"] == {key: 0.5}
    assert second["worker_last_input_sequence_tokens"] == {key: 50}
    # There is no time between the tokens of an answer of one.
    assert second["worker_last_inter_token_latency_seconds"] == {key: 0.1}


async def test_workers_with_several_ranks_have_no_last_request_gauge(house: Any, gauges: FrontGauges) -> None:
    worker = await house.run(TwoRanks)
    name = f"{worker.instance.instance_id:016x}"

    gauges.finished(record(worker.instance.instance_id))
    told = shown(house.metrics)

    assert set(told["worker_active_decode_blocks"]) == {("0", name, "aggregated"), ("1", name, "aggregated")}
    assert set(told["worker_last_input_sequence_tokens"]) == {("any", name, "aggregated")}


async def test_the_stages_count_requests_in_and_out(house: Any) -> None:
    await house.run(Slow)

    stream = await house.ask(PreprocessedRequest(model="m", token_ids=[1, 2]))
    await stream.aclose()
    text = house.metrics.render_now().decode()

    for stage in ("route", "dispatch"):
        assert f'dynamo_frontend_stage_duration_seconds_count{{stage="{stage}"}} 1.0' in text
        assert f'dynamo_frontend_stage_requests{{phase="aggregated",stage="{stage}"}} 0.0' in text
