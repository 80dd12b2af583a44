"""The halves of an answer: prefill workers, decode workers, and how they meet."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
from dynamo_core import (
    EMBED,
    ActiveLoad,
    BackendError,
    BootstrapInfo,
    DisaggregationMode,
    EngineContext,
    FinishReason,
    GenerateContext,
    KvEvent,
    KvStored,
    OutputOptions,
    PrefillResult,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
    WorkerConfig,
)
from dynamo_plugin_engine_mocker import bootstrap_rooms
from dynamo_plugin_engine_mocker.bootstrap_rooms import BootstrapRooms
from dynamo_plugin_engine_mocker.clock import VirtualClock
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.engine import MockerEngine
from dynamo_plugin_engine_mocker.timing import decode_ms, prefill_ms
from dynamo_telemetry import Metrics
from dynamo_testing.waiting import turns
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from plugins.engines.mocker.tests.conftest import ask, cached, context, read, running

AGGREGATED, PREFILL, DECODE = DisaggregationMode
ADDRESS = ("prefill.example", 8998)
#: Seconds per token that make transfers easy to tell from steps.
SLOW: dict[str, Any] = {"kv_transfer_bandwidth": 1.0, "kv_bytes_per_token": 10**7}


def make(mode: DisaggregationMode, *, replica: int = 0, clock: VirtualClock | None = None, **keys: Any) -> MockerEngine:
    worker = WorkerConfig(disaggregation_mode=mode, replica=replica)
    return MockerEngine(MockerConfig(**keys), worker, clock=clock or VirtualClock())


def on_the_wire(asked: PreprocessedRequest) -> PreprocessedRequest:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=PreprocessedRequest)


async def hop(prefill: MockerEngine, asked: PreprocessedRequest) -> PreprocessedRequest:
    """Return the request as a decode worker gets it."""
    first = on_the_wire(asked)
    first.stop_conditions.max_tokens = 1
    item = await read(prefill, first)
    second = on_the_wire(asked)
    second.prefill_result = PrefillResult(disaggregated_params=item.disaggregated_params)
    return on_the_wire(second)


async def handed(asked: PreprocessedRequest) -> PreprocessedRequest:
    async with running(PREFILL) as prefill:
        return await hop(prefill, asked)


def in_room(asked: PreprocessedRequest, room: int = 1, address: tuple[str, int] = ADDRESS) -> PreprocessedRequest:
    copy = on_the_wire(asked)
    host, port = address
    copy.bootstrap_info = BootstrapInfo(bootstrap_host=host, bootstrap_port=port, bootstrap_room=room)
    return copy


NOTHING = ActiveLoad(7, 0, 0, 0, 0)


@pytest.mark.parametrize("max_tokens", [None, 1, 50])
async def test_a_prefill_worker_generates_one_token_and_hands_over(max_tokens: int | None) -> None:
    asked = ask([*range(40, 64)], max_tokens)
    async with running(AGGREGATED) as engine:
        whole = await read(engine, asked)
    async with running(PREFILL, data_parallel_size=2) as engine:
        asked.routing = RoutingHints(dp_rank=1)
        items = [item async for item in engine.generate(asked, GenerateContext(EngineContext("r", attempt_id="r-1")))]

    (item,) = items
    assert item.token_ids == whole.token_ids[:1]
    assert item.finish_reason is FinishReason.LENGTH
    params = item.disaggregated_params
    assert params | {"prompt_hash": ""} == {
        "kv_transfer_id": "r-1",
        "prompt_tokens": 24,
        "prompt_hash": "",
        "dp_rank": 1,
    }
    assert len(params["prompt_hash"]) == 16
    assert msgspec.json.decode(msgspec.json.encode(params)) == params


async def test_a_prefill_worker_has_the_prefix_cache_the_events_and_the_timing_of_any_prompt() -> None:
    clock = VirtualClock()
    told: list[KvEvent] = []
    async with running(PREFILL, clock=clock, block_size=4) as engine:
        (source,) = await engine.kv_event_sources()
        source.subscribe(told.append)
        first = await read(engine, ask([*range(40)]))
        before = clock.time()
        again = await read(engine, ask([*range(40)]))

        assert clock.time() - before == pytest.approx(prefill_ms(4) / 1000)
        assert engine.loads == [NOTHING]
    assert [cached(item) for item in (first, again)] == [0, 36]
    stored = told[0].data
    assert isinstance(stored, KvStored)
    assert len(stored.blocks) == 10


@pytest.mark.parametrize(
    ("keys", "change", "reason", "tokens"),
    [
        ({"output": "echo"}, {"eos_token_ids": [70]}, FinishReason.EOS, []),
        ({"output": "script", "script": [{"text": ""}]}, {}, FinishReason.EOS, []),
        ({"output": "script", "script": [{"text": "A"}]}, {}, FinishReason.STOP, [65]),
        ({"output": "echo"}, {"stop_conditions": StopConditions(stop_token_ids=[70])}, FinishReason.STOP, [70]),
        ({"output": "script", "script": [{"text": "AB"}]}, {}, FinishReason.LENGTH, [65]),
    ],
)
async def test_an_answer_complete_after_prefill_has_a_finish_reason(
    keys: dict[str, Any], change: dict[str, Any], reason: FinishReason, tokens: list[int]
) -> None:
    asked = msgspec.structs.replace(ask([70, 71, 72], None), **change)
    async with running(PREFILL, **keys) as prefill, running(AGGREGATED, **keys) as whole:
        item = await read(prefill, asked)
        complete = await read(whole, asked)

    assert (item.finish_reason, item.token_ids) == (reason, tokens)
    assert item.disaggregated_params["prompt_tokens"] == 3
    if reason is not FinishReason.LENGTH:
        assert (item.finish_reason, item.token_ids) == (complete.finish_reason, complete.token_ids)


OUTPUTS: list[dict[str, Any]] = [
    {},
    {"output": "echo"},
    {"output": "script", "script": [{"match": "A", "text": "Hello, you."}]},
    {"block_size": 4, "num_gpu_blocks": 9},
]


@settings(deadline=None)
@given(
    keys=st.sampled_from(OUTPUTS),
    prompt=st.lists(st.integers(65, 75), min_size=1, max_size=20),
    max_tokens=st.integers(1, 12),
    min_tokens=st.none() | st.integers(1, 4),
    seed=st.integers(-(2**63), 2**63),
    stops=st.lists(st.integers(32, 126), max_size=12),
    logprobs=st.none() | st.integers(0, 2),
    lora=st.none() | st.just("a"),
)
def test_the_two_halves_give_exactly_the_answer_of_an_aggregated_worker(
    keys: dict[str, Any],
    prompt: list[int],
    max_tokens: int,
    min_tokens: int | None,
    seed: int,
    stops: list[int],
    logprobs: int | None,
    lora: str | None,
) -> None:
    asked = PreprocessedRequest(
        token_ids=prompt,
        stop_conditions=StopConditions(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stops[:6]),
        sampling_options=SamplingOptions(seed=seed),
        output_options=OutputOptions(logprobs=logprobs),
        eos_token_ids=stops[6:],
        routing=RoutingHints(lora_name=lora),
    )

    async def run() -> None:
        async with (
            running(AGGREGATED, **keys) as whole,
            running(PREFILL, **keys) as prefill,
            running(DECODE, **keys) as decode,
        ):
            expected = await read(whole, asked)
            assert await read(decode, await hop(prefill, asked)) == expected
            assert [engine.loads for engine in (prefill, decode)] == [[NOTHING], [NOTHING]]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "prefill_result is missing"),
        (PrefillResult(disaggregated_params=None), r"prefill_result\.disaggregated_params is none that a mocker makes"),
        (PrefillResult(disaggregated_params={"room": 3}), "missing required field `kv_transfer_id`"),
        (
            PrefillResult(
                disaggregated_params={"kv_transfer_id": "x", "prompt_tokens": "2", "prompt_hash": "", "dp_rank": 0}
            ),
            "prompt_tokens",
        ),
    ],
)
async def test_a_decode_worker_refuses_a_request_without_a_usable_prefill_result(
    result: PrefillResult | None, words: str
) -> None:
    async with running(DECODE) as engine:
        asked = ask([65, 66])
        asked.prefill_result = result
        with pytest.raises(BackendError.InvalidArgument, match=words):
            await read(engine, asked)

        assert (engine.loads, engine.running_requests, engine.waiting_requests) == ([NOTHING], 0, 0)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (ask([65] * 11), r"prompt_tokens is 10, but token_ids has 11 tokens"),
        (ask([*[65] * 9, 66]), "prompt_hash is that of another prompt"),
        (msgspec.structs.replace(ask([65] * 10), routing=RoutingHints(lora_name="a")), "prompt_hash"),
    ],
)
async def test_a_decode_worker_refuses_the_prefill_result_of_another_prompt(
    other: PreprocessedRequest, words: str
) -> None:
    result = (await handed(ask([65] * 10))).prefill_result
    async with running(DECODE) as engine:
        with pytest.raises(BackendError.InvalidArgument, match=words):
            await read(engine, msgspec.structs.replace(other, prefill_result=result))


@pytest.mark.parametrize("mode", [PREFILL, DECODE])
async def test_a_token_id_of_more_than_32_bits_is_refused_without_prefix_caching_too(mode: DisaggregationMode) -> None:
    result = (await handed(ask([65]))).prefill_result
    async with running(mode, enable_prefix_caching=False) as engine:
        with pytest.raises(BackendError.InvalidArgument, match="token_ids"):
            await read(engine, msgspec.structs.replace(ask([2**32]), prefill_result=result))


async def test_a_decode_worker_computes_no_prompt_and_begins_when_the_cache_has_come() -> None:
    clock = VirtualClock()
    metrics = Metrics()
    asked = await handed(ask([*range(20)], 2))
    async with running(DECODE, clock=clock, block_size=4, **SLOW) as engine:
        await engine.setup_metrics(metrics)
        arrivals = [clock.time() async for _ in engine.generate(asked, context())]

        def value(name: str) -> float | None:
            return metrics.registry.get_sample_value(f"dynamo_mocker_{name}_prompt_tokens", {"dp_rank": "0"})

        assert [value(name) for name in ("computed", "cached", "received")] == [0, 0, 20]
    assert arrivals[0] == pytest.approx(20 * 0.01 + decode_ms(20 / (16384 * 4)) / 1000)
    assert arrivals[1] - arrivals[0] == pytest.approx(decode_ms(21 / (16384 * 4)) / 1000)


@pytest.mark.parametrize(
    ("keys", "transfer", "speedup"),
    [
        ({"speedup_ratio": 0}, 0, math.inf),
        ({"kv_transfer_bandwidth": 0}, 0, 1),
        ({"kv_bytes_per_token": 0}, 0, 1),
        ({"speedup_ratio": 10}, 0.02, 10),
    ],
)
async def test_first_step_of_decoding_follows_the_transfer(
    keys: dict[str, Any], transfer: float, speedup: float
) -> None:
    clock = VirtualClock()
    asked = await handed(ask([*range(20)], 1))
    async with running(DECODE, clock=clock, **(SLOW | keys)) as engine:
        await read(engine, asked)

    assert clock.time() == pytest.approx(transfer + decode_ms(20 / (16384 * 64)) / 1000 / speedup)


async def test_a_kv_transfer_holds_blocks_without_delaying_decodes() -> None:
    clock = VirtualClock()
    async with running(PREFILL) as prefill:
        short, long = [await hop(prefill, ask([token] * size, 100)) for token, size in ((65, 4), (66, 40))]
    async with running(DECODE, clock=clock, block_size=4, fixed_itl_ms=10, **SLOW) as engine:
        one, two = engine.generate(short, context()), engine.generate(long, context())
        await anext(one)
        waiting = asyncio.ensure_future(anext(two))
        begun = clock.time()
        await anext(one)
        arrivals = []
        while not waiting.done():
            await anext(one)
            arrivals.append(clock.time())
            (load,) = engine.loads
            assert load.kv_used_blocks is not None
            assert load.kv_used_blocks >= 11
            # Nothing of it is to be computed.
            assert load.active_prefill_tokens == 0
        for stream in (one, two):
            await cast("Any", stream).aclose()

        # 40 tokens take 0.4 s, with a step or two around them; meanwhile the other gets its token every 10 ms.
        assert arrivals[-1] - begun == pytest.approx(0.4, abs=0.05)
        on_time = [arrivals[0] + 0.01 * number for number in range(len(arrivals))]
        assert arrivals == pytest.approx(on_time, abs=0.011)
        assert engine.loads == [NOTHING]


async def test_a_request_that_waits_for_a_slot_of_a_decode_worker_is_no_prefill_load() -> None:
    clock = VirtualClock()
    async with running(DECODE, clock=clock, max_num_seqs=1) as engine:
        clock.pause()
        readers = [asyncio.ensure_future(read(engine, await handed(ask([token] * 90)))) for token in (65, 66)]
        await turns()

        assert engine.waiting_requests == 1
        assert [load.active_prefill_tokens for load in engine.loads] == [0]
        clock.resume()
        await asyncio.gather(*readers)


@pytest.mark.parametrize("seconds", [0, 0.5])
async def test_transferred_requests_take_one_token_of_the_step_budget(seconds: float) -> None:
    clock = VirtualClock()
    keys: dict[str, Any] = {"kv_transfer_bandwidth": 1, "kv_bytes_per_token": int(seconds * 1e8)}
    all_three = [await handed(ask([token] * 10, 3)) for token in (65, 66, 67)]
    async with running(DECODE, clock=clock, max_num_batched_tokens=2, fixed_itl_ms=100, **keys) as engine:

        async def first(asked: PreprocessedRequest) -> float:
            arrivals = [clock.time() async for _ in engine.generate(asked, context())]
            return arrivals[0]

        times = await asyncio.gather(*map(first, all_three))

    one, two, three = times
    # The third begins when the other two have ended, two steps later.
    assert one == two
    assert three - one == pytest.approx(0.3)


async def test_blocks_that_a_decode_worker_holds_already_do_not_come_again() -> None:
    clock = VirtualClock()
    asked = await handed(ask([*range(40)], 1))
    async with running(DECODE, clock=clock, block_size=4, fixed_itl_ms=1, **SLOW) as engine:
        await read(engine, asked)
        before = clock.time()
        again = await read(engine, asked)

    assert clock.time() - before == pytest.approx(4 * 0.01 + 0.001)
    # The prefill worker found nothing, or did not tell.
    assert cached(again) == 0


async def test_a_decode_workers_usage_has_the_prefill_workers_cached_tokens() -> None:
    asked = await handed(ask([*range(40)], 1))
    assert asked.prefill_result is not None
    asked.prefill_result.prompt_tokens_details = {"cached_tokens": 32}
    async with running(DECODE) as engine:
        item = await read(engine, asked)

    assert item.completion_usage is not None
    assert (item.completion_usage.prompt_tokens, item.completion_usage.cached_tokens) == (40, 32)


async def test_a_preempted_request_is_recomputed_on_its_decode_worker() -> None:
    metrics = Metrics()
    keys: dict[str, Any] = {"block_size": 4, "num_gpu_blocks": 8, "enable_prefix_caching": False}
    async with running(AGGREGATED) as whole, running(PREFILL) as prefill, running(DECODE, **keys) as decode:
        await decode.setup_metrics(metrics)
        both = [ask([token] * 8, 20) for token in (65, 66)]
        handed_over = [await hop(prefill, asked) for asked in both]

        answers = await asyncio.gather(*(read(decode, asked) for asked in handed_over))

        assert [item.token_ids for item in answers] == [(await read(whole, asked)).token_ids for asked in both]

        def value(name: str) -> float:
            return metrics.registry.get_sample_value(f"dynamo_mocker_{name}", {"dp_rank": "0"}) or 0

        assert value("preemptions") == 1
        assert value("received_prompt_tokens") == 16
        # Its prompt, and what it had made before it gave way.
        assert 8 < value("computed_prompt_tokens") < 28
        assert decode.loads == [NOTHING]


async def test_a_decode_worker_publishes_its_load_and_no_events() -> None:
    loads: list[ActiveLoad] = []
    asked = await handed(ask([65] * 128))
    async with running(DECODE) as engine:
        assert await engine.kv_event_sources() == []
        (source,) = await engine.load_sources()
        source.subscribe(loads.append)
        await read(engine, asked)

    assert max(load.kv_used_blocks or 0 for load in loads) == 3
    assert loads[-1] == NOTHING


async def test_a_decode_worker_offers_its_probe_payload() -> None:
    async with running(DECODE) as decode, running(PREFILL) as prefill:
        payload = await decode.health_check_payload()
        item = await read(decode, msgspec.convert(payload, PreprocessedRequest))

        assert item.finish_reason is FinishReason.LENGTH
        assert await prefill.health_check_payload() is None


async def reach_the_line(engine: MockerEngine, clock: VirtualClock) -> None:
    clock.pause()
    await turns()
    assert engine.waiting_requests == 1


async def reach_a_slot(engine: MockerEngine, clock: VirtualClock) -> None:
    await turns(3)
    clock.pause()
    assert engine.running_requests == 1


async def reach_an_answer(engine: MockerEngine, clock: VirtualClock) -> None:
    await turns(40)
    clock.pause()
    assert engine.running_requests == 1


@pytest.mark.parametrize("way", ["stop", "vanish"])
@pytest.mark.parametrize(
    ("mode", "phase"),
    [
        *itertools.product(DisaggregationMode, [reach_the_line, reach_a_slot]),
        # A prefill worker is through with a request when it answers.
        (AGGREGATED, reach_an_answer),
        (DECODE, reach_an_answer),
    ],
)
async def test_cancelling_in_any_phase_of_any_role_releases_everything(
    mode: DisaggregationMode, way: str, phase: Callable[[MockerEngine, VirtualClock], Any]
) -> None:
    clock = VirtualClock()
    asked = await handed(ask([*range(640)], 5000))
    # So few tokens per step that a prompt that is computed takes many; one that comes takes many steps of the other.
    keys: dict[str, Any] = {"max_num_batched_tokens": 64 if phase is reach_a_slot else 8192, "max_num_seqs": 1}
    async with running(mode, clock=clock, kv_transfer_bandwidth=64 if phase is reach_an_answer else 1e-6, **keys) as e:
        before = asyncio.all_tasks()
        blocker = None
        if phase is reach_the_line:
            blocker = asyncio.ensure_future(read(e, await handed(ask([*range(640)], 5000))))
            await turns(2)
        ctx = context()
        reader = asyncio.ensure_future(read(e, asked, ctx))
        await phase(e, clock)
        if blocker is not None:
            blocker.cancel()
            await asyncio.wait([blocker])

        if way == "stop":
            ctx.stop_generating()
            # At once, before the reader comes back to hear of it.
            assert e.loads == [NOTHING]
            assert (await reader).finish_reason is FinishReason.CANCELLED
        else:
            reader.cancel()
            await asyncio.wait([reader])

        assert (e.loads, e.running_requests, e.waiting_requests) == ([NOTHING], 0, 0)
        await turns()
        assert asyncio.all_tasks() <= before
        clock.resume()
        # And the next one is served.
        assert (await read(e, await handed(ask([65], 1)))).finish_reason is FinishReason.LENGTH


async def test_a_decode_worker_that_ends_in_the_middle_of_a_transfer_leaves_nothing() -> None:
    clock = VirtualClock()
    asked = await handed(ask([65] * 100))
    engine = make(DECODE, clock=clock, **SLOW)
    await engine.start(7)
    reader = asyncio.ensure_future(read(engine, asked))
    await turns(3)
    clock.pause()

    await engine.cleanup()

    with pytest.raises(BackendError.EngineShutdown, match="stopped"):
        await reader
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("mode", DisaggregationMode)
async def test_the_life_of_an_engine_is_the_same_in_every_role(mode: DisaggregationMode) -> None:
    engine = make(mode)
    with pytest.raises(BackendError.EngineShutdown, match="generate called before start"):
        await read(engine, ask([65]))
    config = await engine.start(7)
    with pytest.raises(BackendError.EngineShutdown, match="mocker backend already started"):
        await engine.start(7)
    await engine.cleanup()
    await engine.cleanup()

    assert (EMBED in config.capabilities) is (mode is not PREFILL)


async def test_only_a_prefill_worker_has_a_bootstrap_address() -> None:
    host, port = ADDRESS
    told = []
    for mode, replica in ((PREFILL, 0), (PREFILL, 2), (DECODE, 0), (AGGREGATED, 0)):
        engine = make(mode, replica=replica, bootstrap_host=host, bootstrap_port=port)
        config = await engine.start(7)
        told.append((config.bootstrap_host, config.bootstrap_port))
        await engine.cleanup()

    assert told == [(host, port), (host, port + 2), (None, None), (None, None)]


@pytest.mark.parametrize("keys", [{"bootstrap_host": "h"}, {"bootstrap_port": 1}])
def test_a_host_to_meet_at_goes_with_a_port(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="bootstrap_host and bootstrap_port must be set together"):
        MockerConfig(**keys)


async def test_two_prefill_workers_of_a_process_cannot_have_one_address_until_the_first_has_ended() -> None:
    host, port = ADDRESS
    keys: dict[str, Any] = {"bootstrap_host": host, "bootstrap_port": port}
    async with running(PREFILL, **keys):
        second = make(PREFILL, **keys)
        with pytest.raises(BackendError.InvalidArgument, match="bootstrap_port"):
            await second.start(8)
        await second.cleanup()
        assert BootstrapRooms.find(host, port) is not None

    assert BootstrapRooms.find(host, port) is None
    async with running(PREFILL, **keys):
        pass


class Pair:
    """A prefill and a decode worker that meet; each lives on a clock of its own."""

    def __init__(self, prefill: MockerEngine, decode: MockerEngine, clock: VirtualClock, rooms: BootstrapRooms) -> None:
        self.prefill = prefill
        self.decode = decode
        self.prefill_clock = clock
        self.rooms = rooms


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    host, port = ADDRESS
    clock = VirtualClock()
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(
            running(PREFILL, clock=clock, bootstrap_host=host, bootstrap_port=port, max_num_batched_tokens=8)
        )
        decode = await stack.enter_async_context(running(DECODE))
        rooms = BootstrapRooms.find(host, port)
        assert rooms is not None
        yield Pair(prefill, decode, clock, rooms)


async def test_a_decode_worker_waits_for_the_running_prefill() -> None:
    asked = ask([65] * 40, 10)
    async with running(AGGREGATED) as engine:
        whole = await read(engine, asked)
    async with pair() as both:
        both.prefill_clock.pause()
        second = asyncio.ensure_future(read(both.decode, in_room(asked)))
        first = asyncio.ensure_future(read(both.prefill, in_room(asked)))
        await turns()
        assert not second.done()
        assert both.decode.loads == [NOTHING]

        both.prefill_clock.resume()

        assert (await second).token_ids == whole.token_ids
        assert (await first).token_ids == whole.token_ids[:1]
        assert (len(both.rooms), both.decode.loads) == (0, [NOTHING])


async def test_a_decode_worker_that_comes_after_the_prefill_goes_on_at_once() -> None:
    asked = ask([65] * 40, 10)
    async with pair() as both:
        first = await read(both.prefill, in_room(asked))
        both.prefill_clock.pause()

        second = await read(both.decode, in_room(asked))

        assert second.token_ids[:1] == first.token_ids
        assert len(both.rooms) == 0


async def test_bootstrap_rooms_are_separate() -> None:
    asked = ask([65] * 40, 3)
    async with pair() as both:
        await read(both.prefill, in_room(asked, 1))
        other = asyncio.ensure_future(read(both.decode, in_room(asked, 2)))
        await turns()
        assert not other.done()

        await read(both.prefill, in_room(asked, 2))

        assert len((await other).token_ids) == 3


async def test_a_cancelled_prefill_fails_its_decode() -> None:
    asked = in_room(ask([65] * 400))
    async with pair() as both:
        ctx = context()
        first = asyncio.ensure_future(read(both.prefill, asked, ctx))
        second = asyncio.ensure_future(read(both.decode, asked))
        await turns(4)

        ctx.stop_generating()

        assert (await first).finish_reason is FinishReason.CANCELLED
        with pytest.raises(BackendError.Disconnected, match="room 1 was given up"):
            await second
        assert (len(both.rooms), both.decode.loads, both.prefill.loads) == (0, [NOTHING], [NOTHING])


async def test_a_stopped_prefill_worker_fails_its_decodes() -> None:
    async with pair() as both:
        second = asyncio.ensure_future(read(both.decode, in_room(ask([65]))))
        await turns()

        await both.prefill.cleanup()

        with pytest.raises(BackendError.Disconnected):
            await second


async def test_a_request_that_is_stopped_in_a_room_is_cancelled_and_leaves_it() -> None:
    async with pair() as both:
        ctx = context()
        second = asyncio.ensure_future(read(both.decode, in_room(ask([65])), ctx))
        await turns()

        ctx.stop_generating()

        assert (await second).finish_reason is FinishReason.CANCELLED
        assert len(both.rooms) == 0


async def test_a_request_that_vanishes_in_a_room_leaves_it() -> None:
    async with pair() as both, aclosing(cast("Any", both.decode.generate(in_room(ask([65])), context()))) as stream:
        second = asyncio.ensure_future(anext(stream))
        await turns()

        second.cancel()
        await asyncio.wait([second])

        assert len(both.rooms) == 0


async def test_waiting_in_a_room_times_out() -> None:
    rooms = BootstrapRooms(*ADDRESS, timeout=0.01)
    try:
        with pytest.raises(BackendError.ConnectionTimeout, match=r"room 5 did not end within 0\.01 s"):
            await rooms.wait_for_prefill(5, context())
        assert len(rooms) == 0
    finally:
        rooms.close()


async def test_unused_rooms_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_rooms, "MAX_ROOMS", 2)
    asked = ask([65])
    async with pair() as both:
        for room in range(5):
            await read(both.prefill, in_room(asked, room))

        assert len(both.rooms) == 2
        assert len((await read(both.decode, in_room(asked, 4))).token_ids) == 4


async def test_a_prompt_computed_in_another_process_counts_as_computed() -> None:
    asked = ask([65] * 40, 3)
    async with pair() as both:
        item = await read(both.decode, in_room(asked, address=("elsewhere", 1)))

    assert len(item.token_ids) == 3


async def test_a_prefill_result_is_enough_where_a_room_is_named_too() -> None:
    asked = in_room(await handed(ask([65] * 40, 3)))
    async with pair() as both:
        assert len((await read(both.decode, asked)).token_ids) == 3

        wrong = in_room(msgspec.structs.replace(asked, token_ids=[66] * 40))
        with pytest.raises(BackendError.InvalidArgument, match="another prompt"):
            await read(both.decode, wrong)
