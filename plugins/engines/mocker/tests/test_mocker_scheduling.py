"""Who runs when: token budget, prefix cache, preemption, ranks, and what is told of it all."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, ClassVar

import pytest
from dynamo_core import (
    ActiveLoad,
    BackendError,
    DisaggregationMode,
    FinishReason,
    KvCleared,
    KvEvent,
    KvRemoved,
    KvStored,
    LLMEngineOutput,
    PrefillResult,
    PreprocessedRequest,
    RoutingHints,
    WorkerConfig,
)
from dynamo_plugin_engine_mocker.clock import VirtualClock
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.engine import MockerEngine
from dynamo_plugin_engine_mocker.handoff import Handoff
from dynamo_plugin_engine_mocker.sequence import MAX_BACKLOG
from dynamo_plugin_engine_mocker.sequence_factory import SequenceFactory
from dynamo_plugin_engine_mocker.timing import decode_ms, prefill_ms
from dynamo_telemetry import Metrics
from dynamo_text import ByteTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from plugins.engines.mocker.tests.conftest import ask, cached, context, read, running

ANSWERS = SequenceFactory(MockerConfig(), ByteTokenizer())


def expected(asked: PreprocessedRequest) -> list[int]:
    """Return the answer of an engine that has room for everything."""
    sequence = ANSWERS.sequence(asked)
    while not sequence.finished:
        sequence.produced = sequence.checkpoint
        sequence.on_checkpoint()
    return sequence.take().token_ids


async def times(
    clock: VirtualClock, engine: MockerEngine, *prompts: list[int], max_tokens: int = 1
) -> list[list[float]]:
    """Return the virtual milliseconds at which the tokens of requests that come together arrive."""
    start = clock.time()

    async def arrivals(prompt: list[int]) -> list[float]:
        stream = engine.generate(ask(prompt, max_tokens), context())
        return [(clock.time() - start) * 1000 async for _ in stream]

    return list(await asyncio.gather(*map(arrivals, prompts)))


async def test_cached_tokens_are_reported_with_the_first_item() -> None:
    async with running(block_size=16) as engine:
        await read(engine, ask([65] * 64, 1))
        first, *others = [item async for item in engine.generate(ask([65] * 64, 4), context())]

    assert first.finish_reason is None
    assert cached(first) == 48
    assert [item.completion_usage is not None for item in others] == [False, False, True]


async def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    clock = VirtualClock()
    async with running(clock=clock, max_num_batched_tokens=100) as engine:
        ((first,),) = await times(clock, engine, [65] * 250)

    assert first == pytest.approx(2 * prefill_ms(100) + prefill_ms(50))


async def test_a_chunk_of_the_next_prompt_fills_the_rest_of_the_budget() -> None:
    clock = VirtualClock()
    async with running(clock=clock, max_num_batched_tokens=100) as engine:
        (one,), (two,) = await times(clock, engine, [65] * 60, [66] * 60)

    assert one == pytest.approx(prefill_ms(100))
    assert two == pytest.approx(prefill_ms(100) + prefill_ms(20))


async def test_without_chunks_a_prompt_waits_for_a_step_with_room_for_the_whole() -> None:
    clock = VirtualClock()
    async with running(clock=clock, max_num_batched_tokens=100, enable_chunked_prefill=False) as engine:
        (one,), (two,), (three,) = await times(clock, engine, [65] * 60, [66] * 60, [67] * 40)

    assert one == pytest.approx(prefill_ms(60))
    assert two == three == pytest.approx(prefill_ms(60) + prefill_ms(100))


async def test_without_chunks_a_prompt_longer_than_any_step_is_computed_alone() -> None:
    clock = VirtualClock()
    async with running(clock=clock, max_num_batched_tokens=100, enable_chunked_prefill=False) as engine:
        (one,), (long,), (last,) = await times(clock, engine, [65] * 10, [66] * 250, [67] * 10)

    assert one == pytest.approx(prefill_ms(10))
    assert long == pytest.approx(one + prefill_ms(250))
    assert last == pytest.approx(long + prefill_ms(10))


async def test_decoding_requests_take_their_tokens_from_the_budget_first() -> None:
    clock = VirtualClock()
    async with running(clock=clock, max_num_batched_tokens=11, enable_prefix_caching=False) as engine:
        early = asyncio.ensure_future(times(clock, engine, [65], max_tokens=5))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

        ((late,),) = await times(clock, engine, [66] * 31)
        await early

    # The first request's own prompt; then 10, 10, 10 and 1 tokens beside its decoding.
    assert late == pytest.approx(2 * prefill_ms(1) + 3 * prefill_ms(10) + 4 * decode_ms(0), abs=0.01)


async def test_decoding_slows_down_with_the_tokens_in_the_cache_and_shared_blocks_count_once() -> None:
    clock = VirtualClock()
    async with running(clock=clock, block_size=4, num_gpu_blocks=20) as engine:
        one, two = await times(clock, engine, [65] * 12, [65] * 12, max_tokens=10)

    assert one == two
    lengths = range(13, 22)
    shared = [(length - 1) // 4 * 4 for length in lengths]
    held = [full + 2 * (length - full) for length, full in zip(lengths, shared, strict=True)]
    gaps = [after - before for before, after in itertools.pairwise(one)]
    assert gaps == pytest.approx([decode_ms(tokens / 80) for tokens in held])


async def test_cached_tokens_are_not_computed_and_are_in_the_usage() -> None:
    clock = VirtualClock()
    prompt = [*range(200)]
    async with running(clock=clock, block_size=16) as engine:
        first = await read(engine, ask(prompt))
        ((time,),) = await times(clock, engine, prompt)
        again = await read(engine, ask([*prompt, 1, 2]))
        fork = await read(engine, ask([*prompt[:100], 1, *prompt[101:]]))

    assert [cached(item) for item in (first, again, fork)] == [0, 192, 96]
    assert time == pytest.approx(prefill_ms(8))


@pytest.mark.parametrize(("size", "found"), [(4, 12), (1, 13)])
async def test_blocks_of_an_answer_are_found_by_a_prompt_that_goes_on_from_it(size: int, found: int) -> None:
    async with running(block_size=size) as engine:
        first = await read(engine, ask([65, 66], 12))

        second = await read(engine, ask([65, 66, *first.token_ids, 67, 68], 1))

    # The last token of an answer is never computed.
    assert cached(second) == found


async def test_without_prefix_caching_nothing_is_found_again() -> None:
    async with running(block_size=4, enable_prefix_caching=False) as engine:
        await read(engine, ask([*range(40)]))

        again = await read(engine, ask([*range(40)]))

        assert cached(again) == 0
        assert await engine.kv_event_sources() == []


async def test_prompts_under_different_adapters_share_nothing() -> None:
    async with running(block_size=4) as engine:
        plain, adapted = ask([*range(40)]), ask([*range(40)])
        adapted.routing = RoutingHints(lora_name="a")

        items = [await read(engine, asked) for asked in (plain, adapted, adapted)]

    assert [cached(item) for item in items] == [0, 0, 36]


async def test_requests_wait_until_there_are_blocks_for_their_prompt() -> None:
    clock = VirtualClock()
    async with running(clock=clock, block_size=4, num_gpu_blocks=6, fixed_itl_ms=1) as engine:
        one, two = await times(clock, engine, [65] * 14, [66] * 14, max_tokens=2)

    # The second needs four blocks; only two are left until the first has ended.
    assert one == pytest.approx([1, 2])
    assert two == pytest.approx([3, 4])


@pytest.mark.parametrize(("mode", "order"), [("lifo", ["old", "new"]), ("fifo", ["new", "old"])])
async def test_a_request_preempted_for_blocks_ends_last_and_loses_nothing(mode: str, order: list[str]) -> None:
    ended: list[str] = []
    metrics = Metrics()

    async def run(name: str, asked: PreprocessedRequest) -> None:
        item = await read(engine, asked)
        ended.append(name)
        assert item.token_ids == expected(asked)
        assert item.finish_reason is FinishReason.LENGTH
        # What is found again after giving way is its own, not a predecessor's.
        assert cached(item) == 0

    async with running(block_size=4, num_gpu_blocks=8, preemption_mode=mode) as engine:
        await engine.setup_metrics(metrics)
        await asyncio.gather(run("old", ask([65] * 8, 20)), run("new", ask([66] * 8, 20)))

        assert engine.loads[0].kv_used_blocks == 0
    assert ended == order
    assert metrics.registry.get_sample_value("dynamo_mocker_preemptions", {"dp_rank": "0"}) == 1


async def test_preempted_requests_run_before_new_ones() -> None:
    ended: list[int] = []

    async def run(number: int, tokens: int) -> None:
        await read(engine, ask([65 + number] * 8, tokens))
        ended.append(number)

    async with running(block_size=4, num_gpu_blocks=8, max_num_seqs=2) as engine:
        await asyncio.gather(run(0, 20), run(1, 20), run(2, 1))

    # There is room for the short one when the second has given way, but it is not its turn until the first has ended.
    assert ended == [0, 2, 1]


async def test_a_paused_request_is_preempted_and_resumes_when_read() -> None:
    async with running(
        speedup_ratio=0, block_size=64, num_gpu_blocks=34, preemption_mode="fifo", context_length=4096
    ) as engine:
        asked = ask([65] * 64, 1800)
        stream = engine.generate(asked, context())
        items = [await anext(stream)]
        for _ in range(MAX_BACKLOG + 10):
            await asyncio.sleep(0)
        assert engine.loads[0].kv_used_blocks == 1 + MAX_BACKLOG // 64 + 1

        other = await read(engine, ask([66] * 64, 1500))
        items += [item async for item in stream]

        assert len(other.token_ids) == 1500
        assert [token for item in items for token in item.token_ids] == expected(asked)


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_prompt_that_can_never_fit_is_refused_and_the_longest_that_fits_is_answered(chunked: bool) -> None:
    async with running(block_size=4, num_gpu_blocks=5, enable_chunked_prefill=chunked) as engine:
        with pytest.raises(BackendError.InvalidArgument, match="needs 6 KV blocks of 4 tokens, more than the 5"):
            await read(engine, ask([65] * 21))

        assert len((await read(engine, ask([65] * 20, 10))).token_ids) == 1
        item = await read(engine, ask([66] * 3, 500))

    assert (len(item.token_ids), item.finish_reason) == (18, FinishReason.LENGTH)


@pytest.mark.parametrize("bad", [-1, 2**32])
async def test_a_token_id_of_more_than_32_bits_is_refused(bad: int) -> None:
    async with running() as engine:
        with pytest.raises(BackendError.InvalidArgument, match="token_ids"):
            await read(engine, ask([bad]))


async def test_a_request_runs_on_the_rank_it_names_or_where_the_fewest_are() -> None:
    clock = VirtualClock()
    async with running(clock=clock, data_parallel_size=3) as engine:
        clock.pause()
        ranks = [1, None, None, None, 2, None]
        tasks = [asyncio.ensure_future(read(engine, ask([65] * 10, dp_rank=rank))) for rank in ranks]
        await asyncio.sleep(0)

        loads = [load.active_prefill_tokens for load in engine.loads]
        clock.resume()
        items = await asyncio.gather(*tasks)

    assert loads == [20, 20, 20]
    assert [item.token_ids for item in items] == [items[0].token_ids] * 6


@pytest.mark.parametrize("rank", [-1, 2])
async def test_a_rank_that_is_not_there_is_refused(rank: int) -> None:
    async with running(data_parallel_size=2) as engine:
        with pytest.raises(BackendError.InvalidArgument, match=r"routing\.dp_rank is .*0 to 1"):
            await read(engine, ask([65], dp_rank=rank))


async def test_ranks_keep_their_own_caches_clocks_and_event_numbers() -> None:
    clock = VirtualClock()
    events: dict[int, list[KvEvent]] = {0: [], 1: []}
    async with running(clock=clock, data_parallel_size=2, block_size=4) as engine:
        for source in await engine.kv_event_sources():
            source.subscribe(events[source.dp_rank].append)
        prompt = [*range(12)]

        items = [await read(engine, ask(prompt, 1, dp_rank=rank)) for rank in (0, 1, 0)]
        await read(engine, ask([9, *prompt], 1, dp_rank=1))

    assert [cached(item) for item in items] == [0, 0, 8]
    assert [[event.event_id for event in told] for told in events.values()] == [[0, 1], [0, 1, 2]]
    assert all(event.dp_rank == rank for rank, told in events.items() for event in told)
    assert [type(event.data) for event in events[1]] == [KvStored, KvStored, KvCleared]


async def test_load_changes_are_published_down_to_zero() -> None:
    loads: list[ActiveLoad] = []
    async with running(block_size=4, max_num_batched_tokens=8) as engine:
        (source,) = await engine.load_sources()
        source.subscribe(loads.append)

        await read(engine, ask([65] * 16, 4))

    assert loads[0] == loads[-1] == ActiveLoad(7, 0, 0, 0, 0)
    # Waiting; admitted; half computed; computed, with one block more for the answer.
    assert [(load.kv_used_blocks, load.active_prefill_tokens) for load in loads[1:5]] == [
        (0, 16),
        (4, 16),
        (4, 8),
        (5, 0),
    ]


async def test_the_metrics_count_computed_and_cached_tokens_and_blocks() -> None:
    metrics = Metrics()
    async with running(block_size=4, data_parallel_size=2) as engine:
        await engine.setup_metrics(metrics)
        for _ in range(2):
            await read(engine, ask([*range(18)], 1, dp_rank=1))

        def value(name: str) -> float | None:
            return metrics.registry.get_sample_value(f"dynamo_mocker_{name}", {"dp_rank": "1"})

        assert value("computed_prompt_tokens") == 18 + 2
        assert value("cached_prompt_tokens") == 16
        assert (value("kv_used_blocks"), value("kv_cached_blocks")) == (0, 4)
        assert value("preemptions") == 0


CONFIGS: list[dict[str, Any]] = [
    {"block_size": 4, "num_gpu_blocks": 9, "max_num_seqs": 4, "max_num_batched_tokens": 12},
    {
        "block_size": 4,
        "num_gpu_blocks": 9,
        "max_num_seqs": 4,
        "preemption_mode": "fifo",
        "enable_chunked_prefill": False,
    },
    {"block_size": 1, "num_gpu_blocks": 40, "max_num_seqs": 3, "max_num_batched_tokens": 5, "preemption_mode": "fifo"},
    {"block_size": 3, "num_gpu_blocks": 12, "max_num_batched_tokens": 7, "enable_chunked_prefill": False},
    {"block_size": 4, "num_gpu_blocks": 9, "enable_prefix_caching": False},
    {"block_size": 4, "num_gpu_blocks": 9, "data_parallel_size": 2, "max_num_batched_tokens": 2},
]


@settings(deadline=None)
@given(
    keys=st.sampled_from(CONFIGS),
    asked=st.lists(
        st.builds(
            lambda family, length, tokens, seed: ask([65 + family] * length, tokens, seed=seed),
            st.integers(0, 1),
            st.integers(1, 20),
            st.integers(1, 16),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_answers_are_the_same_with_and_without_room(keys: dict[str, Any], asked: list[PreprocessedRequest]) -> None:
    async def run() -> None:
        async with running(**keys) as engine:
            items = await asyncio.gather(*(read(engine, request) for request in asked))
            assert [item.token_ids for item in items] == [expected(request) for request in asked]
            assert all(load.kv_used_blocks == load.active_prefill_tokens == 0 for load in engine.loads)
            assert (engine.running_requests, engine.waiting_requests) == (0, 0)

    asyncio.run(run())


class Reader:
    """A client of the machine below: its request, how far it reads, and what it got."""

    def __init__(self, engine: MockerEngine, asked: PreprocessedRequest, most: int | None) -> None:
        self.expected = expected(asked)[:most]
        self.ctx = context()
        self.items: list[LLMEngineOutput] = []
        self.gate = asyncio.Event()
        self.task = asyncio.ensure_future(self._read(engine, asked))

    async def _read(self, engine: MockerEngine, asked: PreprocessedRequest) -> None:
        async for item in engine.generate(asked, self.ctx):
            self.items.append(item)
            await self.gate.wait()

    def check(self) -> None:
        tokens = [token for item in self.items for token in item.token_ids]
        reasons = [item.finish_reason for item in self.items]
        assert tokens == self.expected[: len(tokens)]
        assert all(reason is None for reason in reasons[:-1])
        if self.task.done() and not self.task.cancelled():
            self.task.result()
            # A stop may come when the last token is already there.
            assert reasons[-1] is FinishReason.LENGTH or self.ctx.is_stopped()
            assert reasons[-1] is FinishReason.CANCELLED or tokens == self.expected


class EngineMachine(RuleBasedStateMachine):
    """Clients come, read or dawdle, stop or vanish, at any moment, while KV blocks are short; in every role."""

    readers = Bundle("readers")
    role: ClassVar[DisaggregationMode] = DisaggregationMode.AGGREGATED

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = VirtualClock()
        self.engine = MockerEngine(
            # The KV cache of a prompt is on its way for less than a step, or for a few.
            MockerConfig(
                block_size=4, num_gpu_blocks=9, max_num_seqs=3, max_num_batched_tokens=10, kv_transfer_bandwidth=0.1
            ),
            WorkerConfig(disaggregation_mode=self.role),
            clock=self.clock,
        )
        self.known: dict[int, int | None] = {}
        self.numbers = 0
        self.all: list[Reader] = []
        self.runner.run(self._start())

    async def _start(self) -> None:
        await self.engine.start(1)
        sources = await self.engine.kv_event_sources()
        assert len(sources) == (self.role is not DisaggregationMode.DECODE)
        for source in sources:
            source.subscribe(self._follow)

    def _follow(self, event: KvEvent) -> None:
        assert event.event_id == self.numbers
        self.numbers += 1
        match event.data:
            case KvStored(blocks, parent):
                for block in blocks:
                    assert parent is None or parent in self.known
                    assert block.block_hash not in self.known
                    self.known[block.block_hash] = parent
                    parent = block.block_hash
            case KvRemoved(hashes):
                for block_hash in hashes:
                    del self.known[block_hash]
                    assert block_hash not in self.known.values()

    async def _turns(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    @rule(
        target=readers,
        family=st.integers(0, 1),
        length=st.integers(1, 24),
        tokens=st.integers(1, 30),
        slow=st.booleans(),
    )
    def come(self, family: int, length: int, tokens: int, slow: bool) -> Reader:
        async def begin() -> Reader:
            asked = ask([65 + family] * length, min(tokens, 37 - length))
            if self.role is DisaggregationMode.DECODE:
                asked.prefill_result = PrefillResult(disaggregated_params=Handoff.of(asked, "r", 0).params())
            reader = Reader(self.engine, asked, 1 if self.role is DisaggregationMode.PREFILL else None)
            if not slow:
                reader.gate.set()
            return reader

        reader = self.runner.run(begin())
        self.all.append(reader)
        return reader

    @rule(count=st.integers(1, 12))
    def go_on(self, count: int) -> None:
        self.runner.run(self._turns(count))

    @rule(reader=readers)
    def stop(self, reader: Reader) -> None:
        async def stop() -> None:
            reader.ctx.stop_generating()

        if not reader.task.done() and not any(item.finish_reason for item in reader.items):
            self.runner.run(stop())

    @rule(reader=readers)
    def vanish(self, reader: Reader) -> None:
        async def vanish() -> None:
            reader.task.cancel()
            await asyncio.wait([reader.task])

        if not reader.task.done():
            self.runner.run(vanish())

    @rule(reader=readers)
    def wake(self, reader: Reader) -> None:
        async def wake() -> None:
            reader.gate.set()

        self.runner.run(wake())

    @invariant()
    def capacity_is_kept(self) -> None:
        (load,) = self.engine.loads
        assert load.kv_used_blocks is not None
        assert load.active_prefill_tokens is not None
        assert load.active_prefill_tokens >= 0
        assert 0 <= load.kv_used_blocks <= 9
        assert len(self.known) <= 9
        assert 0 <= self.engine.running_requests <= 3
        for reader in self.all:
            reader.check()

    def teardown(self) -> None:
        async def end() -> None:
            for reader in self.all:
                reader.gate.set()
            tasks = [reader.task for reader in self.all]
            if tasks:
                _, pending = await asyncio.wait(tasks, timeout=10)
                assert not pending, "a request never ended"
            assert self.engine.loads == [ActiveLoad(1, 0, 0, 0, 0)]
            assert (self.engine.running_requests, self.engine.waiting_requests) == (0, 0)
            await self.engine.cleanup()
            assert asyncio.all_tasks() == {asyncio.current_task()}

        self.runner.run(end())
        self.runner.close()
        for reader in self.all:
            reader.check()


class PrefillMachine(EngineMachine):
    """The same for prompts alone."""

    role = DisaggregationMode.PREFILL


class DecodeMachine(EngineMachine):
    """The same for answers to prompts that come from elsewhere."""

    role = DisaggregationMode.DECODE


TestEngineMachine = EngineMachine.TestCase
TestPrefillMachine = PrefillMachine.TestCase
TestDecodeMachine = DecodeMachine.TestCase
TestEngineMachine.settings = settings(stateful_step_count=40, deadline=None)
TestPrefillMachine.settings = TestDecodeMachine.settings = TestEngineMachine.settings
