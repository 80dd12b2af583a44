"""Checks of an engine's life: start, metrics, drain, cleanup."""

from __future__ import annotations

from dynamo_core.contracts.engine import LLMEngine
from dynamo_core.contracts.engine_boundary import call_async

from dynamo_testing.engine.bench import Bench
from dynamo_testing.engine.bounded_calls import told, within
from dynamo_testing.engine.failures import (
    CleanupFailed,
    CleanupWithoutStartFailed,
    ConformanceFailure,
    DrainFailed,
    MetricsFailed,
    SecondCleanupFailed,
)


async def start(bench: Bench) -> str:
    """Check that `start` succeeds and names the model."""
    await bench.started()
    assert bench.config is not None
    capabilities = ", ".join(sorted(bench.config.capabilities))
    return f"model {bench.config.model!r}{f', capabilities: {capabilities}' if capabilities else ''}"


async def metrics(bench: Bench) -> str:
    """Check that the engine's metrics can be registered and scraped."""
    await bench.running()
    try:
        text = bench.metrics.render_now()
    except Exception as error:
        raise MetricsFailed(f"scraping {told(error)}") from error
    families = sum(line.startswith(b"# TYPE") for line in text.splitlines())
    return f"{families} metrics of its own" if families else "no metrics of its own"


async def drain(bench: Bench) -> str:
    """Check that `drain` returns when nothing runs."""
    engine, _ = await bench.running()
    try:
        await within(call_async(engine, "drain"), bench.plan.request_timeout)
    except Exception as error:
        raise DrainFailed(f"drain {told(error)}") from error
    return "drained"


async def cleanup(bench: Bench) -> str:
    """Check that `cleanup` succeeds twice."""
    engine, _ = await bench.running()
    bench.cleaned = True
    await _clean_up(bench, engine, CleanupFailed, "cleanup")
    await _clean_up(bench, engine, SecondCleanupFailed, "the second cleanup")
    return "cleaned up twice"


async def cleanup_without_start(bench: Bench) -> str:
    """Check that `cleanup` of a fresh engine succeeds."""
    await _clean_up(bench, await bench.fresh(), CleanupWithoutStartFailed, "cleanup without start")
    return "cleaned up"


async def _clean_up(bench: Bench, engine: LLMEngine, failure: type[ConformanceFailure], which: str) -> None:
    try:
        await within(call_async(engine, "cleanup"), bench.plan.cleanup_timeout)
    except Exception as error:
        raise failure(f"{which} {told(error)}") from error
