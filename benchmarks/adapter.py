"""What the engine adapter costs: per item over the engine's bare generator, and per request."""

import argparse
import asyncio
import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from dynamo_core import (
    EngineConfig,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    ServedContext,
    WorkerConfig,
    chunk,
    spans,
)
from dynamo_core.tracing import TraceContext
from dynamo_runtime.worker.adapter import EngineAdapter
from dynamo_runtime.worker.capacity_gate import CapacityGate
from dynamo_runtime.worker.metrics import WorkerMetrics
from dynamo_runtime.worker.stream_validator import VARIABLE as VALIDATOR
from dynamo_telemetry import Metrics

from benchmarks.loops import LOOP_NAME, run

#: What an item may cost without export, in microseconds.
LIMIT_US: Final = 1.0

REQUEST: Final = PreprocessedRequest(model="m", token_ids=[1, 2, 3])

Work = Callable[[], Awaitable[None]]


class Lines(LLMEngine):
    """Yields the same items to everybody, without waiting."""

    def __init__(self, items: int) -> None:
        super().__init__(PluginConfig(), WorkerConfig(model_name="m", worker="bench"))
        self._items = [chunk.token(number) for number in range(items)]
        self._last = LLMEngineOutput.stop()

    async def start(self, worker_id: int) -> EngineConfig:
        """Return nothing to start."""
        return EngineConfig(model="m")

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        """Yield the items, and a terminal."""
        for item in self._items:
            yield item
        yield self._last

    async def cleanup(self) -> None:
        """Release nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks adapter`."""
    parser.add_argument("--items", type=int, default=20_000, help="items of one stream (default %(default)s)")
    parser.add_argument("--requests", type=int, default=2_000, help="requests of one item (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="of which the best counts (default %(default)s)")


def run_adapter(options: argparse.Namespace) -> int:
    """Measure and print; exit code 1 if an item costs more than it may without export."""
    # As in service: what the suite imports would switch it on, as it does in tests.
    os.environ[VALIDATOR] = "0"
    return run(_measure(options))


async def _measure(options: argparse.Namespace) -> int:
    print(f"{LOOP_NAME}, Python {sys.version.split()[0]}, best of {options.rounds} rounds, CPU time in µs\n")
    off = await _pair(options)
    _row("export off", off)
    with _recorded():
        on = await _pair(options)
    _row("recorded, not sent", on)
    print(f"\nan item may cost {LIMIT_US:g} µs without export: {'kept' if off[1] - off[0] <= LIMIT_US else 'BROKEN'}")
    return 0 if off[1] - off[0] <= LIMIT_US else 1


def _row(name: str, figures: tuple[float, float, float, float]) -> None:
    bare, adapted, bare_request, adapted_request = figures
    print(f"{name:<20} item: bare {bare:.3f}, adapter {adapted:.3f}, added {adapted - bare:.3f}", end="   ")
    print(
        f"request: bare {bare_request:.2f}, adapter {adapted_request:.2f}, added {adapted_request - bare_request:.2f}"
    )


async def _pair(options: argparse.Namespace) -> tuple[float, float, float, float]:
    """Return microseconds per item, bare and adapted, then per request of one item and a terminal."""
    long, short = Lines(options.items), Lines(1)
    items = await _best(options.rounds, options.items + 1, [_bare(long, 1), _adapted(long, 1)])
    requests = await _best(
        options.rounds, options.requests, [_bare(short, options.requests), _adapted(short, options.requests)]
    )
    return items[0], items[1], requests[0], requests[1]


async def _best(rounds: int, count: int, works: list[Work]) -> list[float]:
    """Return the least CPU time of each, in turn with the others, divided by `count`; in microseconds."""
    best = [float("inf")] * len(works)
    for _ in range(rounds):
        for index, work in enumerate(works):
            gc.collect()
            gc.disable()
            try:
                begun = time.process_time()
                await work()
                best[index] = min(best[index], time.process_time() - begun)
            finally:
                gc.enable()
    return [seconds / count * 1e6 for seconds in best]


def _bare(engine: LLMEngine, requests: int) -> Work:
    async def work() -> None:
        for _ in range(requests):
            async for _item in engine.generate(REQUEST, GenerateContext(ServedContext("r"))):
                pass

    return work


def _adapted(engine: LLMEngine, requests: int) -> Work:
    adapter = make_adapter(engine)
    metadata = TraceContext.new().to_headers()

    async def work() -> None:
        for _ in range(requests):
            ctx = ServedContext("r", metadata=metadata)
            async for _item in await adapter.generate(REQUEST, ctx):
                pass
            ctx.close()
        await asyncio.sleep(0)

    return work


def make_adapter(engine: LLMEngine) -> EngineAdapter:
    """Return an adapter as a worker in service has it."""
    metrics = Metrics()
    return EngineAdapter(
        engine,
        EngineConfig(model="m"),
        CapacityGate(metrics, limit=None, queue=16),
        WorkerMetrics(metrics),
        config=engine.worker,
        worker_id=1,
    )


@contextmanager
def _recorded() -> Iterator[None]:
    """Record spans as for export, and forget them when they end."""
    from dynamo_runtime.telemetry.otel import RandomIds, SpanRecorder
    from opentelemetry.sdk.trace import TracerProvider

    spans.set_recorder(SpanRecorder(TracerProvider(shutdown_on_exit=False, id_generator=RandomIds())))
    try:
        yield
    finally:
        spans.set_recorder(None)
