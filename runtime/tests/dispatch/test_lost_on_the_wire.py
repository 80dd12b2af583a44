"""A wire that breaks is not the worker's fault: the same worker goes on once it is reached again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from dynamo_core.errors import (
    BackendError,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoError,
    EngineShutdown,
    ResponseTimeout,
    StreamIncomplete,
    Unavailable,
)

WIRE = [Disconnected("the wire broke"), StreamIncomplete("a frame was lost")]
OWN = [
    EngineShutdown("it ends"),
    ResponseTimeout("it is silent"),
    BackendError.EngineShutdown("its engine is gone"),
    BackendError.Disconnected("its engine lost its memory"),
]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo_core.backoff.FIRST_PAUSE", 0.0001)
    monkeypatch.setattr("dynamo_core.backoff.LAST_PAUSE", 0.0001)


async def called(stage: Any, count: int) -> None:
    """Return when so many calls were accepted."""
    async with asyncio.timeout(10):
        while len(stage.transport.calls) < count:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("given", [0, 2])
@pytest.mark.parametrize("error", WIRE, ids=str)
@pytest.mark.parametrize("refusals", [0, 7])
async def test_the_only_worker_goes_on_once_it_is_reached_again(
    make_stage: Callable[..., Any], error: DynamoError, given: int, refusals: int
) -> None:
    stage = make_stage(1, migration_wait=20)
    stream = await stage.generate()
    stage.transport.calls[0].give(given)
    away = [CannotConnect("away"), ConnectionTimeout("away"), Unavailable("the broker is away")]
    stage.transport.refusals = [away[at % 3] for at in range(refusals)]
    stage.transport.calls[0].fail(error, told=False)
    await called(stage, 2)
    stage.transport.calls[1].complete()

    await stage.ends_whole(stream)
    assert stage.tracker.total_requests == 0


@pytest.mark.parametrize("error", OWN, ids=str)
async def test_the_only_worker_is_not_asked_again_if_it_failed_itself(
    make_stage: Callable[..., Any], error: DynamoError
) -> None:
    stage = make_stage(1, migration_wait=0.05)
    stream = await stage.generate()
    stage.transport.calls[0].fail(error, told=True)

    with pytest.raises(Unavailable):
        async with asyncio.timeout(10):
            [item async for item in stream]
    assert len(stage.transport.calls) == 1
    await stream.aclose()


async def test_another_worker_is_asked_first(make_stage: Callable[..., Any]) -> None:
    stage = make_stage(2, migration_wait=20)
    first, second = stage.pool.instances
    for _ in range(2):
        stream = await stage.generate()
        on = stream.instance_id
        before = len(stage.transport.calls)
        stage.transport.calls[-1].fail(Disconnected("the wire broke"), told=False)
        await called(stage, before + 1)

        assert {on, stream.instance_id} == {first, second}
        stage.transport.calls[-1].complete()
        await stream.aclose()


async def test_a_wire_that_breaks_for_every_attempt_is_not_tried_for_ever(make_stage: Callable[..., Any]) -> None:
    stage = make_stage(1, migration_wait=3600, retries=2)
    stream = await stage.generate()
    for count in range(1, 4):
        await called(stage, count)
        stage.transport.calls[-1].fail(Disconnected("it crashes whatever carries it"), told=False)

    with pytest.raises(Unavailable, match="lost"):
        async with asyncio.timeout(10):
            [item async for item in stream]
    assert len(stage.transport.calls) == 3
    await stream.aclose()


async def test_no_more_workers_are_asked_again_than_were_allowed_at_first(make_stage: Callable[..., Any]) -> None:
    stage = make_stage(6, migration_wait=20, retries=2)
    stream = await stage.generate()
    stage.transport.refusals = [CannotConnect("away")] * 12
    stage.transport.calls[0].fail(Disconnected("the wire broke"), told=False)
    await called(stage, 2)
    stage.transport.calls[1].complete()

    await stage.ends_whole(stream)
    assert len(stage.transport.asked) == 3


async def test_a_worker_that_leaves_while_it_is_out_of_reach_is_not_waited_for(make_stage: Callable[..., Any]) -> None:
    stage = make_stage(1, migration_wait=3600)
    stream = await stage.generate()
    call = stage.transport.call

    async def leaves(instance: Any, *arguments: Any) -> Any:
        stage.pool.remove(instance.instance_id)
        return await call(instance, *arguments)

    stage.transport.call = leaves
    stage.transport.refusals = [CannotConnect("away")]
    stage.transport.calls[0].fail(Disconnected("the wire broke"), told=False)

    with pytest.raises(Unavailable):
        async with asyncio.timeout(10):
            [item async for item in stream]
    await stream.aclose()


async def test_request_that_a_worker_failed_itself_does_not_redial_a_dead_one(make_stage: Callable[..., Any]) -> None:
    stage = make_stage(2, migration_wait=3600, retries=2)
    stream = await stage.generate()
    stage.transport.calls[0].fail(Disconnected("killed"), told=False)
    await called(stage, 2)
    stage.transport.refusals = [CannotConnect("dead")] * 100
    stage.transport.calls[1].fail(BackendError.EngineShutdown("its engine is gone"), told=True)

    with pytest.raises(Unavailable, match="no worker could be reached"):
        async with asyncio.timeout(10):
            [item async for item in stream]
    # Three calls in all: two were accepted.
    assert len(stage.transport.refusals) == 99
    await stream.aclose()
