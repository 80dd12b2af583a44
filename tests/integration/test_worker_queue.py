"""The fair queue over the whole way of a request, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from dynamo_core import (
    AdmissionServices,
    DynamoError,
    EngineContext,
    FinishReason,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    Principal,
)
from dynamo_plugin_admission_fair_queue.admission import FairQueueAdmission
from dynamo_plugin_admission_fair_queue.config import FairQueueConfig
from dynamo_telemetry import Metrics

from tests.integration.parts import Plain


class Gated(Plain):
    """Answers with one token once it is told to; a prompt of 13 breaks it."""

    served: list[int]
    gate: asyncio.Semaphore

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        first = request.token_ids[0]
        type(self).served.append(first)
        await type(self).gate.acquire()
        if first == 13:
            raise RuntimeError("broken")
        yield LLMEngineOutput(token_ids=[first], finish_reason=FinishReason.STOP)


class Asking:
    """A house with one worker that serves one request at a time."""

    def __init__(self, house: Any, admission: FairQueueAdmission) -> None:
        self.house, self.admission = house, admission

    async def ask(self, number: int, tenant: str = "default") -> int:
        request = PreprocessedRequest(model="m", token_ids=[number])
        stream = await self.house.model().generate(request, EngineContext(f"r{number}"), Principal(tenant=tenant))
        try:
            return sum([len(output.token_ids) async for output in stream])
        finally:
            await stream.aclose()

    async def waiting(self, count: int) -> None:
        """Return once so many are held, those that run included."""
        await self.house.eventually(lambda: self.admission.held == count)


@pytest.fixture
async def asking(make_house: Callable[..., Any]) -> AsyncIterator[Asking]:
    Gated.served, Gated.gate = [], asyncio.Semaphore(0)
    config = FairQueueConfig(requests_per_worker=1, max_queue=4)
    admission = FairQueueAdmission(config, AdmissionServices(Metrics()))
    house = make_house(admission=admission)
    await house.run(Gated)
    yield Asking(house, admission)
    await admission.aclose()


async def test_a_request_that_leaves_the_queue_lets_the_next_be_served(asking: Asking) -> None:
    first, second, third = (asyncio.create_task(asking.ask(number)) for number in (1, 2, 3))
    await asking.waiting(3)
    second.cancel()
    await asking.waiting(2)
    Gated.gate.release()
    Gated.gate.release()
    await asyncio.gather(first, third)

    assert Gated.served == [1, 3]
    assert asking.admission.held == 0


async def test_a_failed_request_frees_its_place_for_the_next(asking: Asking) -> None:
    first, second = (asyncio.create_task(asking.ask(number)) for number in (13, 2))
    await asking.waiting(2)
    Gated.gate.release()
    Gated.gate.release()

    with pytest.raises(DynamoError):
        await first
    assert await second == 1
    assert asking.admission.held == 0
