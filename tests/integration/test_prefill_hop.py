"""One worker computes the prompt, another answers: what each is asked, what goes wrong, and that nothing is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import product
from typing import Any, ClassVar

import pytest
from dynamo_core import (
    BackendError,
    DisaggregationMode,
    DynamoError,
    EngineContext,
    FinishReason,
    GenerateContext,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    Principal,
    Route,
    RoutingHints,
    StopConditions,
    TraceLink,
    chunk,
    usage,
)
from dynamo_core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    ResponseTimeout,
    ServiceOverloaded,
    Unavailable,
)
from dynamo_plugin_router_round_robin.router import RoundRobinRouter
from dynamo_runtime.assembly.health import Health
from dynamo_runtime.dispatch.execution.pipeline import Deadlines
from dynamo_runtime.settings import Settings
from dynamo_runtime.worker.worker import WorkerLimits

from tests.integration.parts import Counting, Plain, reasons_of, turns

PREFILL = DisaggregationMode.PREFILL
DECODE = DisaggregationMode.DECODE

LINK = TraceLink("1" * 32, "2" * 16)
ONE_AT_A_TIME = WorkerLimits(engine_requests=1, queued_requests=0, grace_period=0, drain_timeout=1)


class Half(Plain):
    """Base of the engines below: remembers what it was asked, and what runs."""

    facts: ClassVar[dict[str, Any]] = {"kv_cache_block_size": 4}

    def __init__(self, config: PluginConfig, worker: Any) -> None:
        super().__init__(config, worker)
        self.asked: list[PreprocessedRequest] = []
        self.aborted = 0
        self.running = 0
        self.begun = asyncio.Event()
        #: If cleared, an answer waits here until it is set or the request is stopped.
        self.gate = asyncio.Event()
        self.gate.set()
        self.behave = "well"
        self.letting_go = 0

    async def abort(self, ctx: EngineContext) -> None:
        self.aborted += 1

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        self.asked.append(request)
        self.running += 1
        self.begun.set()
        try:
            forget = ctx.on_stop(self.gate.set)
            await self.gate.wait()
            forget()
            async for item in self.answer(request, ctx):
                yield item
        finally:
            # Letting go takes an engine a moment.
            await turns(self.letting_go)
            self.running -= 1

    def answer(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        raise NotImplementedError


class Prefiller(Half):
    """Computes prompts, and hands over what tells whose they are."""

    async def answer(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        end = LLMEngineOutput.length().with_tokens(request.token_ids[:1])
        end.disaggregated_params = {"kv": ctx.attempt_id}
        end.completion_usage = usage(len(request.token_ids), 1)
        end.completion_usage.cached_tokens = 1
        match self.behave:
            case _ if ctx.is_stopped():
                end = LLMEngineOutput.cancelled()
            case "well":
                pass
            case "hands nothing over":
                end.disaggregated_params = None
            case "ends at once":
                end.finish_reason = FinishReason.EOS
            case "cancels":
                end.finish_reason = FinishReason.CANCELLED
            case "stops with parameters":
                end.finish_reason = FinishReason.STOP
            case "stops without parameters":
                end.finish_reason, end.disaggregated_params = FinishReason.STOP, None
            case "ends with an error":
                end = LLMEngineOutput.error("no room on the prefill worker")
            case "refuses the input":
                raise BackendError.InvalidArgument("not to the prefill worker's taste")
            case "dies":
                raise BackendError.EngineShutdown("the prefill engine is gone")
            case "dies after a token":
                yield chunk.token(1)
                raise BackendError.EngineShutdown("the prefill engine is gone")
        yield end


class Meeting(Prefiller):
    """One whose engine moves the cache itself, on two ranks of four."""

    facts: ClassVar[dict[str, Any]] = {
        **Half.facts,
        "bootstrap_host": "meet.here",
        "bootstrap_port": 4242,
        "data_parallel_size": 2,
        "data_parallel_start_rank": 2,
    }


class Decoder(Half):
    """Gives the prompt back, if it was computed elsewhere."""

    async def answer(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        if request.prefill_result is None and request.bootstrap_info is None:
            raise BackendError.InvalidArgument("nothing was prefilled")
        if self.behave == "dies":
            raise BackendError.EngineShutdown("the decode engine is gone")
        for token in request.token_ids[: request.stop_conditions.max_tokens]:
            if ctx.is_stopped():
                yield LLMEngineOutput.cancelled()
                return
            yield chunk.token(token)
            if self.behave == "dies after a token":
                raise BackendError.EngineShutdown("the decode engine is gone")
            if self.behave == "goes on":
                await ctx.stopped()
                await turns()
        yield LLMEngineOutput.length() if not ctx.is_stopped() else LLMEngineOutput.cancelled()


class Whole(Half):
    async def answer(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        for token in request.token_ids:
            yield chunk.token(token)
        yield LLMEngineOutput.length()


async def pair(
    house: Any,
    prefill: type[Prefiller] = Prefiller,
    *,
    prefills: str = "well",
    decodes: str = "well",
    waits: str = "",
    **options: Any,
) -> tuple[Any, Any]:
    """Return the engines of a prefill and a decode worker: how each behaves, and which of them waits."""
    first = await house.run(prefill, disaggregation_mode=PREFILL, worker="p", **options)
    second = await house.run(Decoder, disaggregation_mode=DECODE, worker="d", **options)
    await house.until(lambda: not house.model().missing_roles)
    engines = first._engine, second._engine
    for engine, role, behave in zip(engines, ("prefill", "decode"), (prefills, decodes), strict=True):
        engine.behave = behave
        if role in waits:
            engine.gate.clear()
    return engines


def instances(house: Any, role: str) -> list[int]:
    return list(house.model().groups[role].pool.instances)


def watched(house: Any, tell: Callable[[int, Any], Any]) -> None:
    """Tell of every call before it is made: the worker and the context."""
    call = house.transport.call

    async def tells(instance: Any, endpoint: Any, request: Any, ctx: Any, sink: Any) -> Any:
        told = tell(instance.instance_id, ctx)
        if told is not None:
            await told
        return await call(instance, endpoint, request, ctx, sink)

    house.transport.call = tells


async def cancelled(asking: asyncio.Future[Any]) -> None:
    """Cancel the client while it asks, and wait for all that follows."""
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await turns()


# What each is asked.


async def test_the_prompt_is_computed_by_one_worker_and_the_answer_given_by_another(house: Any, tokens_of: Any) -> None:
    prefiller, decoder = await pair(house)
    (prefill_id,), (decode_id,) = instances(house, "prefill"), instances(house, "decode")
    request = PreprocessedRequest(
        model="m",
        token_ids=[5, 6, 7, 8],
        stop_conditions=StopConditions(max_tokens=3, min_tokens=2),
        routing=RoutingHints(expected_output_tokens=9),
        migration_link=LINK,
    )

    stream = await house.ask(request, ctx=EngineContext("r"))
    tokens = await tokens_of(stream)

    assert tokens == [5, 6, 7]
    assert (stream.prefill_instance_id, stream.instance_id) == (prefill_id, decode_id)
    (first,), (second,) = prefiller.asked, decoder.asked
    assert first.stop_conditions == StopConditions(max_tokens=1, min_tokens=2)
    assert (first.prefill_result, first.bootstrap_info) == (None, None)
    assert second.stop_conditions == request.stop_conditions
    assert second.prefill_result.disaggregated_params == {"kv": "r-p0"}
    assert second.prefill_result.prompt_tokens_details == {"cached_tokens": 1}
    assert second.routing == RoutingHints(expected_output_tokens=9, prefill_worker_id=prefill_id, prefill_dp_rank=0)
    assert request.stop_conditions.max_tokens == 3
    assert (house.tracker.total_requests, prefiller.running, decoder.running) == (0, 0, 0)


async def test_the_decode_worker_is_linked_to_the_prefill_workers_span(house: Any, tokens_of: Any) -> None:
    _, decoder = await pair(house)
    group = house.model().groups["prefill"]
    call = house.transport.call

    async def linking(instance: Any, endpoint: Any, request: Any, ctx: Any, sink: Any) -> Any:
        if instance.instance_id in group.pool.instances:
            data = sink.data

            class Linked:
                event, closed = sink.event, sink.closed

                @staticmethod
                def data(item: LLMEngineOutput) -> None:
                    item.worker_trace_link = LINK
                    data(item)

            sink = Linked
        return await call(instance, endpoint, request, ctx, sink)

    house.transport.call = linking
    await tokens_of(await house.generate([1, 2]))

    assert decoder.asked[0].migration_link == LINK


async def test_routers_get_the_phase_and_hashes_are_computed_once(
    house: Any, tokens_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    route = RoundRobinRouter.route

    async def watch(self: Any, request: Any, pool: Any) -> Any:
        seen.append((pool.role, request.phase.value, request.hashes(4), request.request.router_config_override))
        return await route(self, request, pool)

    monkeypatch.setattr(RoundRobinRouter, "route", watch)
    await pair(house)
    await tokens_of(await house.generate([1, 2, 3, 4]))

    (first, second) = seen
    assert first[:2] == ("prefill", "prefill")
    assert first[3] is None
    assert second[:2] == ("decode", "decode")
    assert second[2] is first[2]
    override = second[3]
    assert (override.overlap_score_credit, override.assume_kv_reuse, override.track_prefill_tokens) == (0, False, False)


async def test_the_prompt_is_load_of_the_prefill_worker_only(house: Any, tokens_of: Any) -> None:
    prefiller, decoder = await pair(house)
    (prefill_id,), (decode_id,) = instances(house, "prefill"), instances(house, "decode")
    prefiller.gate.clear()
    decoder.gate.clear()
    tracker = house.tracker

    asking = asyncio.ensure_future(house.generate([1, 2, 3]))
    await prefiller.begun.wait()
    during = [tracker.prefill_tokens(prefill_id), tracker.requests(prefill_id), tracker.requests(decode_id)]
    prefiller.gate.set()
    stream = await asking
    after = [tracker.prefill_tokens(decode_id), tracker.requests(prefill_id), tracker.requests(decode_id)]
    decoder.gate.set()
    await tokens_of(stream)

    assert during == [3, 1, 0]
    assert after == [0, 0, 1]
    assert tracker.total_requests == 0


async def test_engines_that_meet_elsewhere_are_asked_at_once_with_the_same_room(house: Any, tokens_of: Any) -> None:
    prefiller, decoder = await pair(house, Meeting, waits="prefill")

    for number in range(4):
        stream = await house.generate([1, 2])
        await turns()
        assert decoder.asked[number:], "the decode worker is not kept waiting"
        prefiller.gate.set()
        await tokens_of(stream)
        prefiller.gate.clear()

    for first, second in zip(prefiller.asked, decoder.asked, strict=True):
        info = first.bootstrap_info
        assert (info.bootstrap_host, info.bootstrap_port) == ("meet.here", 4242)
        assert second.bootstrap_info == info
        assert second.prefill_result is None
        assert info.bootstrap_room % 2 == first.routing.dp_rank - 2 == second.routing.prefill_dp_rank - 2
    assert {first.routing.dp_rank for first in prefiller.asked} == {2, 3}


async def test_a_late_prefill_worker_is_not_cancelled(house: Any, tokens_of: Any) -> None:
    prefiller, _ = await pair(house, Meeting, waits="prefill")
    stream = await house.generate([1, 2])
    tokens = [token async for item in stream for token in item.token_ids]

    closing = asyncio.ensure_future(stream.aclose())
    await turns()
    prefiller.gate.set()
    await closing

    assert tokens == [1, 2]
    assert prefiller.aborted == 0


# What a prefill worker may do.


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [("ends at once", "eos"), ("cancels", "cancelled"), ("stops without parameters", "stop")],
)
async def test_a_prefill_worker_may_give_the_whole_answer(house: Any, behaviour: str, reason: str) -> None:
    _, decoder = await pair(house, prefills=behaviour)

    stream = await house.generate([7, 8])
    items = [item async for item in stream]
    await stream.aclose()

    assert [(item.token_ids, item.finish_reason, item.disaggregated_params) for item in items] == [([7], reason, None)]
    assert stream.prefill_instance_id == stream.instance_id == instances(house, "prefill")[0]
    assert decoder.asked == []


@pytest.mark.parametrize(
    ("behaviour", "error", "message"),
    [
        ("ends with an error", BackendError.Unknown, "no room on the prefill worker"),
        ("refuses the input", InvalidArgument, "not to the prefill worker's taste"),
        ("hands nothing over", BackendError, r"^No disaggregated params in prefill response$"),
    ],
)
async def test_a_prefill_that_fails_fails_the_request_with_its_error(
    house: Any, behaviour: str, error: type[Exception], message: str
) -> None:
    prefiller, decoder = await pair(house)
    await house.run(Prefiller, disaggregation_mode=PREFILL, worker="p2")
    prefiller.behave = behaviour

    with pytest.raises(error, match=message):
        await house.generate([1])

    assert len(prefiller.asked) == 1
    assert decoder.asked == []


@pytest.mark.parametrize("behaviour", ["dies", "dies after a token", "hangs"])
async def test_prefill_worker_that_fails_is_replaced_by_another(
    make_house: Callable[..., Any], tokens_of: Any, behaviour: str
) -> None:
    house = make_house(deadlines=Deadlines(stall=0.05))
    prefiller, decoder = await pair(house, prefills=behaviour, waits="prefill" if behaviour == "hangs" else "")
    await house.run(Prefiller, disaggregation_mode=PREFILL, worker="p2")

    async def first(request: Any, pool: Any) -> Route:
        return Route(pool.eligible(request.excluded)[0])

    house.model().groups["prefill"].router.route = first

    assert await tokens_of(await house.generate([1, 2], ctx=EngineContext("r"))) == [1, 2]
    assert len(prefiller.asked) == 1
    assert decoder.asked[0].prefill_result.disaggregated_params == {"kv": "r-p1"}
    assert (prefiller.running, decoder.running, house.tracker.total_requests) == (0, 0, 0)


async def test_no_more_prefill_workers_are_tried_than_the_config_allows(make_house: Callable[..., Any]) -> None:
    house = make_house(deadlines=Deadlines(retries=1))
    workers = [await house.run(Prefiller, disaggregation_mode=PREFILL, worker=f"p{n}") for n in range(3)]
    await house.run(Decoder, disaggregation_mode=DECODE, worker="d")
    await house.until(lambda: not house.model().missing_roles)
    for worker in workers:
        worker._engine.behave = "dies"

    with pytest.raises(Unavailable) as caught:
        await house.generate([1])

    assert "the prefill engine is gone" in str(caught.value.__cause__)
    assert sum(len(worker._engine.asked) for worker in workers) == 2


async def test_a_prefill_worker_at_capacity_is_passed_over_and_all_of_them_refuse(house: Any, tokens_of: Any) -> None:
    first, _ = await pair(house, limits=ONE_AT_A_TIME)
    second = (await house.run(Prefiller, disaggregation_mode=PREFILL, worker="p2", limits=ONE_AT_A_TIME))._engine
    first.gate.clear()
    second.gate.clear()

    waiting = [asyncio.ensure_future(house.generate([1]))]
    await first.begun.wait()
    waiting.append(asyncio.ensure_future(house.generate([2])))
    await second.begun.wait()
    with pytest.raises(ServiceOverloaded):
        await house.generate([3])
    first.gate.set()
    taken = await tokens_of(await waiting[0])
    second.gate.set()
    taken += await tokens_of(await waiting[1])

    assert taken == [1, 2]


@pytest.mark.parametrize("behaviour", ["ends with an error", "refuses the input", "dies", "cancels"])
async def test_a_prefill_that_fails_while_the_other_decodes_fails_the_request_and_stops_the_decode_worker(
    house: Any, behaviour: str
) -> None:
    prefiller, decoder = await pair(house, Meeting, prefills=behaviour, decodes="goes on", waits="prefill")
    stream = await house.begun([1, 2])

    prefiller.gate.set()
    with pytest.raises(BackendError):
        async for _ in stream:
            pass
    # Before the reader has closed it.
    await house.eventually(lambda: decoder.aborted == 1)
    await stream.aclose()

    assert decoder.aborted == 1
    assert (decoder.running, prefiller.running, house.tracker.total_requests) == (0, 0, 0)


async def test_no_decode_worker_is_kept_for_a_prefill_that_failed_before_it_was_found(house: Any) -> None:
    prefiller, decoder = await pair(house, Meeting, prefills="ends with an error", waits="prefill")
    router = house.model().groups["decode"].router
    route = router.route

    async def later(request: Any, pool: Any) -> Any:
        prefiller.gate.set()
        await turns()
        return await route(request, pool)

    router.route = later
    with pytest.raises(BackendError, match="no room"):
        await house.generate([1])

    assert (decoder.running, house.tracker.total_requests) == (0, 0)


# What decode workers may do.


async def test_a_prefilled_request_waits_for_a_decode_worker_while_all_are_busy(
    house: Any, tokens_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_core.backoff.FIRST_PAUSE", 0.0001)
    _, decoder = await pair(house, limits=ONE_AT_A_TIME, waits="decode")
    running = await house.generate([1])
    asked: list[str] = []
    watched(house, lambda instance, ctx: asked.append(ctx.attempt_id))
    waiting = asyncio.ensure_future(house.generate([2], ctx=EngineContext("r")))
    await house.eventually(lambda: len(asked) >= 8)
    early = waiting.done()

    assert len(set(asked)) == len(asked)
    decoder.gate.set()
    await tokens_of(running)
    tokens = await tokens_of(await waiting)

    assert not early
    assert tokens == [2]


async def test_a_prefilled_request_is_refused_when_no_decode_worker_was_free_in_time(
    make_house: Callable[..., Any],
) -> None:
    house = make_house(deadlines=Deadlines(decode_wait=0))
    await pair(house, limits=ONE_AT_A_TIME, waits="decode")
    running = await house.generate([1])

    with pytest.raises(ServiceOverloaded):
        await house.generate([2])

    await running.aclose()


# Giving up.


async def test_a_request_that_is_stopped_while_it_is_prefilled_ends_cancelled(house: Any) -> None:
    prefiller, decoder = await pair(house, waits="prefill")
    ctx = EngineContext("r")
    asking = asyncio.ensure_future(house.generate([1], ctx=ctx))
    await prefiller.begun.wait()

    ctx.stop_generating()
    reasons = await reasons_of(await asking)

    assert reasons == ["cancelled"]
    assert (prefiller.aborted, decoder.asked) == (1, [])


async def test_a_prefill_that_ends_as_its_client_leaves_has_its_cache_fetched(house: Any) -> None:
    _, decoder = await pair(house)
    group = house.model().groups["prefill"]
    call = house.transport.call
    asking: asyncio.Task[Any]

    async def ending(instance: Any, endpoint: Any, request: Any, ctx: Any, sink: Any) -> Any:
        if instance.instance_id not in group.pool.instances:
            return await call(instance, endpoint, request, ctx, sink)

        class Ending:
            data, closed = sink.data, sink.closed

            @staticmethod
            def event(item: Any) -> None:
                sink.event(item)
                asking.cancel()

        return await call(instance, endpoint, request, ctx, Ending)

    house.transport.call = ending
    asking = asyncio.ensure_future(house.generate([1, 2], ctx=EngineContext("r")))
    with pytest.raises(asyncio.CancelledError):
        await asking
    await house.eventually(lambda: bool(decoder.asked) and not decoder.running)

    assert decoder.asked[0].prefill_result.disaggregated_params == {"kv": "r-p0"}
    await house.eventually(lambda: house.tracker.total_requests == 0)


async def test_a_client_that_leaves_while_a_decode_worker_is_called_has_it_called_once(house: Any) -> None:
    prefiller, decoder = await pair(house)
    (decode_id,) = instances(house, "decode")
    called: list[int] = []
    calling = asyncio.Event()

    def hold(instance_id: int, _: Any) -> Any:
        if instance_id != decode_id:
            return None
        called.append(instance_id)
        calling.set()
        return asyncio.Event().wait()

    watched(house, hold)
    asking = asyncio.ensure_future(house.generate([1, 2]))
    await calling.wait()
    await cancelled(asking)

    assert called == [decode_id]
    assert (prefiller.running, decoder.asked, house.tracker.total_requests) == (0, [], 0)


@pytest.mark.parametrize("meeting", [False, True])
@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_a_request_given_up_between_the_phases_still_has_its_cache_fetched(
    house: Any, how: str, meeting: bool
) -> None:
    prefiller, decoder = await pair(house, Meeting if meeting else Prefiller, decodes="goes on")
    if meeting:
        prefiller.behave = "hands nothing over"
    router = house.model().groups["decode"].router
    route = router.route
    ctx = EngineContext("r")
    asking: asyncio.Task[Any]

    async def late(request: Any, pool: Any) -> Any:
        # The prefill has ended; the client leaves while a decode worker is looked for.
        router.route = route
        await house.eventually(lambda: not prefiller.running)
        await turns()
        if how == "stop":
            ctx.stop_generating()
            raise ServiceOverloaded
        asking.cancel()
        await asyncio.Event().wait()

    router.route = late
    asking = asyncio.ensure_future(house.generate([1, 2], ctx=ctx))
    with pytest.raises((Cancelled, asyncio.CancelledError)):
        await asking
    await house.eventually(lambda: bool(decoder.asked) and not decoder.running)
    await house.eventually(lambda: not house.pipeline._prefill._tasks)

    (request,) = decoder.asked
    if meeting:
        assert request.bootstrap_info == prefiller.asked[0].bootstrap_info
    else:
        assert request.prefill_result.disaggregated_params == {"kv": "r-p0"}
    assert decoder.aborted == 1


async def test_a_prefill_that_still_runs_is_stopped_when_its_client_leaves_before_a_decode_worker_is_found(
    house: Any,
) -> None:
    prefiller, decoder = await pair(house, Meeting, waits="prefill")
    waiting = asyncio.Event()

    async def never(request: Any, pool: Any) -> Any:
        waiting.set()
        await asyncio.Event().wait()

    house.model().groups["decode"].router.route = never
    asking = asyncio.ensure_future(house.generate([1, 2]))
    await waiting.wait()
    await cancelled(asking)

    assert (prefiller.aborted, prefiller.running, decoder.asked) == (1, 0, [])


@pytest.mark.parametrize("prefill", [Prefiller, Meeting])
async def test_a_client_disconnect_stops_both_workers(
    house: Any, prefill: type[Prefiller], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_runtime.dispatch.execution.prefill.SETTLE", 3600)
    prefiller, decoder = await pair(house, prefill, decodes="goes on")
    if prefill is Meeting:
        prefiller.gate.clear()
    stream = await house.begun([1, 2])

    async with asyncio.timeout(30):
        await stream.aclose()

    assert decoder.aborted == 1
    assert prefiller.aborted == (1 if prefill is Meeting else 0)
    assert (prefiller.running, decoder.running, house.tracker.total_requests) == (0, 0, 0)


async def test_stopping_the_context_stops_both_and_ends_the_answer_cancelled(house: Any) -> None:
    prefiller, decoder = await pair(house, Meeting, decodes="goes on", waits="prefill")
    ctx = EngineContext("r")
    stream = await house.begun([1, 2], ctx=ctx)

    ctx.stop_generating()
    reasons = await reasons_of(stream)

    assert reasons[-1] == "cancelled"
    assert (prefiller.aborted, decoder.aborted) == (1, 1)


@pytest.mark.parametrize("deadlines", [Deadlines(first_item=0.02), Deadlines(total=0.02)])
@pytest.mark.parametrize("silent", ["prefill", "decode"])
async def test_one_deadline_holds_for_both_hops(
    make_house: Callable[..., Any], tokens_of: Any, deadlines: Deadlines, silent: str
) -> None:
    house = make_house(deadlines=deadlines)
    prefiller, decoder = await pair(house)
    (prefiller if silent == "prefill" else decoder).gate.clear()

    with pytest.raises(DeadlineExceeded if deadlines.total < 1 else ResponseTimeout):
        await tokens_of(await house.generate([1]))
    await turns()

    assert (prefiller.running, decoder.running, house.tracker.total_requests) == (0, 0, 0)


async def test_a_deadline_stops_both_workers_before_the_reader_has_closed_the_stream(
    make_house: Callable[..., Any],
) -> None:
    house = make_house(deadlines=Deadlines(first_item=0.02))
    prefiller, decoder = await pair(house, Meeting, waits="prefill and decode")
    stream = await house.generate([1])

    with pytest.raises(ResponseTimeout):
        await anext(stream)
    await house.eventually(lambda: not prefiller.running and not decoder.running)

    await stream.aclose()


async def test_pending_cleanups_end_with_the_pipeline(house: Any) -> None:
    _, decoder = await pair(house, waits="decode")
    router = house.model().groups["decode"].router
    route = router.route
    asking: asyncio.Task[Any]

    async def late(request: Any, pool: Any) -> Any:
        router.route = route
        asking.cancel()
        await asyncio.Event().wait()

    router.route = late
    asking = asyncio.ensure_future(house.generate([1, 2]))
    with pytest.raises(asyncio.CancelledError):
        await asking
    await decoder.begun.wait()

    await house.pipeline.aclose()

    assert (decoder.running, house.tracker.total_requests) == (0, 0)


# Roles that come and go.


async def test_prefill_workers_alone_make_no_model(house: Any) -> None:
    worker = await house.run(Prefiller, disaggregation_mode=PREFILL)

    assert house.models.list() == []
    assert worker.instance in house.models.instances()
    with pytest.raises(Unavailable, match="no decode worker"):
        house.model()
    assert [list(house.models.missing_roles(name)) for name in ("m", "nobody")] == [["decode"], []]


async def test_a_model_with_only_decode_workers_is_listed_as_incomplete(house: Any, tokens_of: Any) -> None:
    decode = await house.run(Decoder, disaggregation_mode=DECODE)
    worker = {"model": {"name": "m"}, "engine": {"use": "mocker"}}
    settings = Settings.model_validate({"workers": {"d": worker}})
    health = Health(settings, house.models)

    model = house.model()
    assert (model.instance_count, list(model.missing_roles)) == (1, ["prefill"])
    assert list(house.models.missing_roles("m")) == ["prefill"]
    assert health.readiness() == (False, "model m has no prefill worker")
    for ask in (lambda: house.generate([1]), lambda: asyncio.to_thread(model.precheck, Principal())):
        with pytest.raises(Unavailable, match="no prefill worker"):
            await ask()
    prefill = await house.run(Prefiller, disaggregation_mode=PREFILL)
    await house.until(lambda: not model.missing_roles)
    assert health.readiness() == (True, "ready")
    assert model.instance_count == 1
    assert await tokens_of(await house.generate([1, 2])) == [1, 2]
    await prefill.stop(grace=False)
    await house.until(lambda: list(model.missing_roles) == ["prefill"])
    with pytest.raises(Unavailable, match="no prefill worker"):
        await house.generate([1])
    await house.run(Prefiller, disaggregation_mode=PREFILL)
    await house.until(lambda: not model.missing_roles)
    assert await tokens_of(await house.generate([3, 4])) == [3, 4]
    await decode.stop(grace=False)
    await house.until(lambda: not house.models.list())
    with pytest.raises(Unavailable, match="no worker serves"):
        await model.generate(PreprocessedRequest(token_ids=[1]), EngineContext("r"), Principal())
    await house.run(Decoder, disaggregation_mode=DECODE)
    await house.until(lambda: not house.model().missing_roles)
    assert await tokens_of(await house.generate([3])) == [3]


async def test_aggregated_workers_answer_while_a_role_is_missing(house: Any, tokens_of: Any) -> None:
    await house.run(Decoder, disaggregation_mode=DECODE)
    whole = await house.run(Whole, worker="w")
    await house.until(lambda: not house.model().missing_roles)

    assert await tokens_of(await house.generate([1, 2])) == [1, 2]
    assert len(whole._engine.asked) == 1
    assert house.model().instance_count == 2


async def test_requests_take_the_less_loaded_plan(house: Any) -> None:
    _, decoder = await pair(house)
    whole = (await house.run(Whole, worker="w"))._engine
    await house.until(lambda: "aggregated" in house.model().groups)
    decoder.gate.clear()
    whole.gate.clear()

    streams = [await house.generate([number]) for number in range(6)]
    await turns()
    counts = (len(decoder.asked), len(whole.asked))
    for stream in streams:
        await stream.aclose()

    assert counts == (3, 3)


async def test_cards_list_required_roles_and_the_local_indexer(house: Any) -> None:
    await pair(house)
    await house.run(Whole, worker="w")
    await house.until(lambda: "aggregated" in house.model().groups)

    cards = {role: next(iter(group.pool.cards.values())) for role, group in house.model().groups.items()}
    assert {role: card.needs for role, card in cards.items()} == {
        "prefill": [["decode"]],
        "decode": [["prefill"]],
        "aggregated": [],
    }
    assert {role: card.runtime_config.enable_local_indexer for role, card in cards.items()} == {
        "prefill": True,
        "decode": False,
        "aggregated": True,
    }
    assert {role: bool(card.model_types) for role, card in cards.items()} == {
        "prefill": False,
        "decode": True,
        "aggregated": True,
    }


async def test_a_router_that_does_not_start_for_a_role_is_tried_again(
    house: Any, tokens_of: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dynamo_runtime.dispatch.models.models.FIRST_RETRY", 0.001)
    await house.run(Decoder, disaggregation_mode=DECODE)
    left = [1, 2]

    async def start(self: Any) -> None:
        if left:
            left.pop()
            raise RuntimeError("no events yet")

    monkeypatch.setattr(RoundRobinRouter, "start", start)
    prefill = house.worker(Prefiller, disaggregation_mode=PREFILL)
    await prefill.start()
    house.stack.push_async_callback(prefill.stop, grace=False)
    await house.until(lambda: not house.model().missing_roles)

    assert await tokens_of(await house.generate([1])) == [1]
    assert caplog.text.count("for prefill workers cannot be started: no events yet") == 2


# All ways through.


async def test_admission_is_asked_once_for_all_pools_and_gets_the_output_count(
    make_house: Callable[..., Any], tokens_of: Any
) -> None:
    admission = Counting()
    house = make_house(admission=admission)
    await pair(house)

    await tokens_of(await house.generate([5, 6, 7]))

    assert admission.roles == [["prefill", "decode"]]
    assert admission.back == [3]


PREFILLS = (
    "well",
    "hands nothing over",
    "ends at once",
    "stops with parameters",
    "ends with an error",
    "refuses the input",
    "dies",
    "dies after a token",
    "waits",
)
DECODES = ("well", "dies", "dies after a token", "goes on", "waits")
CLIENTS = ("reads", "leaves while it asks", "leaves at once", "leaves after an item", "stops", "stops and leaves")


@pytest.mark.parametrize("prefill", [Prefiller, Meeting])
async def test_no_state_is_left_after_any_outcome(
    make_house: Callable[..., Any], prefill: type[Prefiller], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_core.contracts.transports.serving.STOP_GRACE", 0.01)
    monkeypatch.setattr("dynamo_runtime.dispatch.execution.prefill.SETTLE", 0.01)
    admission = Counting()
    house = make_house(admission=admission, deadlines=Deadlines(first_item=0.03, total=0.06, decode_wait=0.03))
    prefiller, decoder = await pair(house, prefill)

    async def request(client: str, delay: int, ctx: EngineContext) -> None:
        asking = asyncio.ensure_future(house.generate([1, 2, 3], ctx=ctx))
        await turns(delay)
        if client == "leaves while it asks":
            asking.cancel()
        elif client.startswith("stops"):
            ctx.stop_generating()
        try:
            stream = await asking
        except (DynamoError, asyncio.CancelledError):
            return
        try:
            if client == "leaves after an item":
                await anext(stream)
            elif not client.endswith(("leaves", "at once")):
                async for _ in stream:
                    pass
        except (DynamoError, StopAsyncIteration):
            pass
        finally:
            await stream.aclose()

    for number, (first, second, client, delay) in enumerate(product(PREFILLS, DECODES, CLIENTS, (0, 6, 30))):
        if client in ("reads", "leaves at once", "leaves after an item") and delay:
            continue
        prefiller.behave, decoder.behave = first, second
        for engine in (prefiller, decoder):
            engine.gate.set() if engine.behave != "waits" else engine.gate.clear()
        async with asyncio.timeout(30):
            await request(client, delay, EngineContext(f"r{number}"))
        await house.eventually(lambda: not house.pipeline._prefill._tasks)
        way = f"prefill {first}, decode {second}, client {client} after {delay}"
        assert house.tracker.total_requests == 0, way
        assert len(admission.back) == admission.given, way
        assert (prefiller.running, decoder.running) == (0, 0), way
        assert not house.tracker._ranks, way
