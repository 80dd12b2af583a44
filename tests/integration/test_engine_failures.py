"""Slow, stubborn and departing parts: each of these once lost a request, a place or a model."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from dynamo_core import (
    EngineConfig,
    EngineContext,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    RoutingRequest,
    Source,
)
from dynamo_core import chunk as piece
from dynamo_core.contracts.transports.call import GENERATE, MODEL_FILE
from dynamo_core.errors import EngineShutdown, ResponseTimeout
from dynamo_core.protocol import Instance, ModelCard
from dynamo_core.protocol.records import CARDS, INSTANCES, ModelFile, ModelFileChunk
from dynamo_runtime.dispatch.execution.pipeline import Deadlines
from dynamo_runtime.dispatch.execution.response_stream import HIGH_WATER, FlushQueue, ResponseStream
from dynamo_runtime.worker.worker import WorkerLimits

from tests.integration.parts import Longer, Plain, reasons_of, turns

EMPTY_FILE = ModelFile("config.json", 0, hashlib.sha256(b"").hexdigest())


class Greedy(Plain):
    """Follows the contract, and never gives others a turn."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        while not ctx.is_stopped():
            yield piece.token(1)
        yield LLMEngineOutput.cancelled()


class Waiting(Plain):
    """Says nothing until it is stopped."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        await ctx.stopped()
        yield LLMEngineOutput.cancelled()


async def accept_late(request: Any, ctx: Any) -> AsyncGenerator[LLMEngineOutput, None]:
    await asyncio.Event().wait()
    raise AssertionError("never accepted")


async def answer(request: Any, ctx: Any) -> AsyncGenerator[LLMEngineOutput, None]:
    async def items() -> AsyncGenerator[LLMEngineOutput, None]:
        yield LLMEngineOutput.stop().with_tokens([7])

    return items()


async def register(house: Any, generate: Any = None, model_file: Any = None, **card: Any) -> Any:
    """Return a worker made by hand from handlers."""
    lease = await house.discovery.lease()
    if generate is not None:
        await house.transport.serve(lease.id, GENERATE, generate)
    if model_file is not None:
        await house.transport.serve(lease.id, MODEL_FILE, model_file)
    records = ModelCard(name="m", instance_id=lease.id, **card), Instance(instance_id=lease.id)
    await lease.put(CARDS + records[0].path, msgspec.json.encode(records[0]))
    await lease.put(INSTANCES + records[1].path, msgspec.json.encode(records[1]))
    return lease


async def test_an_engine_that_never_waits_does_not_stop_the_others(house: Any) -> None:
    await house.run(Greedy)

    async with asyncio.timeout(30):
        stream = await house.generate([1])
        await anext(stream)
        await stream.aclose()


async def test_unread_engine_output_is_bounded(house: Any) -> None:
    await house.run(Greedy)

    stream = await house.generate([1])
    await turns(100)

    assert stream.waiting <= HIGH_WATER + 64
    await stream.aclose()


async def test_a_worker_that_accepts_too_late_costs_the_request_nothing(
    make_house: Callable[..., Any], tokens_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_core.contracts.transports.serving.STOP_GRACE", 0.01)
    house = make_house(deadlines=Deadlines(accept=0.2))
    await register(house, accept_late)
    await register(house, answer)
    await house.eventually(lambda: len(house.models.instances()) == 2)

    assert await tokens_of(await house.generate([1])) == [7]


async def test_a_deadline_that_passes_while_workers_refuse_ends_the_request(make_house: Callable[..., Any]) -> None:
    async def refuse_late(request: Any, ctx: Any) -> AsyncGenerator[LLMEngineOutput, None]:
        await asyncio.sleep(0.05)
        raise EngineShutdown("going")

    house = make_house(deadlines=Deadlines(first_item=0.01))
    await register(house, refuse_late)
    await register(house, answer)
    await house.eventually(lambda: len(house.models.instances()) == 2)

    with pytest.raises(ResponseTimeout):
        await house.generate([1])


async def test_a_worker_that_leaves_while_the_router_thinks_is_passed_over(house: Any, tokens_of: Any) -> None:
    first = await house.run(Plain, worker="w0")
    await house.run(Plain, worker="w1")
    router = house.model().groups["aggregated"].router
    chosen, decide = asyncio.Event(), router.route

    async def think(request: RoutingRequest, pool: Any) -> Any:
        route = await decide(request, pool)
        if not request.excluded:
            chosen.set()
            await house.until(lambda: house.model().instance_count == 1)
        return route

    router.route = think
    asking = asyncio.ensure_future(house.generate([1]))
    await chosen.wait()
    await first.stop(grace=False)

    assert await tokens_of(await asking) == [7]


async def test_an_excluded_worker_takes_over_when_the_others_leave(house: Any) -> None:
    first = await house.run(Plain, worker="w0")
    other = house.worker(Longer, worker="w1")
    await other.start()

    await first.stop(grace=False)

    await house.eventually(lambda: [model.card.context_length for model in house.models.list()] == [4096])
    await other.stop(grace=False)


async def test_a_worker_that_leaves_while_its_files_load_leaves_no_empty_model(house: Any) -> None:
    go = asyncio.Event()

    async def slow(request: Any, ctx: Any) -> AsyncGenerator[ModelFileChunk, None]:
        async def chunks() -> AsyncGenerator[ModelFileChunk, None]:
            await go.wait()
            yield ModelFileChunk(b"")

        return chunks()

    leaving = await register(house, model_file=slow, checksum="x", files=[EMPTY_FILE])
    await asyncio.sleep(0)
    await register(house, answer, checksum="y")
    await leaving.aclose()
    go.set()

    await house.eventually(lambda: [model.card.checksum for model in house.models.list()] == ["y"])
    await register(house, answer, checksum="y")
    await house.eventually(lambda: house.model().instance_count == 2)


async def test_a_model_that_could_not_be_loaded_is_tried_again(house: Any) -> None:
    tries = 0

    async def flaky(request: Any, ctx: Any) -> AsyncGenerator[ModelFileChunk, None]:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise EngineShutdown("not yet")

        async def chunks() -> AsyncGenerator[ModelFileChunk, None]:
            yield ModelFileChunk(b"")

        return chunks()

    await register(house, model_file=flaky, files=[EMPTY_FILE])

    await house.eventually(lambda: len(house.models.list()) == 1)
    assert tries == 2


async def test_a_router_that_cannot_be_closed_does_not_end_the_watch(house: Any) -> None:
    first = await house.run(Plain, worker="w0")

    async def broken() -> None:
        raise RuntimeError("a bug of the router")

    house.model().groups["aggregated"].router.aclose = broken
    await first.stop(grace=False)
    await house.until(lambda: not house.models.list())

    await house.run(Plain, worker="w1")

    assert house.model().instance_count == 1


async def test_a_watch_that_breaks_off_is_begun_again_without_losing_the_view(house: Any) -> None:
    stays = await house.run(Plain, worker="w0")
    leaves = await house.run(Plain, worker="w1")
    for watcher in house.discovery._watchers:
        watcher.end()
    await leaves.stop(grace=False)

    await house.eventually(lambda: list(house.model().instances()) == [stays.instance])
    await house.run(Plain, worker="w2")

    assert house.model().instance_count == 2


async def test_stopping_a_request_that_is_paused_ends_it(house: Any) -> None:
    await house.run(Greedy)
    ctx = EngineContext("r")
    stream = await house.begun([1], ctx=ctx)
    stream.pause()
    await asyncio.sleep(0)

    ctx.stop_generating()
    reasons = await reasons_of(stream)

    assert reasons[-1] == "cancelled"


async def test_a_request_stopped_before_queueing_frees_its_place(house: Any) -> None:
    limits = WorkerLimits(engine_requests=1, queued_requests=1, grace_period=0, drain_timeout=1)
    worker = await house.run(Waiting, limits=limits)
    running = await house.generate([1])
    stopped = EngineContext("stopped")
    stopped.stop_generating()
    stream = ResponseStream(GENERATE.merge, FlushQueue())

    request = PreprocessedRequest(model="m", token_ids=[1])
    source = await house.transport.call(worker.instance, GENERATE, request, stopped, stream.begin())
    stream.attach(source, 1)
    reasons = await reasons_of(stream)

    assert reasons == ["cancelled"]
    await running.aclose()


async def test_a_failing_stop_callback_disturbs_no_other_request(house: Any) -> None:
    class Careless(Plain):
        def stumble(self) -> None:
            raise ZeroDivisionError

        async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
            ctx.on_stop(self.stumble)
            yield piece.token(1)
            await ctx.stopped()
            yield LLMEngineOutput.cancelled()

    await house.run(Careless)
    stream = await house.begun([1])

    await stream.aclose()

    assert house.tracker.total_requests == 0


async def test_an_engine_that_makes_the_choices_itself_ends_each(house: Any) -> None:
    class Two(Plain):
        async def start(self, worker_id: int) -> EngineConfig:
            return EngineConfig(model="m", capabilities=frozenset({"multi_choice"}))

        async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
            for index in (0, 1):
                yield LLMEngineOutput([index], index=index)
                item = LLMEngineOutput.stop()
                item.index = index
                yield item

    await house.run(Two)
    request = PreprocessedRequest(model="m", token_ids=[1])
    request.sampling_options.n = 2

    stream = await house.ask(request)
    ended = [item.index async for item in stream if item.finish_reason is not None]
    await stream.aclose()

    assert ended == [0, 1]


class Grip(Source):
    """A source that remembers whether it was paused."""

    paused = False

    async def aclose(self) -> None:
        """End nothing."""

    def stop(self) -> None:
        """Stop nothing."""

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


async def test_a_reader_that_is_behind_pauses_the_next_attempt_too() -> None:
    stream = ResponseStream(None, FlushQueue())
    first, second = Grip(), Grip()
    stream.begin()
    stream.attach(first, 1)

    stream.pause()
    stream.begin()
    stream.attach(second, 2)

    assert first.paused
    assert second.paused
    await stream.aclose()
