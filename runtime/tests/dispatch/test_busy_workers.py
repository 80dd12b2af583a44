"""What becomes of requests when workers are busy, or full: before they are let in, and afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from dynamo_core.contracts.admission import Permit, SharedPermit
from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.errors import CannotConnect, ServiceOverloaded, WorkerOverloaded
from dynamo_core.protocol.request import PreprocessedRequest, StopConditions
from dynamo_runtime.dispatch.execution.response_stream import ResponseStream


async def finish(stage: Any, stream: ResponseStream) -> list[int]:
    stage.transport.calls[-1].complete()
    tokens = [token async for item in stream for token in item.token_ids]
    await stream.aclose()
    return tokens


async def test_full_workers_are_tried_regardless_of_the_retry_limit(
    make_stage: Callable[..., Any],
) -> None:
    stage = make_stage(workers=6, retries=1)
    stage.transport.refusals = [WorkerOverloaded("full")] * 5

    stream = await stage.generate(max_tokens=3)

    assert stream.instance_id == 6
    assert await finish(stage, stream) == stage.answer(3)
    # Those are asked last from now on.
    assert [one.instance_id for one in stage.pool.eligible()] == [6]


async def test_when_all_workers_are_full_each_is_asked_once(make_stage: Callable[..., Any]) -> None:
    stage = make_stage(workers=3)
    stage.transport.refusals = [WorkerOverloaded("full")] * 100

    with pytest.raises(ServiceOverloaded) as refused:
        await stage.generate()

    assert len(stage.transport.refusals) == 97
    assert isinstance(refused.value.__cause__, WorkerOverloaded)
    assert (stage.tracker.total_requests, stage.permit.told) == (0, [0])


async def test_a_worker_that_is_alone_is_asked_each_time(make_stage: Callable[..., Any]) -> None:
    stage = make_stage(workers=1)
    stage.transport.refusals = [WorkerOverloaded("full")]
    with pytest.raises(ServiceOverloaded):
        await stage.generate()

    stream = await stage.generate(max_tokens=2)

    assert await finish(stage, stream) == stage.answer(2)


async def test_a_request_with_all_workers_busy_is_refused_with_retry_after(
    make_stage: Callable[..., Any],
) -> None:
    stage = make_stage(workers=2)
    stage.pipeline._retry_after = lambda model: 9.0
    for number in (1, 2):
        stage.pool.set_busy(number, True)

    with pytest.raises(ServiceOverloaded) as refused:
        await stage.generate()

    assert refused.value.retry_after == 9
    assert (stage.transport.calls, stage.permit.told) == ([], [0])


async def test_a_retry_waits_for_a_worker_that_is_not_busy(make_stage: Callable[..., Any]) -> None:
    stage = make_stage(workers=2, migration_wait=10.0)
    stage.transport.refusals = [CannotConnect("gone")]
    stage.pool.set_busy(2, True)
    asked = asyncio.create_task(stage.generate(max_tokens=2))
    while stage.transport.refusals:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    waited = not asked.done()

    stage.pool.set_busy(2, False)
    stream = await asked

    assert (waited, stream.instance_id) == (True, 2)
    assert await finish(stage, stream) == stage.answer(2)


async def test_a_retry_does_not_wait_forever(make_stage: Callable[..., Any]) -> None:
    stage = make_stage(workers=2, migration_wait=0.06)
    stage.transport.refusals = [CannotConnect("gone")]
    stage.pool.set_busy(2, True)

    with pytest.raises(ServiceOverloaded):
        await stage.generate()

    assert (stage.tracker.total_requests, stage.permit.told) == (0, [0])


async def test_a_cancelled_waiting_retry_releases_everything(make_stage: Callable[..., Any]) -> None:
    stage = make_stage(workers=2, migration_wait=10.0)
    stage.transport.refusals = [CannotConnect("gone")]
    stage.pool.set_busy(2, True)
    asked = asyncio.create_task(stage.generate())
    while stage.transport.refusals:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)

    asked.cancel()
    await asyncio.wait([asked])

    assert (stage.tracker.total_requests, stage.permit.told) == (0, [0])


class Told(Permit):
    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def release(self, output_tokens: int) -> None:
        self.tokens.append(output_tokens)


async def test_a_call_of_an_admitted_request_waits_for_busy_workers(
    make_stage: Callable[..., Any],
) -> None:
    stage = make_stage(workers=1, migration_wait=10.0)
    whole = Told()
    permit = SharedPermit(whole, 2)
    request = PreprocessedRequest(model="m", token_ids=stage.prompt, stop_conditions=StopConditions(max_tokens=2))
    stage.pool.set_busy(1, True)
    parts = [
        asyncio.create_task(stage.pipeline.generate(request, EngineContext(part), Principal(), stage, permit))
        for part in ("a", "b")
    ]
    await asyncio.sleep(0.01)
    waited = not any(part.done() for part in parts)
    stage.pool.set_busy(1, False)

    for part in parts:
        stream = await part
        await stream.aclose()
        permit_after_one = list(whole.tokens)

    assert waited
    assert (stage.permit.told, permit_after_one, whole.tokens) == ([], [0], [0])


def test_a_shared_permit_is_released_once_with_all_tokens() -> None:
    whole = Told()
    permit = SharedPermit(whole, 3)

    permit.release(2)
    permit.release(5)
    before = list(whole.tokens)
    permit.release(1)
    permit.end()

    assert (before, whole.tokens) == ([], [8])


def test_parts_that_were_never_made_do_not_keep_a_permit() -> None:
    whole = Told()
    permit = SharedPermit(whole, 3)
    permit.release(2)

    permit.end()
    permit.end()
    permit.release(1)

    assert whole.tokens == [2]
