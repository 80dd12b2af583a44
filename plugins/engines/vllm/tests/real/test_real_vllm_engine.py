"""One real engine: what is asked of it is what it does."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from dynamo_core import (
    ActiveLoad,
    BackendError,
    FinishReason,
    GuidedDecodingOptions,
    KvBlock,
    KvCleared,
    KvEvent,
    KvRemoved,
    KvStored,
    LLMEngineOutput,
    OutputOptions,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
    TaskSet,
)
from dynamo_core.kv import block_hashes
from dynamo_plugin_engine_vllm.engine import VllmEngine
from dynamo_plugin_engine_vllm.events import EventTranslator
from dynamo_plugin_engine_vllm.subscription import EventSequencer, follow
from dynamo_testing import mock_context
from tokenizers import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 32
BLOCKS = range(1, 10_000)
PROMPT = [10 + position % 900 for position in range(70)]


class Running:
    """The engine, and everything that it has told."""

    def __init__(self, engine: VllmEngine, ask: Callable[..., Any]) -> None:
        self.engine = engine
        self._sampling_params = ask
        self.events: list[KvEvent] = []
        self.loads: list[ActiveLoad] = []

    async def ask(self, prompt: list[int] = PROMPT, limit: int | None = 8, **fields: Any) -> list[LLMEngineOutput]:
        stop = fields.pop("stop", None) or StopConditions(max_tokens=limit, ignore_eos=True)
        sampling = fields.pop("sampling", None) or SamplingOptions(temperature=0.0)
        request = PreprocessedRequest(token_ids=prompt, stop_conditions=stop, sampling_options=sampling, **fields)
        items: list[LLMEngineOutput] = await self._sampling_params(self.engine, request)
        return items

    async def tokens(self, prompt: list[int] = PROMPT, limit: int | None = 8, **fields: Any) -> list[int]:
        return joined(await self.ask(prompt, limit, **fields))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - what vLLM tells by itself has no event
                await asyncio.sleep(0.01)


def joined(items: list[LLMEngineOutput]) -> list[int]:
    return [token for item in items for token in item.token_ids]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(make_engine: Callable[..., VllmEngine], ask: Callable[..., Any]) -> AsyncIterator[Running]:
    engine = make_engine()
    try:
        config = await engine.start(77)
        assert config.model == "tiny"
        assert (config.context_length, config.kv_cache_block_size, config.max_num_seqs) == (2048, BLOCK, 16)
        assert config.total_kv_blocks in BLOCKS
        assert config.capabilities == {"guided", "multi_choice", "progress"}
        running = Running(engine, ask)
        [source] = await engine.kv_event_sources()
        source.subscribe(running.events.append)
        [load] = await engine.load_sources()
        load.subscribe(running.loads.append)
        yield running
    finally:
        await engine.cleanup()


async def test_greedy_answers_repeat_with_cached_tokens_reported(running: Running) -> None:
    first = await running.ask()
    second = await running.ask()

    assert joined(first) == joined(second)
    assert len(joined(first)) == 8
    assert first[-1].finish_reason is FinishReason.LENGTH
    told = [items[-1].completion_usage for items in (first, second)]
    assert [(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) for usage in told if usage] == [
        (70, 8, 0),
        (70, 8, 64),
    ]


async def test_stored_blocks_have_the_hashes_of_routers(running: Running) -> None:
    prompt = [(7 * position) % 1000 for position in range(100)]
    known = len(running.events)

    await running.ask(prompt)
    await running.until(lambda: len(running.events) > known)

    own = block_hashes(prompt, BLOCK)
    blocks = [
        block for event in running.events[known:] if isinstance(event.data, KvStored) for block in event.data.blocks
    ]
    assert [block.tokens_hash for block in blocks][:3] == own
    assert all(isinstance(block, KvBlock) for block in blocks)
    assert [event.event_id for event in running.events] == list(range(len(running.events)))


async def test_another_salt_shares_no_blocks_and_is_hashed_apart(running: Running) -> None:
    prompt = [(3 * position) % 1000 for position in range(64)]
    await running.ask(prompt)
    known = len(running.events)

    salted = await running.ask(prompt, routing=RoutingHints(cache_salt="tenant"))
    await running.until(lambda: len(running.events) > known)

    assert salted[-1].completion_usage is not None
    assert salted[-1].completion_usage.cached_tokens == 0
    data = running.events[known].data
    assert isinstance(data, KvStored)
    assert [block.tokens_hash for block in data.blocks][:2] == block_hashes(prompt, BLOCK, cache_salt="tenant")


class Forgetful(EventSequencer):
    """Does not get some batches the first time that they come; one at a time, for a replay brings others too."""

    def __init__(self, tell: Callable[[KvEvent], None]) -> None:
        super().__init__(0, EventTranslator(BLOCK), tell)
        self.missed: set[int] = set()

    def batch(self, sequence: int, payload: bytes) -> None:
        if sequence in self.missed:
            self.missed.remove(sequence)
        else:
            super().batch(sequence, payload)


async def test_a_reader_that_came_late_and_missed_batches_fetches_them(running: Running) -> None:
    vllm: Any = running.engine._engine
    where = vllm.get_kv_event_sources()[0]
    events: list[KvEvent] = []
    sequencer = Forgetful(events.append)
    tasks = TaskSet()
    following = follow(running.engine._require_library().zmq, where.endpoint, where.replay_endpoint, sequencer)
    await running.ask([5] * 40)
    tasks.spawn(following, name="a second reader")
    try:
        await running.until(lambda: len(events) == len(running.events) > 0)
        sequencer.missed = {sequencer.expected + 1}
        for number in range(6):
            await running.ask([number + 1] * 40)
        await running.until(lambda: not sequencer.missed and len(events) == len(running.events))
        assert [event.data for event in events] == [event.data for event in running.events]
    finally:
        await tasks.aclose()


async def test_evicted_blocks_are_reported_exactly_once(running: Running) -> None:
    for number in range(8):
        await running.ask([number + 100] * 1800, limit=1)
    await running.until(lambda: any(isinstance(event.data, KvRemoved) for event in running.events))

    held: set[int] = set()
    for event in running.events:
        if isinstance(event.data, KvStored):
            held |= {block.block_hash for block in event.data.blocks}
        elif isinstance(event.data, KvRemoved):
            assert held.issuperset(event.data.block_hashes)
            held -= set(event.data.block_hashes)
        else:
            assert isinstance(event.data, KvCleared)


@pytest.mark.parametrize("phase", ["at once", "after the first token", "closed", "cancelled"])
async def test_a_closed_request_frees_its_blocks(running: Running, phase: str) -> None:
    ctx = mock_context()
    stop = StopConditions(max_tokens=1900, ignore_eos=True)
    request = PreprocessedRequest(token_ids=PROMPT, stop_conditions=stop)
    stream: Any = running.engine.generate(request, ctx)

    async def read() -> list[LLMEngineOutput]:
        return [item async for item in stream]

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    if phase == "at once":
        ctx.stop_generating()
        assert (await reader)[-1].finish_reason is FinishReason.CANCELLED
    else:
        await running.until(lambda: bool(running.loads) and (running.loads[-1].kv_used_blocks or 0) > 3)
        if phase == "after the first token":
            ctx.stop_generating()
            items = await reader
            assert items[-1].finish_reason is FinishReason.CANCELLED
            assert 0 < len(joined(items)) < 1900
        else:
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
    await stream.aclose()

    await running.until(lambda: running.loads[-1].kv_used_blocks == 0)
    vllm: Any = running.engine._engine
    assert vllm.get_num_unfinished_requests() == 0
    # All of them are free for a request that needs nearly all.
    assert len(await running.tokens([5] * 10, limit=1500)) == 1500


async def test_a_stop_id_ends_the_answer_and_is_named(running: Running) -> None:
    tokens = await running.tokens()
    stop = StopConditions(max_tokens=8, stop_token_ids=[tokens[3]])

    items = await running.ask(stop=stop)

    assert joined(items) == tokens[:4]
    assert (items[-1].finish_reason, items[-1].stop_reason) == (FinishReason.STOP, tokens[3])


async def test_an_end_of_sequence_id_of_the_request_ends_it_too_but_not_before_the_least_length(
    running: Running,
) -> None:
    tokens = await running.tokens()

    ended = await running.ask(stop=StopConditions(max_tokens=8), eos_token_ids=[tokens[2]])
    longer = await running.ask(stop=StopConditions(max_tokens=8, min_tokens=5), eos_token_ids=[tokens[2]])

    assert ended[-1].finish_reason is FinishReason.EOS
    assert joined(ended) == tokens[:3]
    assert len(joined(longer)) >= 5


async def test_without_a_limit_the_context_is_the_limit(running: Running) -> None:
    items = await running.ask([7] * 2000, stop=StopConditions(ignore_eos=True))

    assert len(joined(items)) == 48
    assert items[-1].finish_reason is FinishReason.LENGTH


async def test_log_probabilities_belong_to_the_tokens(running: Running) -> None:
    items = await running.ask(output_options=OutputOptions(logprobs=3))

    tops = [top for item in items for top in item.top_logprobs or []]
    scores = [score for item in items for score in item.log_probs or []]
    tokens = joined(items)
    assert len(tops) == len(scores) == len(tokens) == 8
    for token, score, top in zip(tokens, scores, tops, strict=True):
        assert [entry.rank for entry in top] == [1, 2, 3]
        # Greedy: the likeliest was chosen.
        assert (top[0].token_id, top[0].logprob) == (token, score)
    assert items[-1].cum_log_probs == pytest.approx(sum(scores), abs=1e-3)


async def test_a_seed_repeats_a_sampled_answer(running: Running) -> None:
    def sampled(seed: int) -> Any:
        return running.tokens(sampling=SamplingOptions(temperature=1.5, top_p=0.95, seed=seed), limit=16)

    assert await sampled(1) == await sampled(1) != await sampled(2)


async def test_allowed_biased_and_bad_tokens(running: Running) -> None:
    def greedy(**options: Any) -> Any:
        return running.tokens(sampling=SamplingOptions(temperature=0.0, **options))

    first = (await running.tokens())[0]
    assert set(await greedy(allowed_token_ids=[20, 21])) <= {20, 21}
    assert set(await greedy(logit_bias={"33": 100.0})) == {33}
    assert first not in await greedy(bad_words_token_ids=[[first]])


async def test_several_choices_of_one_request(running: Running) -> None:
    items = await running.ask(sampling=SamplingOptions(temperature=1.2, n=3, seed=5))

    by_choice = {number: joined([item for item in items if item.index == number]) for number in range(3)}
    assert [len(tokens) for tokens in by_choice.values()] == [8, 8, 8]
    assert by_choice[0] != by_choice[1]
    assert sum(item.finish_reason is not None for item in items) == 3


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("guide", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"grammar": 'root ::= "a" ("b" | "c")'}, "ab|ac"),
        ({"json": SCHEMA}, None),
        ({"json": json.dumps(SCHEMA)}, None),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_guide_is_obeyed(
    running: Running, model: Path, guide: dict[str, Any], pattern: str | None, temperature: float
) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ends = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    sampling = SamplingOptions(temperature=temperature, seed=3, guided_decoding=GuidedDecodingOptions(**guide))
    stop = StopConditions(max_tokens=200, stop_token_ids_hidden=ends)

    items = await running.ask(sampling=sampling, stop=stop, eos_token_ids=ends)

    text = tokenizer.decode([token for token in joined(items) if token not in ends])
    assert items[-1].finish_reason is FinishReason.EOS
    if pattern is not None:
        assert re.fullmatch(pattern, text), text
    else:
        made = json.loads(text)
        assert set(made) == {"name", "size"}
        assert made["size"] in (1, 2, 3)


@pytest.mark.parametrize(
    ("prompt", "fields", "named"),
    [
        ([], {}, "token_ids"),
        ([7] * 2048, {}, "2048"),
        ([5000], {}, "vocab"),
        ([1], {"sampling": SamplingOptions(temperature=-1.0)}, "temperature"),
        ([1], {"sampling": SamplingOptions(top_p=3.0)}, "top_p"),
        ([1], {"sampling": SamplingOptions(logit_bias={"99999": 1.0})}, "99999|logit_bias|vocab"),
        ([1], {"sampling": SamplingOptions(guided_decoding=GuidedDecodingOptions(regex="("))}, "."),
        ([1], {"sampling": SamplingOptions(guided_decoding=GuidedDecodingOptions(grammar="root ::= )"))}, "."),
        ([1], {"output_options": OutputOptions(logprobs=500)}, "logprobs"),
        ([1], {"routing": RoutingHints(dp_rank=1)}, "dp_rank"),
        ([1], {"routing": RoutingHints(lora_name="x")}, "LoRA"),
    ],
)
async def test_unsupported_requests_are_invalid_arguments(
    running: Running, prompt: list[int], fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(BackendError.InvalidArgument, match=named):
        await running.ask(prompt, **fields)

    assert len(await running.tokens()) == 8


async def test_an_urgent_request_overtakes_those_that_wait(running: Running) -> None:
    ended: list[int] = []

    async def one(number: int, priority: int) -> None:
        await running.ask([number + 300] * 5, limit=60, routing=RoutingHints(priority=priority))
        ended.append(number)

    # Twice as many as run at once; the last is the most urgent.
    jobs = [one(number, 0) for number in range(32)] + [one(32, 5)]
    await asyncio.gather(*jobs)

    assert ended.index(32) < 31


async def test_vllms_own_metrics_and_those_of_the_ranks_are_shown(running: Running) -> None:
    from dynamo_telemetry import Metrics

    metrics = Metrics()
    await running.engine.setup_metrics(metrics.scope(worker="w-0"))
    await running.ask()
    text = metrics.render_now().decode()

    assert "vllm:num_requests_running" in text
    assert re.search(r'dynamo_vllm_prefix_hit_tokens\{.*dp_rank="0".*\} [1-9]', text)
