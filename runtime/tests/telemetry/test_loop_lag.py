from __future__ import annotations

import asyncio
import time

from dynamo_runtime.telemetry.loop_lag import LoopLag
from dynamo_telemetry.metrics import Metrics


async def until_fired(metrics: Metrics, times: int) -> None:
    async with asyncio.timeout(5):
        while count(metrics) < times:  # noqa: ASYNC110 — what is waited for has no event
            await asyncio.sleep(0.001)


def count(metrics: Metrics) -> float:
    return metrics.registry.get_sample_value("dynamo_frontend_event_loop_delay_seconds_count") or 0


async def test_a_held_loop_shows_as_delay_and_stall() -> None:
    metrics = Metrics()
    lag = LoopLag(metrics, interval=0.001, stall=0.02)
    lag.start()
    lag.start()

    time.sleep(0.05)  # noqa: ASYNC251 — holding the loop is the point
    await until_fired(metrics, 1)
    await lag.aclose()

    value = metrics.registry.get_sample_value
    assert (value("dynamo_frontend_event_loop_stall_total") or 0) >= 1
    assert (value("dynamo_frontend_event_loop_delay_seconds_sum") or 0) >= 0.02


async def test_nothing_is_measured_after_stop() -> None:
    metrics = Metrics()
    lag = LoopLag(metrics, prefix="dynamo_frontend", interval=0.001)
    lag.start()
    await until_fired(metrics, 2)

    await lag.aclose()
    await lag.aclose()
    before = count(metrics)
    for _ in range(20):
        await asyncio.sleep(0.001)

    assert count(metrics) == before
