"""How moving comes to its end: at a worker that is free at last, or with the stream, which takes everything along."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from dynamo_core.errors import (
    CannotConnect,
    Disconnected,
    ResponseTimeout,
    ServiceOverloaded,
    Unavailable,
    WorkerOverloaded,
)


async def turns(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("how", ["closed", "stopped, then closed", "failed, then closed"])
async def test_closing_the_stream_ends_a_pending_call(make_stage: Callable[..., Any], how: str) -> None:
    stage = make_stage()
    stream = await stage.generate()
    stage.transport.calls[0].give(2)
    calling = asyncio.Event()
    over: list[bool] = []

    async def call(*_: Any) -> Any:
        calling.set()
        try:
            await asyncio.Event().wait()
        finally:
            # To give a call up takes a moment.
            await turns()
            over.append(True)

    stage.transport.call = call
    stage.lose()
    await calling.wait()
    if how.startswith("stopped"):
        stage.ctx.stop_generating()
    elif how.startswith("failed"):
        stream.fail(ResponseTimeout("too late"))
    if how != "closed":
        await turns(60)
        assert over == [True]
    await stream.aclose()

    assert over == [True]
    assert (stage.tracker.total_requests, stage.permit.told) == (0, [0])


async def test_closing_the_stream_waits_for_the_abandoned_worker(make_stage: Callable[..., Any]) -> None:
    stage = make_stage()
    stream = await stage.generate()
    stage.transport.calls[0].give(2)
    slow = stage.transport.calls[0]
    closed: list[bool] = []

    async def aclose() -> None:
        await turns()
        closed.append(True)

    slow.aclose = aclose
    stream.fail_attempt(ResponseTimeout("silent"))
    await turns(5)
    assert len(stage.transport.calls) == 2
    early = list(closed)
    await stream.aclose()

    assert (early, closed) == ([], [True])


async def test_a_stream_that_ends_well_leaves_no_task(make_stage: Callable[..., Any]) -> None:
    stage = make_stage()
    stream = await stage.generate()
    stage.lose(2)
    await turns()
    stage.transport.calls[1].complete()
    tokens = [token async for item in stream for token in item.token_ids]

    assert tokens == stage.answer(12)
    assert stage.tracker.total_requests == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await stream.aclose()
    assert stage.permit.told == [12]


@pytest.mark.parametrize("given", [0, 2])
async def test_workers_that_were_busy_are_asked_again_however_often_it_takes(
    make_stage: Callable[..., Any], given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_core.backoff.FIRST_PAUSE", 0.0001)
    monkeypatch.setattr("dynamo_core.backoff.LAST_PAUSE", 0.0001)
    stage = make_stage(migration_wait=20)
    stream = await stage.generate()
    stage.transport.calls[0].give(given)
    stage.transport.refusals = [WorkerOverloaded("full")] * 20
    call, accepted = stage.transport.call, asyncio.Event()

    async def seen(*arguments: Any) -> Any:
        source = await call(*arguments)
        accepted.set()
        return source

    stage.transport.call = seen
    stage.lose()
    async with asyncio.timeout(10):
        await accepted.wait()
    stage.transport.calls[1].complete()

    await stage.ends_whole(stream)
    assert stage.tracker.total_requests == 0


async def test_a_new_request_that_every_worker_was_too_busy_for_is_refused_without_waiting(
    make_stage: Callable[..., Any],
) -> None:
    stage = make_stage(2, migration_wait=3600)
    stream = await stage.generate()
    for call in range(2):
        await turns()
        stage.transport.calls[call].fail(WorkerOverloaded("no room in the engine"), told=True)

    with pytest.raises(ServiceOverloaded):
        async with asyncio.timeout(5):
            [item async for item in stream]
    await stream.aclose()
    assert stage.tracker.total_requests == 0


async def test_moving_has_tries_of_its_own(make_stage: Callable[..., Any]) -> None:
    stage = make_stage(retries=0)
    stream = await stage.generate()
    for call in range(2):
        stage.transport.calls[call].give(2)
        stage.transport.calls[call].fail(Disconnected("lost"), told=False)
        await turns()
    stage.transport.calls[2].complete()

    await stage.ends_whole(stream)


async def test_the_first_item_of_the_next_worker_is_not_that_of_the_answer(make_stage: Callable[..., Any]) -> None:
    stage = make_stage(first_item=0.01)
    stream = await stage.generate()
    stage.lose(2)
    await turns()
    passed = asyncio.Event()
    stage.pipeline._timeouts.first.set(passed.set)
    await passed.wait()

    assert not stream.ended
    stage.transport.calls[1].complete()
    await stage.ends_whole(stream)


async def test_a_worker_is_not_called_for_an_attempt_that_has_failed_already(make_stage: Callable[..., Any]) -> None:
    stage = make_stage()
    stream = await stage.generate()
    stage.transport.calls[0].give(2)
    route = stage.group.router.route

    async def fails(*arguments: Any) -> Any:
        stage.group.router.route = route
        stream.fail_attempt(Disconnected("what it builds on"))
        return await route(*arguments)

    stage.group.router.route = fails
    stage.lose()
    await turns()
    stage.transport.calls[-1].complete()

    await stage.ends_whole(stream)
    assert len(stage.transport.calls) == 2


async def test_attempts_that_fail_before_a_worker_is_called_count_too(make_stage: Callable[..., Any]) -> None:
    stage = make_stage()
    stream = await stage.generate()
    route, routed = stage.group.router.route, 0

    async def fails(*arguments: Any) -> Any:
        nonlocal routed
        routed += 1
        stream.fail_attempt(Disconnected("what it builds on"))
        return await route(*arguments)

    stage.group.router.route = fails
    stage.lose()
    await turns(100)

    assert routed == 2
    assert isinstance(stream.error, Unavailable)
    await stream.aclose()


async def test_a_busy_worker_outweighs_a_lost_one_in_the_error(make_stage: Callable[..., Any]) -> None:
    stage = make_stage(2)
    stage.transport.refusals = [CannotConnect("gone")]
    route = stage.group.router.route

    async def one_is_busy(request: Any, pool: Any) -> Any:
        if request.excluded:
            raise ServiceOverloaded
        return await route(request, pool)

    stage.group.router.route = one_is_busy

    with pytest.raises(ServiceOverloaded):
        await stage.generate()

    assert stage.permit.told == [0]
