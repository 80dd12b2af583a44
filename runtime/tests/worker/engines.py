"""Engines of the tests of the worker, and an adapter over one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from dynamo_core import (
    DisaggregationMode,
    EngineConfig,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    WorkerConfig,
)
from dynamo_runtime.worker.adapter import EngineAdapter
from dynamo_runtime.worker.capacity_gate import CapacityGate
from dynamo_runtime.worker.metrics import WorkerMetrics
from dynamo_telemetry.metrics import Metrics

Items = AsyncIterator[LLMEngineOutput]
Body = Callable[[PreprocessedRequest, GenerateContext], Items]


class Plain(LLMEngine):
    """An engine without a fault that says nothing."""

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="m")

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        yield LLMEngineOutput.stop()

    async def cleanup(self) -> None:
        """Release nothing."""


class Told(Plain):
    """Runs the body that a test gives it."""

    def __init__(self, body: Body, mode: DisaggregationMode = DisaggregationMode.AGGREGATED, **worker: Any) -> None:
        config = WorkerConfig(model_name="m", worker="w", disaggregation_mode=mode, **worker)
        super().__init__(PluginConfig(), config)
        self.body = body

    def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Items:
        return self.body(request, ctx)


def adapter_over(
    engine: LLMEngine,
    *,
    metrics: Metrics | None = None,
    limit: int | None = None,
    queue: int = 16,
    capabilities: frozenset[str] = frozenset(),
    **more: Any,
) -> EngineAdapter:
    """Return the adapter of worker ab over an engine."""
    metrics = metrics or Metrics()
    return EngineAdapter(
        engine,
        EngineConfig(model="m", capabilities=capabilities),
        CapacityGate(metrics, limit=limit, queue=queue),
        WorkerMetrics(metrics),
        config=engine.worker,
        worker_id=0xAB,
        **more,
    )
