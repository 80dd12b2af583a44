"""Requests whose worker fails: asked again, moved on, or told why not. Real workers, in one process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from itertools import product
from typing import Any, ClassVar

import pytest
from dynamo_core import (
    BackendError,
    CompletionUsage,
    DisaggregationMode,
    DynamoError,
    EmbedOutput,
    EmbedRequest,
    EngineContext,
    GenerateContext,
    GuidedDecodingOptions,
    LLMEngine,
    LLMEngineOutput,
    OutputOptions,
    PluginConfig,
    PreprocessedRequest,
    Principal,
    SamplingOptions,
    ScoreOutput,
    ScoreRequest,
    StopConditions,
    TopLogprob,
    usage,
)
from dynamo_core.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineShutdown,
    InvalidArgument,
    NotSupported,
    ResponseTimeout,
    StreamIncomplete,
    Unavailable,
)
from dynamo_runtime.dispatch.execution.pipeline import Deadlines
from dynamo_runtime.worker.worker import WorkerLimits

from tests.integration.parts import Counting, Plain

LOST = BackendError.EngineShutdown("the engine is gone")
PROMPT = [10, 20, 30]


class Fragile(Plain):
    """The token at position p is 100 + p. Fails, or hangs, after as many tokens as `fates` says next."""

    made: ClassVar[list[Fragile]] = []
    #: For each request in the order of their arrival at any worker: after how many tokens what happens.
    fates: ClassVar[list[tuple[int, Exception | str]]] = []

    def __init__(self, config: PluginConfig, worker: Any) -> None:
        super().__init__(config, worker)
        self.asked: list[PreprocessedRequest] = []
        self.attempts: list[str] = []
        self.requests: list[str] = []
        self.running = 0
        Fragile.made.append(self)

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        self.asked.append(request)
        self.attempts.append(ctx.attempt_id)
        self.requests.append(ctx.id)
        self.running += 1
        after, fate = self.fates.pop(0) if self.fates else (10**6, "")
        try:
            limit = request.stop_conditions.max_tokens
            assert limit is not None
            for count in range(limit):
                if count == after:
                    await self.meet(fate, ctx)
                if ctx.is_stopped():
                    yield LLMEngineOutput.cancelled()
                    return
                yield self.item(request, count)
                await asyncio.sleep(0)
            if after == limit:
                await self.meet(fate, ctx)
            yield LLMEngineOutput.length().with_usage(self.usage(request, limit))
        finally:
            self.running -= 1

    async def embed(self, request: EmbedRequest, ctx: GenerateContext) -> EmbedOutput:
        if self.fates:
            await self.meet(self.fates.pop(0)[1], ctx)
        return EmbedOutput(embeddings=[[1.0]])

    async def score(self, request: ScoreRequest, ctx: GenerateContext) -> ScoreOutput:
        if self.fates:
            await self.meet(self.fates.pop(0)[1], ctx)
        return ScoreOutput(scores=[float(len(document)) for document in request.documents])

    async def meet(self, fate: Exception | str, ctx: GenerateContext) -> None:
        if isinstance(fate, Exception):
            raise fate
        await ctx.stopped()

    def item(self, request: PreprocessedRequest, count: int) -> LLMEngineOutput:
        position = len(request.token_ids) + count
        item = LLMEngineOutput([(100 + position) % 256])
        if request.output_options.logprobs is not None:
            item.log_probs = [-float(position)]
            item.top_logprobs = [[TopLogprob(100 + position, -float(position), 1)]]
            item.cum_log_probs = -float(sum(range(len(request.token_ids), position + 1)))
        return item

    def usage(self, request: PreprocessedRequest, count: int) -> CompletionUsage:
        told = usage(len(request.token_ids), count)
        told.cached_tokens = 2
        return told


@pytest.fixture(autouse=True)
def fresh() -> None:
    Fragile.made, Fragile.fates, Fragile.facts = [], [], {}


def answer(count: int) -> list[int]:
    return [(100 + len(PROMPT) + at) % 256 for at in range(count)]


def request(max_tokens: int = 8, **more: Any) -> PreprocessedRequest:
    conditions = StopConditions(max_tokens=max_tokens, **more.pop("conditions", {}))
    return PreprocessedRequest(model="m", token_ids=PROMPT, stop_conditions=conditions, **more)


async def workers(
    house: Any,
    count: int,
    *fates: tuple[int, Exception | str],
    limit: int = 3,
    engine: type[LLMEngine] = Fragile,
    **more: Any,
) -> list[Any]:
    """Add so many workers, and return what happens to the next requests."""
    Fragile.fates = list(fates)
    return [await house.run(engine, worker=f"w{at}", migration_limit=limit, **more) for at in range(count)]


async def read(stream: Any) -> list[LLMEngineOutput]:
    try:
        return [item async for item in stream]
    finally:
        await stream.aclose()


def tokens(items: list[LLMEngineOutput]) -> list[int]:
    return [token for item in items for token in item.token_ids]


def asked() -> list[PreprocessedRequest]:
    return [request for engine in Fragile.made for request in engine.asked]


def metric(house: Any, name: str, **labels: str) -> float:
    lines = house.metrics.render_now().decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(f"dynamo_frontend_model_migration_{name}{{")
        and all(f'{key}="{value}"' in line for key, value in labels.items())
    )


# Before anything of the answer is there.


@pytest.mark.parametrize("error", [LOST, StreamIncomplete("no end"), BackendError.Disconnected("from its memory")])
async def test_a_worker_that_fails_before_the_first_item_costs_the_client_nothing(house: Any, error: Exception) -> None:
    await workers(house, 2, (0, error), limit=0)

    items = await read(await house.ask(request()))

    assert tokens(items) == answer(8)
    assert items[-1].completion_usage is not None
    assert items[-1].completion_usage.cached_tokens == 2
    assert sorted(engine.running for engine in Fragile.made) == [0, 0]
    assert asked()[0] == asked()[1]
    assert {engine.requests[0] for engine in Fragile.made} == {"r0"}
    assert {engine.attempts[0] for engine in Fragile.made} == {"r0-0", "r0-1"}
    assert metric(house, "total", migration_type="new_request", model="m") == 1


async def test_no_more_workers_are_tried_than_allowed(make_house: Callable[..., Any]) -> None:
    house = make_house(deadlines=Deadlines(retries=1))
    await workers(house, 3, *[(0, LOST)] * 3)

    with pytest.raises(Unavailable):
        await read(await house.ask(request()))

    assert len(asked()) == 2
    assert metric(house, "duration_seconds_count", outcome="success", migration_type="new_request") == 1


async def test_a_new_request_does_not_wait_for_workers_that_are_not_there(house: Any) -> None:
    await workers(house, 1, (0, LOST))

    async with asyncio.timeout(30):
        with pytest.raises(Unavailable):
            await read(await house.ask(request()))

    assert metric(house, "duration_seconds_count", outcome="failure", migration_type="new_request") == 1


@pytest.mark.parametrize(
    "error",
    [
        BackendError.InvalidArgument("not like this"),
        BackendError.Unknown("broken"),
        ValueError("a bug"),
        EngineShutdown("given up", cause=Cancelled("by the caller")),
        EngineShutdown("refused", cause=InvalidArgument("too long")),
    ],
)
@pytest.mark.parametrize("after", [0, 3])
async def test_errors_without_hope_elsewhere_do_not_migrate(house: Any, error: Exception, after: int) -> None:
    await workers(house, 2, (after, error))

    with pytest.raises(DynamoError, match=str(error)):
        await read(await house.ask(request()))

    assert len(asked()) == 1


async def test_a_request_that_was_stopped_is_not_asked_again(house: Any) -> None:
    await workers(house, 2)
    ctx = EngineContext("r")

    class StopFirst(Exception):
        """Raised by the engine once the request is stopped."""

    async def meet(self: Fragile, fate: Any, inner: GenerateContext) -> None:
        ctx.stop_generating()
        raise LOST

    Fragile.fates = [(0, StopFirst())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fragile, "meet", meet)
        with pytest.raises(EngineShutdown):
            await read(await house.ask(request(), ctx=ctx))

    assert len(asked()) == 1


async def test_an_answer_of_another_endpoint_is_asked_for_again_too(house: Any) -> None:
    Fragile.facts = {"capabilities": frozenset({"embed"})}
    await workers(house, 2, (0, LOST), limit=0)

    output = await house.model().embed(EmbedRequest(model="m", token_ids=[[1]]), EngineContext("r"), Principal())

    assert output.embeddings == [[1.0]]


async def test_score_requests_are_retried_by_capability(house: Any) -> None:
    Fragile.facts = {"capabilities": frozenset({"rerank"})}
    await workers(house, 2, (0, LOST), limit=0)

    async def scored(*queries: str) -> ScoreOutput:
        request = ScoreRequest(model="m", queries=list(queries), documents=["a", "bcd"])
        output: ScoreOutput = await house.model().score(request, [1, 2], EngineContext("r"), Principal())
        return output

    assert (await scored("q")).scores == [1.0, 3.0]
    assert house.model().card.model_types == ["chat", "completions", "rerank"]
    with pytest.raises(NotSupported, match="does not score texts"):
        await scored("q", "r")


async def lost_beside_a_busy_worker(house: Any, after: int) -> tuple[Any, asyncio.Future[list[LLMEngineOutput]]]:
    """Yield a request that keeps one of two workers busy, and one that loses its worker after some tokens."""
    limits = WorkerLimits(engine_requests=1, queued_requests=0, grace_period=0, drain_timeout=1)
    await workers(house, 2, (1, "hangs"), (after, LOST), limits=limits)
    busy = await house.ask(request())
    await anext(busy)
    reading = asyncio.ensure_future(read(await house.ask(request())))
    await house.eventually(lambda: metric(house, "total") == 1)
    return busy, reading


# In mid-answer.


async def test_another_worker_goes_on_where_the_first_one_stopped(house: Any) -> None:
    await workers(house, 2, (3, LOST))

    items = await read(await house.ask(request(conditions={"min_tokens": 5}), ctx=EngineContext("r")))

    assert tokens(items) == answer(8)
    first, second = Fragile.made
    (one,), (other,) = first.asked, second.asked
    assert other.token_ids == PROMPT + answer(3)
    assert (other.stop_conditions.max_tokens, other.stop_conditions.min_tokens) == (5, 2)
    assert (one.stop_conditions.max_tokens, one.stop_conditions.min_tokens) == (8, 5)
    assert one.token_ids == PROMPT
    link = next(item.worker_trace_link for item in items if item.worker_trace_link is not None)
    assert other.migration_link == link
    assert (first.requests, second.requests) == (["r"], ["r"])
    assert (first.attempts, second.attempts) == (["r-0"], ["r-1"])
    assert (metric(house, "total"), metric(house, "total", migration_type="ongoing_request")) == (1, 1)
    assert metric(house, "duration_seconds_count", outcome="success") == 1


async def test_the_counts_are_those_of_the_whole_answer(make_house: Callable[..., Any]) -> None:
    admission = Counting()
    house = make_house(admission=admission)
    await workers(house, 3, (3, LOST), (2, LOST))

    items = await read(await house.ask(request(output_options=OutputOptions(logprobs=1))))

    told = items[-1].completion_usage
    # What the first worker found in its cache it had not said yet when it failed.
    assert told == usage(len(PROMPT), 8)
    # It is admitted once, however often it moves.
    assert (admission.given, admission.back) == (1, [8])
    log_probs = [value for item in items for value in item.log_probs or ()]
    tops = [[top.token_id for top in tops] for item in items for tops in item.top_logprobs or ()]
    positions = range(len(PROMPT), len(PROMPT) + 8)
    assert log_probs == [-float(position) for position in positions]
    assert tops == [[100 + position] for position in positions]
    assert [item.cum_log_probs for item in items if item.cum_log_probs is not None][-1] == -float(sum(positions))


async def test_cached_tokens_are_those_of_the_first_worker(house: Any) -> None:
    class Telling(Fragile):
        def item(self, request: PreprocessedRequest, count: int) -> LLMEngineOutput:
            return super().item(request, count).with_usage(self.usage(request, count + 1))

        def usage(self, request: PreprocessedRequest, count: int) -> CompletionUsage:
            told = super().usage(request, count)
            told.cached_tokens = len(self.made[0].asked) if self is self.made[0] else 3
            return told

    await workers(house, 2, (3, LOST), engine=Telling)

    items = await read(await house.ask(request()))

    told = items[-1].completion_usage
    assert told is not None
    assert (told.prompt_tokens, told.completion_tokens, told.total_tokens, told.cached_tokens) == (3, 8, 11, 1)


@pytest.mark.parametrize("length", [1, 3])
async def test_wherever_workers_fail_the_answer_is_the_same(make_house: Callable[..., Any], length: int) -> None:
    house = make_house(deadlines=Deadlines(retries=5))
    await workers(house, 4)
    nothing, gap = LOST, StreamIncomplete("gap")

    for first, second, third in product(range(length + 2), repeat=3):
        Fragile.fates = [(first, nothing), (second, gap), (third, nothing)]
        items = await read(await house.ask(request(length)))

        told = items[-1].completion_usage
        assert tokens(items) == answer(length), (first, second, third)
        assert items[-1].finish_reason == "length"
        assert told is not None
        assert (told.prompt_tokens, told.completion_tokens) == (len(PROMPT), length)
        assert house.tracker.total_requests == 0


async def test_a_request_migrates_up_to_the_limit(house: Any) -> None:
    await workers(house, 4, (2, LOST), (2, LOST), (2, BackendError.EngineShutdown("the third")), limit=2)
    stream = await house.ask(request())

    seen = [await anext(stream)]
    stream.on_ready(lambda: seen.extend(stream.take()))
    await house.eventually(lambda: stream.ended)
    await asyncio.sleep(0)
    await stream.aclose()

    assert tokens(seen) == answer(6)
    assert isinstance(stream.error, EngineShutdown)
    assert str(stream.error) == "the third"
    assert len(asked()) == 3


class Several(Fragile):
    """Gives its tokens for a second choice."""

    def item(self, request: PreprocessedRequest, count: int) -> LLMEngineOutput:
        item = super().item(request, count)
        item.index = 1
        return item


class Deltas(Fragile):
    """Makes the message itself."""

    def item(self, request: PreprocessedRequest, count: int) -> LLMEngineOutput:
        return LLMEngineOutput(delta={"content": "x"})


@pytest.mark.parametrize(
    ("engine", "facts", "options"),
    [
        (Fragile, {}, {"guided_decoding": GuidedDecodingOptions(regex="a*")}),
        (Fragile, {"capabilities": frozenset({"multi_choice"})}, {"n": 2}),
        (Fragile, {}, {"use_beam_search": True}),
        (Fragile, {}, {"best_of": 2}),
        (Fragile, {"model_input": "text"}, {}),
        (Several, {}, {}),
        (Deltas, {}, {}),
    ],
)
async def test_requests_that_cannot_be_continued_do_not_migrate(
    house: Any,
    engine: type[Fragile],
    facts: dict[str, Any],
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    Fragile.facts = facts
    await workers(house, 2, (2, LOST), engine=engine)

    with pytest.raises(EngineShutdown, match="the engine is gone"):
        await read(await house.ask(request(sampling_options=SamplingOptions(**options))))

    assert len(asked()) == 1
    assert "stays broken" in caplog.text


async def test_requests_that_cannot_be_continued_are_still_retried_before_output(house: Any) -> None:
    Fragile.facts = {"model_input": "text"}
    await workers(house, 2, (0, LOST))

    assert tokens(await read(await house.ask(request()))) == answer(8)


async def test_an_answer_of_which_only_the_end_is_missing_is_ended(house: Any) -> None:
    await workers(house, 2, (8, LOST))

    items = await read(await house.ask(request()))

    assert tokens(items) == answer(8)
    assert items[-1].finish_reason == "length"
    assert items[-1].completion_usage == usage(len(PROMPT), 8)
    assert len(asked()) == 1


@pytest.mark.parametrize(
    ("conditions", "more", "reason"),
    [
        ({"stop_token_ids": [104]}, {}, "stop"),
        ({"stop_token_ids_hidden": [104]}, {}, "stop"),
        ({}, {"eos_token_ids": [104]}, "eos"),
        ({"min_tokens": 3}, {"eos_token_ids": [104]}, None),
        ({"ignore_eos": True}, {"eos_token_ids": [104]}, None),
    ],
)
async def test_migration_does_not_resume_an_answer_past_its_stop_token(
    house: Any, conditions: dict[str, Any], more: dict[str, Any], reason: str | None
) -> None:
    await workers(house, 2, (2, LOST))

    items = await read(await house.ask(request(conditions=conditions, **more)))

    assert items[-1].finish_reason == (reason or "length")
    assert tokens(items) == answer(2 if reason else 8)


async def test_an_answer_that_has_filled_the_context_is_ended(house: Any) -> None:
    Fragile.facts = {"context_length": len(PROMPT) + 4}
    await workers(house, 2, (4, LOST))

    items = await read(await house.ask(request(8)))

    assert (tokens(items), items[-1].finish_reason) == (answer(4), "length")


async def test_a_complete_answer_does_not_migrate(house: Any) -> None:
    class Careless(Fragile):
        async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
            self.asked.append(request)
            yield LLMEngineOutput.length().with_tokens(answer(8))
            raise LOST

    await workers(house, 2, engine=Careless)
    stream = await house.ask(request())

    with pytest.raises(DynamoError):
        await read(stream)

    assert len(asked()) == 1


@pytest.mark.parametrize(("most", "moves"), [(5, False), (6, True)])
async def test_a_long_answer_is_not_kept_for_moving(
    make_house: Callable[..., Any], most: int, moves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    house = make_house(deadlines=Deadlines(migration_max_seq_len=most))
    await workers(house, 2, (3, LOST))
    stream = await house.ask(request())
    seen: list[int] = []
    try:
        async for item in stream:
            seen += item.token_ids
    except EngineShutdown:
        assert not moves
    await stream.aclose()

    assert seen == answer(8 if moves else 3)
    # In the end the one that moved was too long to be moved again.
    assert metric(house, "max_seq_len_exceeded_total", model="m") == 1
    assert ("too long" in caplog.text) is not moves


# Waiting.


async def test_a_migration_waits_for_a_worker(house: Any) -> None:
    (only,) = await workers(house, 1, (3, LOST))
    stream = await house.ask(request())
    reading = asyncio.ensure_future(read(stream))
    await house.eventually(lambda: metric(house, "total") == 1)
    await only.stop(grace=False)
    await house.until(lambda: not house.models.list())

    await workers(house, 1)

    assert tokens(await reading) == answer(8)


async def test_workers_of_another_model_by_that_name_do_not_go_on(make_house: Callable[..., Any]) -> None:
    house = make_house(deadlines=Deadlines(migration_wait=0.2))
    (only,) = await workers(house, 1, (3, LOST))
    reading = asyncio.ensure_future(read(await house.ask(request())))
    await house.eventually(lambda: metric(house, "total") == 1)
    await only.stop(grace=False)
    await house.until(lambda: not house.models.list())
    Fragile.facts = {"context_length": 4096}

    await workers(house, 1)

    with pytest.raises(EngineShutdown, match="the engine is gone"):
        await reading
    assert len(asked()) == 1


@pytest.mark.parametrize("after", [0, 2])
async def test_a_migration_waits_for_busy_workers_without_a_refusal(house: Any, after: int) -> None:
    busy, reading = await lost_beside_a_busy_worker(house, after)

    await busy.aclose()

    assert tokens(await reading) == answer(8)


async def test_a_migration_wait_ends_with_the_original_error(make_house: Callable[..., Any]) -> None:
    house = make_house(deadlines=Deadlines(migration_wait=0.05))
    await workers(house, 1, (3, LOST))

    with pytest.raises(EngineShutdown, match="the engine is gone"):
        await read(await house.ask(request()))

    assert metric(house, "duration_seconds_count", outcome="failure", migration_type="ongoing_request") == 1


@pytest.mark.parametrize("how", ["stops", "leaves", "leaves twice", "runs out of time"])
async def test_a_client_that_gives_up_ends_the_migration_wait(make_house: Callable[..., Any], how: str) -> None:
    admission = Counting()
    total = 0.2 if how == "runs out of time" else 590
    house = make_house(admission=admission, deadlines=Deadlines(total=total))
    await workers(house, 1, (3, LOST))
    ctx = EngineContext("r")
    stream = await house.ask(request(), ctx=ctx)
    reading = asyncio.ensure_future(read(stream))
    await house.eventually(lambda: metric(house, "total") == 1)

    async with asyncio.timeout(30):
        if how == "runs out of time":
            with pytest.raises(DeadlineExceeded):
                await reading
        elif how == "stops":
            ctx.stop_generating()
            with pytest.raises(Cancelled):
                await reading
        else:
            reading.cancel()
            closing = [stream.aclose()] if how == "leaves twice" else []
            await asyncio.gather(reading, *closing, return_exceptions=True)

    assert house.tracker.total_requests == 0
    assert (admission.given, admission.back) == (1, [3])
    assert metric(house, "duration_seconds_count", outcome="cancelled") == 1
    assert len(house.pipeline._migrator.tasks) == 0


# Workers that hang, and workers that are down.


@pytest.mark.parametrize(
    ("fates", "limit"),
    [
        ([(0, "hangs")], 0),
        ([(0, "hangs")], 3),
        ([(3, "hangs")], 3),
        ([(3, LOST), (0, "hangs")], 3),
    ],
)
async def test_worker_that_hangs_is_replaced(
    make_house: Callable[..., Any], fates: list[tuple[int, Exception | str]], limit: int
) -> None:
    house = make_house(deadlines=Deadlines(stall=0.05))
    await workers(house, 3, *fates, limit=limit)

    async with asyncio.timeout(30):
        assert tokens(await read(await house.ask(request()))) == answer(8)
    await house.eventually(lambda: not any(engine.running for engine in Fragile.made))


async def test_a_worker_that_hangs_ends_the_answer_where_it_cannot_move(make_house: Callable[..., Any]) -> None:
    house = make_house(deadlines=Deadlines(stall=0.05))
    await workers(house, 2, (3, "hangs"), limit=0)

    with pytest.raises(ResponseTimeout, match=r"sent nothing for 0\.05 s"):
        await read(await house.ask(request()))

    assert (len(asked()), metric(house, "total")) == (1, 0)

    assert house.tracker.total_requests == 0
    assert not len(house.pipeline._timeouts.stall.timeouts)


async def test_a_request_that_freezes_its_engine_does_not_walk_through_the_fleet(
    make_house: Callable[..., Any],
) -> None:
    house = make_house(deadlines=Deadlines(stall=0.05, retries=2))
    await workers(house, 5, *[(0, "hangs")] * 5)

    with pytest.raises(Unavailable, match="no worker answered in time"):
        await read(await house.ask(request()))

    assert len(asked()) == 3


async def test_a_worker_that_hangs_is_found_while_the_answer_is_collected_whole(make_house: Callable[..., Any]) -> None:
    house = make_house(deadlines=Deadlines(stall=0.05))
    await workers(house, 2, (3, "hangs"))
    stream = await house.ask(request())
    ended = asyncio.Event()
    # As a reader does that wants the whole: what has arrived rests in the stream until much has, or all.
    stream.on_ready(lambda: ended.set() if stream.ended else None, coalesce=128)

    async with asyncio.timeout(30):
        await ended.wait()
    items = stream.take()
    await stream.aclose()

    assert tokens(list(items)) == answer(8)


async def test_workers_that_many_requests_lose_are_warned_of_once(house: Any, caplog: pytest.LogCaptureFixture) -> None:
    await workers(house, 2, *[(2, LOST)] * 6, limit=0)

    for _ in range(6):
        with pytest.raises(EngineShutdown):
            await read(await house.ask(request()))

    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    # Each of the two workers has told once, and the frontend once of each.
    assert len(warned) == len(set(warned)) == 4
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_reader_that_pauses_is_no_fault_of_the_worker(make_house: Callable[..., Any]) -> None:
    house = make_house(deadlines=Deadlines(stall=0.02))
    await workers(house, 2)
    stream = await house.ask(request(400))
    await anext(stream)
    stream.pause()
    looked = asyncio.Event()
    for _ in range(4):
        # As long as the alarms that look at the stream.
        looked.clear()
        house.pipeline._timeouts.stall.timeouts.set(looked.set)
        await looked.wait()
    stream.resume()

    assert tokens(await read(stream))[-1] == answer(400)[-1]
    assert len(asked()) == 1


async def test_a_worker_that_failed_is_passed_over_for_a_while(house: Any) -> None:
    await workers(house, 2, (3, LOST))
    await read(await house.ask(request()))
    first, second = Fragile.made

    for _ in range(4):
        await read(await house.ask(request()))

    assert (len(first.asked), len(second.asked)) == (1, 5)


# Two hops.


class Prefiller(Fragile):
    """Hands over."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        self.asked.append(request)
        self.attempts.append(ctx.attempt_id)
        end = LLMEngineOutput.length().with_tokens([0])
        end.disaggregated_params = {"prompt": len(request.token_ids)}
        yield end


class Decoder(Fragile):
    """Refuses what was not prefilled."""

    def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        assert request.prefill_result is not None
        assert request.prefill_result.disaggregated_params == {"prompt": len(request.token_ids)}
        return super().generate(request, ctx)


PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE


@pytest.mark.parametrize("after", [0, 3])
async def test_when_a_decode_worker_fails_both_hops_are_done_again(house: Any, after: int) -> None:
    await workers(house, 1, engine=Prefiller, disaggregation_mode=PREFILL)
    await workers(house, 2, engine=Decoder, disaggregation_mode=DECODE)
    await house.until(lambda: not house.model().missing_roles)
    Fragile.fates = [(after, LOST)]

    stream = await house.ask(request(), ctx=EngineContext("r"))
    items = await read(stream)

    prefiller, one, other = Fragile.made
    assert tokens(items) == answer(8)
    assert [each.token_ids for each in prefiller.asked] == [PROMPT, PROMPT + answer(after)]
    assert prefiller.attempts == ["r-p0", "r-p1"]
    assert (one.attempts, other.attempts) == (["r-0"], ["r-1"])
    assert other.asked[0].stop_conditions.max_tokens == 8 - after
    assert items[-1].completion_usage is not None
    assert (items[-1].completion_usage.prompt_tokens, items[-1].completion_usage.completion_tokens) == (3, 8)
    assert stream.prefill_instance_id in house.model().groups["prefill"].pool.instances


async def test_an_aggregated_worker_goes_on_for_a_decode_worker(house: Any) -> None:
    await workers(house, 1, engine=Prefiller, disaggregation_mode=PREFILL)
    await workers(house, 1, engine=Decoder, disaggregation_mode=DECODE)
    await house.until(lambda: not house.model().missing_roles)
    Fragile.fates = [(3, LOST)]
    stream = await house.ask(request())
    reading = asyncio.ensure_future(read(stream))
    await house.eventually(lambda: metric(house, "total") == 1)

    await workers(house, 1)

    assert tokens(await reading) == answer(8)
    assert Fragile.made[-1].asked[0].token_ids == PROMPT + answer(3)
    assert stream.prefill_instance_id is None


class Meeting(Prefiller):
    """Moves the cache itself, and fails while it does."""

    failures: ClassVar[int] = 0
    met: ClassVar[asyncio.Event]

    facts: ClassVar[dict[str, Any]] = {"bootstrap_host": "meet.here", "bootstrap_port": 4242}

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        self.asked.append(request)
        if Meeting.failures:
            Meeting.failures -= 1
            raise LOST
        Meeting.met.set()
        yield LLMEngineOutput.length().with_tokens([0])


class Receiving(Fragile):
    """Waits for a cache, which does not come if the prefill worker has failed."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        assert request.bootstrap_info is not None
        forget = ctx.on_stop(Meeting.met.set)
        await Meeting.met.wait()
        forget()
        async for item in super().generate(request, ctx):
            yield item


@pytest.mark.parametrize("failures", [1, 2, 3])
async def test_when_a_prefill_worker_fails_at_the_meeting_both_hops_are_done_again(
    house: Any, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meeting, "met", asyncio.Event(), raising=False)
    monkeypatch.setattr(Meeting, "failures", failures)
    await workers(house, 4, engine=Meeting, disaggregation_mode=PREFILL)
    await workers(house, 4, engine=Receiving, disaggregation_mode=DECODE)
    await house.until(lambda: not house.model().missing_roles)
    most = house.deadlines.retries + 1

    if failures < most:
        assert tokens(await read(await house.ask(request()))) == answer(8)
    else:
        with pytest.raises(Unavailable):
            await read(await house.ask(request()))

    prefills = [len(engine.asked) for engine in Fragile.made if isinstance(engine, Meeting)]
    assert sorted(prefills, reverse=True) == [1] * min(failures + 1, most) + [0] * (4 - min(failures + 1, most))
    await house.eventually(lambda: not any(engine.running for engine in Fragile.made))
