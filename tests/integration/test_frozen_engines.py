"""An engine that freezes behind a live event loop: who notices, and who is believed. Real workers, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import pytest
from dynamo_core import (
    PROGRESS,
    GenerateContext,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
)
from dynamo_core.errors import ResponseTimeout
from dynamo_runtime.dispatch.execution.pipeline import Deadlines
from dynamo_runtime.worker.canary import HealthCheck
from dynamo_runtime.worker.worker import WorkerLimits

from tests.integration.parts import Plain

#: Seconds without output after which a worker is given up, and how often an engine's progress is reported.
STALL, REPORTS = 0.4, 0.02


class Freezing(Plain):
    """Answers with one token per turn until `frozen` is set; `steps` is what it says of its work."""

    made: ClassVar[list[Freezing]] = []

    def __init__(self, config: PluginConfig, worker: Any) -> None:
        super().__init__(config, worker)
        self.frozen = asyncio.Event()
        self.thawed = asyncio.Event()
        self.asked = 0
        self.steps = 0
        self.fails = False
        Freezing.made.append(self)

    def progress(self) -> int:
        if self.fails:
            raise RuntimeError("it does not know")
        return self.steps

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        self.asked += not request.is_probe
        limit = request.stop_conditions.max_tokens or 1
        for count in range(limit):
            if self.frozen.is_set():
                await self.thawed.wait()
            if ctx.is_stopped():
                yield LLMEngineOutput.cancelled()
                return
            yield LLMEngineOutput([count % 256])
            await asyncio.sleep(0)
        yield LLMEngineOutput.length()


class Reporting(Freezing):
    facts: ClassVar[dict[str, Any]] = {"capabilities": frozenset({PROGRESS})}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    Freezing.made = []
    monkeypatch.setattr("dynamo_runtime.worker.caller_progress_reports.INTERVAL", REPORTS)
    monkeypatch.setattr("dynamo_core.contracts.transports.serving.STOP_GRACE", 0.05)


async def asked(house: Any) -> Freezing:
    """Return the first engine that has a request."""
    await house.eventually(lambda: any(engine.asked for engine in Freezing.made))
    return next(engine for engine in Freezing.made if engine.asked)


async def steps(engine: Freezing, seconds: float) -> None:
    """Let the engine make steps for so long."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while loop.time() < until:
        engine.steps += 1
        await asyncio.sleep(REPORTS / 4)


async def test_an_engine_that_reports_progress_is_believed_while_it_does(make_house: Callable[..., Any]) -> None:
    house = make_house(deadlines=Deadlines(stall=STALL))
    for name in ("a", "b"):
        await house.run(Reporting, worker=name)
    for engine in Freezing.made:
        engine.frozen.set()
    stream = await house.generate([1], max_tokens=3)
    first = await asked(house)
    other = next(engine for engine in Freezing.made if not engine.asked)

    await steps(first, 2 * STALL)
    patient = not other.asked
    await house.eventually(lambda: other.asked)
    other.thawed.set()

    assert patient
    assert (await anext(stream)).token_ids[0] == 0
    await stream.aclose()


async def test_a_request_that_waits_for_a_place_in_a_busy_engine_is_not_moved(make_house: Callable[..., Any]) -> None:
    house = make_house(deadlines=Deadlines(stall=STALL, retries=0))
    await house.run(
        Reporting, limits=WorkerLimits(grace_period=0, drain_timeout=1, engine_requests=1, queued_requests=9)
    )
    engine = Freezing.made[0]
    engine.frozen.set()
    streams = [await house.generate([1], max_tokens=3) for _ in range(3)]

    await steps(engine, 2 * STALL)
    engine.thawed.set()

    for stream in streams:
        assert [token for item in [item async for item in stream] for token in item.token_ids] == [0, 1, 2]
        await stream.aclose()
    assert engine.asked == 3


async def test_an_engine_whose_progress_report_fails_is_given_up(
    make_house: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    house = make_house(deadlines=Deadlines(stall=STALL, retries=0))
    await house.run(Reporting)
    engine = Freezing.made[0]
    engine.frozen.set()
    engine.fails = True
    stream = await house.generate([1])

    with pytest.raises(Exception, match="no worker answered in time"):
        await anext(stream)
    await stream.aclose()

    assert caplog.text.count("cannot say whether it is at work") == 1


@pytest.mark.parametrize("given", [False, True], ids=["before the first token", "in mid-answer"])
async def test_the_canary_migrates_the_requests_of_a_frozen_engine(make_house: Callable[..., Any], given: bool) -> None:
    house = make_house()
    check = HealthCheck(wait=0.08, timeout=0.2)
    for name in ("a", "b"):
        await house.run(Freezing, worker=name, health_check=check, migration_limit=1)
    await house.until(lambda: len(house.models.instances()) == 2)
    first_tokens: list[int] = []
    stream = await house.generate([1], max_tokens=400)
    if given:
        first_tokens += (await anext(stream)).token_ids
    engine = await asked(house)
    engine.frozen.set()

    async with asyncio.timeout(60):
        items = [item async for item in stream]
    await stream.aclose()
    engine.thawed.set()

    assert len(first_tokens) + sum(len(item.token_ids) for item in items) == 400


async def test_a_canary_that_only_reports_ends_nothing(make_house: Callable[..., Any]) -> None:
    house = make_house()
    check = HealthCheck(wait=0.08, timeout=0.2, unregister=False)
    worker = await house.run(Freezing, health_check=check)
    engine = Freezing.made[0]
    engine.frozen.set()
    stream = await house.generate([1], max_tokens=3)
    await house.eventually(lambda: not worker.ready)

    engine.thawed.set()

    assert [token for item in [item async for item in stream] for token in item.token_ids] == [0, 1, 2]
    await stream.aclose()


async def test_without_other_workers_a_frozen_engine_is_an_error(
    make_house: Callable[..., Any],
) -> None:
    house = make_house()
    await house.run(Freezing, health_check=HealthCheck(wait=0.08, timeout=0.2))
    engine = Freezing.made[0]
    stream = await house.begun([1], max_tokens=400)
    engine.frozen.set()

    with pytest.raises(ResponseTimeout, match="does not answer its health check"):
        async with asyncio.timeout(60):
            [item async for item in stream]
    await stream.aclose()
    engine.thawed.set()
