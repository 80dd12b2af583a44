"""Route, call, stream, close: what one request holds, and that it lets go of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, ClassVar

import pytest
from dynamo_core import (
    BackendError,
    EngineConfig,
    EngineContext,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    chunk,
)
from dynamo_core.errors import (
    DeadlineExceeded,
    ModelNotFound,
    ResponseTimeout,
    ServiceOverloaded,
    StreamIncomplete,
    Unavailable,
)
from dynamo_runtime.dispatch.execution.pipeline import Deadlines
from dynamo_runtime.worker.worker import WorkerLimits, WorkerState

from tests.integration.parts import Counting, reasons_of, turns


class Engine(LLMEngine):
    """Base of the engines below: starts at once, counts what the framework calls."""

    NAME = "test"
    made: ClassVar[list[Engine]] = []

    def __init__(self, config: PluginConfig, worker: Any) -> None:
        super().__init__(config, worker)
        self.calls: list[str] = []
        self.running = 0
        Engine.made.append(self)

    async def start(self, worker_id: int) -> EngineConfig:
        self.calls.append("start")
        return EngineConfig(model=self.worker.model_name)

    async def abort(self, ctx: EngineContext) -> None:
        self.calls.append("abort")

    async def drain(self) -> None:
        self.calls.append("drain")

    async def cleanup(self) -> None:
        self.calls.append("cleanup")


class Echo(Engine):
    """Gives the prompt back."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        for token in request.token_ids:
            yield chunk.token(token)
        yield LLMEngineOutput.stop()


class Endless(Engine):
    """Gives tokens until it is told to stop."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        self.running += 1
        try:
            while not ctx.is_stopped():
                yield chunk.token(1)
                await asyncio.sleep(0)
            yield LLMEngineOutput.cancelled()
        finally:
            self.running -= 1
            self.calls.append("finally")


class Nested(Engine):
    """Delegates to another generator, as engines with a queue do."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        try:
            async with aclosing(self.inner(ctx)) as items:
                async for item in items:
                    yield item
        finally:
            self.calls.append("outer finally")

    async def inner(self, ctx: GenerateContext) -> AsyncGenerator[LLMEngineOutput, None]:
        try:
            yield chunk.token(1)
            await ctx.stopped()
            yield LLMEngineOutput.cancelled()
        finally:
            self.calls.append("inner finally")


class Lingering(Engine):
    """Still holds something when it gives the terminal."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        try:
            yield LLMEngineOutput.stop()
        finally:
            await turns(10)
            self.calls.append("finally")


class Stubborn(Engine):
    """Gives tokens for ever, whatever it is told."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        try:
            while True:
                yield chunk.token(1)
                await asyncio.sleep(0)
        finally:
            self.calls.append("finally")


class Silent(Engine):
    """Never says anything, and does not look whether it should stop."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        self.running += 1
        try:
            await asyncio.Event().wait()
            yield LLMEngineOutput.stop()
        finally:
            self.running -= 1


class Breaking(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        yield chunk.token(1)
        raise ZeroDivisionError("a bug of the engine")


class Unfinished(Engine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        yield chunk.token(1)


class Talkative(Engine):
    """Goes on after the terminal."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        yield LLMEngineOutput.stop().with_tokens([1])
        yield chunk.token(2)


async def test_a_request_comes_back_whole(house: Any, tokens_of: Any) -> None:
    await house.run(Echo)

    stream = await house.generate([3, 1, 2])

    assert await tokens_of(stream) == [3, 1, 2]


async def test_requests_go_to_the_workers_in_turn(house: Any, tokens_of: Any) -> None:
    workers = [await house.run(Echo, worker=f"w{number}") for number in range(3)]

    served = []
    for _ in range(6):
        stream = await house.generate([1])
        served.append(stream.instance_id)
        await tokens_of(stream)

    assert served == [worker.instance.instance_id for worker in workers] * 2


async def test_closing_a_stream_runs_every_finally_below_it_before_it_returns(house: Any) -> None:
    worker = await house.run(Nested)
    stream = await house.begun([1])

    await stream.aclose()

    finallys = [call for call in worker._engine.calls if "finally" in call]
    assert finallys == ["inner finally", "outer finally"]


async def test_a_stream_that_is_read_to_its_end_has_run_every_finally_once_it_is_closed(house: Any) -> None:
    worker = await house.run(Lingering)
    stream = await house.generate([1])
    reasons = [item.finish_reason async for item in stream]

    await stream.aclose()

    assert reasons == ["stop"]
    assert worker._engine.calls == ["start", "finally"]


async def test_a_transport_that_is_closed_closes_the_engines_generators(house: Any) -> None:
    worker = await house.run(Stubborn)
    stream = await house.begun([1])
    stream.pause()
    await turns(5)

    await house.transport.aclose()

    assert worker._engine.calls == ["start", "finally"]
    await stream.aclose()


async def test_stopping_the_context_ends_the_stream_with_a_cancelled_terminal(house: Any) -> None:
    await house.run(Endless)
    ctx = EngineContext("r")
    stream = await house.begun([1], ctx=ctx)

    ctx.stop_generating()
    reasons = await reasons_of(stream)

    assert reasons[-1] == "cancelled"


async def test_an_engine_that_does_not_stop_is_cancelled_after_the_grace(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_core.contracts.transports.serving.STOP_GRACE", 0.01)
    worker = await house.run(Silent)
    stream = await house.generate([1])

    await stream.aclose()

    assert worker._engine.running == 0


@pytest.mark.parametrize(("engine", "error"), [(Breaking, BackendError.Unknown), (Unfinished, StreamIncomplete)])
async def test_a_broken_stream_gives_its_tokens_then_the_error(
    house: Any, engine: type[Engine], error: type[Exception]
) -> None:
    await house.run(engine)
    stream = await house.generate([1])

    first = await anext(stream)
    with pytest.raises(error):
        await anext(stream)
    await stream.aclose()

    assert first.token_ids == [1]


async def test_items_after_the_terminal_are_ignored(
    house: Any, tokens_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_STREAM_VALIDATOR", "0")
    await house.run(Talkative)

    assert await tokens_of(await house.generate([1])) == [1]


async def test_an_engine_that_goes_on_after_its_terminal_fails_loudly_in_development(
    house: Any, tokens_of: Any
) -> None:
    await house.run(Talkative)

    with pytest.raises(BackendError, match="after terminal"):
        await tokens_of(await house.generate([1]))


async def test_an_unserved_model_is_not_found_or_unavailable_without_any(house: Any) -> None:
    with pytest.raises(Unavailable):
        house.model("m")
    await house.run(Echo)

    with pytest.raises(ModelNotFound, match="other"):
        house.model("other")


async def test_a_stopped_worker_is_unregistered_before_its_engines_cleanup(house: Any) -> None:
    worker = await house.run(Echo)

    await worker.stop()
    await house.until(lambda: not house.models.list())

    assert worker.state is WorkerState.STOPPED
    assert worker._engine.calls == ["start", "drain", "cleanup"]
    names = [name for name, _ in house.announced]
    assert [name for name in names if "engine" in name] == [
        "dynamo_engine_started",
        "dynamo_engine_draining",
        "dynamo_engine_stopped",
    ]
    assert [name for name in names if "instance" in name] == ["dynamo_instance_added", "dynamo_instance_removed"]


async def test_stopping_a_worker_finishes_running_requests(house: Any) -> None:
    worker = await house.run(Endless, limits=WorkerLimits(grace_period=0, drain_timeout=5))
    ctx = EngineContext("r")
    stream = await house.begun([1], ctx=ctx)

    stopping = asyncio.ensure_future(worker.stop())
    await house.until(lambda: not house.models.list())
    ctx.stop_generating()
    items = [item async for item in stream]
    await stopping
    await stream.aclose()

    assert items[-1].finish_reason == "cancelled"
    assert worker._engine.calls[-2:] == ["drain", "cleanup"]


async def test_a_worker_at_capacity_refuses_and_the_next_one_serves(house: Any, tokens_of: Any) -> None:
    limits = WorkerLimits(engine_requests=1, queued_requests=0, grace_period=0, drain_timeout=1)
    first = await house.run(Endless, limits=limits, worker="w0")
    second = await house.run(Endless, limits=limits, worker="w1")

    streams = [await house.generate([1]) for _ in range(2)]
    with pytest.raises(ServiceOverloaded):
        await house.generate([1])
    for stream in streams:
        await stream.aclose()

    assert {stream.instance_id for stream in streams} == {
        first.instance.instance_id,
        second.instance.instance_id,
    }


async def test_a_request_that_leaves_the_queue_frees_its_place(house: Any) -> None:
    limits = WorkerLimits(engine_requests=1, queued_requests=1, grace_period=0, drain_timeout=1)
    await house.run(Endless, limits=limits)
    running = await house.generate([1])
    queued = await house.generate([1])

    await queued.aclose()
    again = await house.generate([1])
    await running.aclose()
    item = await anext(again)
    await again.aclose()

    assert item.token_ids


async def test_no_first_item_within_the_deadline_is_an_error(
    make_house: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_core.contracts.transports.serving.STOP_GRACE", 0.01)
    house = make_house(deadlines=Deadlines(first_item=0.01))
    await house.run(Silent)
    stream = await house.generate([1])

    with pytest.raises(ResponseTimeout):
        await anext(stream)
    await stream.aclose()


@pytest.mark.parametrize("first_item", [0.005, 300])
async def test_an_answer_that_takes_longer_than_allowed_is_cut(
    make_house: Callable[..., Any], first_item: float
) -> None:
    house = make_house(deadlines=Deadlines(first_item=first_item, total=0.02))
    await house.run(Endless)
    stream = await house.generate([1])

    with pytest.raises(DeadlineExceeded):
        async for _ in stream:
            pass
    await stream.aclose()


async def test_admission_is_given_its_permit_back_once_with_the_tokens_that_came_out(
    make_house: Callable[..., Any], tokens_of: Any
) -> None:
    admission = Counting(limit=1)
    house = make_house(admission=admission)
    await house.run(Echo)

    stream = await house.generate([5, 6, 7])
    with pytest.raises(ServiceOverloaded) as refused:
        await house.generate([1])
    await tokens_of(stream)
    await stream.aclose()

    assert refused.value.retry_after == 7
    assert (admission.given, admission.back) == (1, [3])


async def test_a_request_refused_by_all_workers_releases_its_permit(make_house: Callable[..., Any]) -> None:
    admission = Counting()
    house = make_house(admission=admission)
    limits = WorkerLimits(engine_requests=1, queued_requests=0, grace_period=0, drain_timeout=1)
    await house.run(Endless, limits=limits)
    busy = await house.generate([1])

    with pytest.raises(ServiceOverloaded):
        await house.generate([1])

    assert (admission.given, len(admission.back)) == (2, 1)
    await busy.aclose()


async def test_a_reader_that_does_not_come_back_makes_the_engine_wait(house: Any) -> None:
    worker = await house.run(Endless)
    stream = await house.begun([1])

    stream.pause()
    await turns(50)
    waiting = len(stream._items)
    await turns(50)

    assert len(stream._items) == waiting
    stream.resume()
    assert (await anext(stream)).token_ids
    await stream.aclose()
    assert worker._engine.running == 0


async def test_on_ready_is_called_once_per_turn(house: Any) -> None:
    await house.run(Echo)
    stream = await house.generate([1, 2, 3])
    taken: list[list[int]] = []
    done = asyncio.Event()

    def ready() -> None:
        taken.extend(item.token_ids for item in stream.take())
        if stream.ended:
            done.set()

    stream.on_ready(ready)
    async with asyncio.timeout(60):
        await done.wait()
    await stream.aclose()

    assert [token for tokens in taken for token in tokens] == [1, 2, 3]
    assert len(taken) < 3
