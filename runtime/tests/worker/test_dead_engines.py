"""An engine that dies by itself takes its worker along."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from dynamo_core import LLMEngine, WorkerConfig
from dynamo_core.contracts.duck_typed_engine import as_engine
from dynamo_runtime.worker.worker import WorkerLimits, WorkerState

from runtime.tests.worker.engines import Plain

#: A worker that waited for late callers would sit here for as long as a test may take.
PATIENT = WorkerLimits(grace_period=50, drain_timeout=50)


class Mortal(Plain):
    """Dies when it is told to, and counts how often it was cleaned up."""

    NAME = "mortal"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.cleaned_up = 0

    async def died(self) -> str:
        return await self.end

    async def cleanup(self) -> None:
        self.cleaned_up += 1


@pytest.mark.parametrize("raises", [False, True])
async def test_a_dead_engine_stops_its_worker_without_grace(
    ground: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    # Only where others may still know of it is there anything to wait for.
    monkeypatch.setattr(type(ground.discovery), "CROSS_PROCESS", True)
    worker = ground.worker(Mortal, limits=PATIENT)
    await worker.start()
    engine: Mortal = worker._engine
    lost = asyncio.create_task(worker.lost())
    await asyncio.sleep(0)
    assert not lost.done()

    if raises:
        engine.end.set_exception(OSError("its process is gone"))
    else:
        engine.end.set_result("its process is gone")
    async with asyncio.timeout(5):
        await lost
        await worker.stop()

    assert worker.state is WorkerState.STOPPED
    assert engine.cleaned_up == 1
    assert "the engine of worker w has died: its process is gone" in caplog.text


async def test_an_engine_without_died_lives_forever(ground: Any) -> None:
    class Plain(Mortal):
        died = LLMEngine.died

    worker = ground.worker(Plain)
    await worker.start()
    lost = asyncio.create_task(worker.lost())
    await asyncio.sleep(0.05)
    assert not lost.done()

    lost.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lost
    await worker.stop()


async def test_a_worker_that_discovery_has_given_up_on_is_lost_too(
    ground: Any, caplog: pytest.LogCaptureFixture
) -> None:
    worker = ground.worker(Mortal)
    await worker.start()
    lease: Any = worker._lease
    lease.lost.set()
    with caplog.at_level(logging.ERROR):
        async with asyncio.timeout(5):
            await worker.lost()
    await worker.stop(grace=False)

    assert "discovery has given up on worker w" in caplog.text


async def test_a_foreign_engine_may_die_as_well() -> None:
    class Foreign:
        start, generate, cleanup = Plain.start, Plain.generate, Plain.cleanup

        async def died(self) -> str:
            return "as foreigners do"

    assert await as_engine(Foreign(), WorkerConfig()).died() == "as foreigners do"
