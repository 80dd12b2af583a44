"""Mockers on a clock of their own, and how tests ask them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo_core import (
    DisaggregationMode,
    EngineContext,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
    WorkerConfig,
)
from dynamo_core.protocol.output import merge_outputs
from dynamo_plugin_engine_mocker.clock import VirtualClock
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.engine import MockerEngine


@asynccontextmanager
async def running(
    mode: DisaggregationMode = DisaggregationMode.AGGREGATED,
    *,
    clock: VirtualClock | None = None,
    model_path: str | None = None,
    **keys: object,
) -> AsyncIterator[MockerEngine]:
    """Start worker 7, and end it afterwards."""
    worker = WorkerConfig(disaggregation_mode=mode, model_path=model_path)
    engine = MockerEngine(MockerConfig.model_validate(keys), worker, clock=clock or VirtualClock())
    await engine.start(7)
    try:
        yield engine
    finally:
        await engine.cleanup()


def ask(
    prompt: list[int], max_tokens: int | None = 4, *, seed: int = 0, dp_rank: int | None = None
) -> PreprocessedRequest:
    """Return a request for so many tokens."""
    return PreprocessedRequest(
        token_ids=prompt,
        stop_conditions=StopConditions(max_tokens=max_tokens),
        sampling_options=SamplingOptions(seed=seed),
        routing=RoutingHints(dp_rank=dp_rank) if dp_rank is not None else None,
    )


def context() -> GenerateContext:
    """Return the context of a request."""
    return GenerateContext(EngineContext("r"))


async def read(engine: MockerEngine, asked: PreprocessedRequest, ctx: GenerateContext | None = None) -> LLMEngineOutput:
    """Return the whole answer as one item."""
    (item,) = merge_outputs([item async for item in engine.generate(asked, ctx or context())])
    return item


def cached(item: LLMEngineOutput) -> int | None:
    """Return how many tokens of the prompt the answer says were cached."""
    assert item.completion_usage is not None
    return item.completion_usage.cached_tokens
