"""The mocker keeps the contract of engines, in every role."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from dynamo_core import DisaggregationMode, WorkerConfig
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.engine import MockerEngine
from dynamo_testing import EngineConformance, EngineFactory, PrefillPeer, run_conformance
from dynamo_testing.engine_kit import Prefill


def factory(mode: DisaggregationMode, **keys: object) -> EngineFactory:
    def make() -> MockerEngine:
        # Ten times as fast, and still slow enough for streams to be stopped in the middle.
        settings = MockerConfig.model_validate({"speedup_ratio": 10, "block_size": 16} | keys)
        return MockerEngine(settings, WorkerConfig(model_name="m", disaggregation_mode=mode))

    return make


class TestAggregated(EngineConformance):
    @pytest.fixture
    def engine_factory(self) -> EngineFactory:
        return factory(DisaggregationMode.AGGREGATED)


class TestPrefill(EngineConformance):
    @pytest.fixture
    def engine_factory(self) -> EngineFactory:
        return factory(DisaggregationMode.PREFILL)


class TestDecode(EngineConformance):
    @pytest.fixture
    def engine_factory(self) -> EngineFactory:
        return factory(DisaggregationMode.DECODE)

    @pytest.fixture
    async def prefill_result(self) -> AsyncIterator[Prefill]:
        async with PrefillPeer(factory(DisaggregationMode.PREFILL)) as peer:
            yield peer


@pytest.mark.parametrize(
    "keys",
    [
        {"max_num_seqs": 1},
        {"data_parallel_size": 2},
        {"enable_prefix_caching": False},
        {"num_gpu_blocks": 12, "max_num_batched_tokens": 16, "context_length": 192},
        {"output": "echo"},
        {"speedup_ratio": 0},
    ],
    ids=str,
)
async def test_the_mocker_passes_the_kit_with_other_settings(keys: dict[str, object]) -> None:
    assert (await run_conformance(factory(DisaggregationMode.AGGREGATED, **keys))).passed
