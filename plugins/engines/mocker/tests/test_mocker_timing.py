"""The pace of the mocker, in virtual time."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from dynamo_core import EngineContext, GenerateContext, PreprocessedRequest, StopConditions, WorkerConfig
from dynamo_plugin_engine_mocker.clock import MonotonicClock, VirtualClock
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.engine import MockerEngine
from dynamo_plugin_engine_mocker.timing import Pacer, decode_ms, prefill_ms, step_time
from hypothesis import given
from hypothesis import strategies as st


async def arrivals(config: MockerConfig, *, prompt: int = 24, streams: int = 1) -> list[float]:
    """Return the virtual milliseconds at which the tokens of the last of some equal requests arrive."""
    clock = VirtualClock(start=100.0)
    engine = MockerEngine(config, WorkerConfig(), clock=clock)
    await engine.start(1)
    start = clock.time()

    async def read() -> list[float]:
        asked = PreprocessedRequest(token_ids=[65] * prompt, stop_conditions=StopConditions(max_tokens=4))
        return [
            (clock.time() - start) * 1000 async for _ in engine.generate(asked, GenerateContext(EngineContext("r")))
        ]

    try:
        return (await asyncio.gather(*(read() for _ in range(streams))))[-1]
    finally:
        await engine.cleanup()


async def test_the_first_token_comes_after_the_prefill_and_the_others_at_the_pace_of_decoding() -> None:
    times = await arrivals(MockerConfig())

    steps = [prefill_ms(24), *[decode_ms((24 + done) / (16384 * 64)) for done in (1, 2, 3)]]
    assert times == pytest.approx([sum(steps[: count + 1]) for count in range(4)])
    assert times[0] == pytest.approx(16.866, abs=1e-3)
    assert times[1] - times[0] == pytest.approx(5.74, abs=0.01)


async def test_prompts_that_arrive_together_are_prefilled_together() -> None:
    times = await arrivals(MockerConfig(), prompt=100, streams=8)

    assert times[0] == pytest.approx(prefill_ms(800))


async def test_the_speedup_divides_every_time() -> None:
    slow = await arrivals(MockerConfig())

    fast = await arrivals(MockerConfig(speedup_ratio=4))

    assert fast == pytest.approx([time / 4 for time in slow])


async def test_the_decode_speedup_divides_the_time_of_decoding_only() -> None:
    slow = await arrivals(MockerConfig(speedup_ratio=2))

    fast = await arrivals(MockerConfig(speedup_ratio=2, decode_speedup_ratio=4))

    assert fast[0] == pytest.approx(slow[0])
    assert fast[3] - fast[0] == pytest.approx((slow[3] - slow[0]) / 4)


async def test_a_speedup_of_0_takes_no_time() -> None:
    assert await arrivals(MockerConfig(speedup_ratio=0)) == [0, 0, 0, 0]


async def test_a_fixed_interval_ignores_the_speedup() -> None:
    times = await arrivals(MockerConfig(fixed_itl_ms=7, speedup_ratio=3))

    assert times == pytest.approx([7, 14, 21, 28])


def test_a_fuller_cache_slows_decoding_down_to_the_formula() -> None:
    assert decode_ms(0.5) == pytest.approx(-25.74 / 4 + 54.01 / 2 + 5.74)
    assert decode_ms(7.0) == decode_ms(1.0)
    assert prefill_ms(0) == 0


@given(tokens=st.integers(0, 100_000), decoding=st.integers(0, 1000), use=st.floats(0, 3))
def test_no_step_is_shorter_than_its_decoding(tokens: int, decoding: int, use: float) -> None:
    seconds = step_time(MockerConfig())(tokens, decoding, use)

    assert seconds >= (0.001 if decoding else 0)
    assert (seconds == 0) == (tokens == 0 and decoding == 0)


async def test_a_late_step_does_not_push_back_the_ones_after_it() -> None:
    clock = VirtualClock()
    pacer = Pacer(clock)

    await pacer.wait(10)
    clock.advance(4)
    await pacer.wait(10)
    clock.advance(13)
    await pacer.wait(10)
    await pacer.wait(10)

    assert clock.deadlines == [10, 20, 30, 40]


async def test_after_a_long_stall_there_is_no_burst() -> None:
    clock = VirtualClock()
    pacer = Pacer(clock)

    await pacer.wait(10)
    clock.advance(95)
    for _ in range(3):
        await pacer.wait(10)

    assert clock.deadlines == [10, 105, 115, 125]


async def test_the_schedule_begins_anew_after_idling() -> None:
    clock = VirtualClock()
    engine = MockerEngine(MockerConfig(fixed_itl_ms=10), WorkerConfig(), clock=clock)
    await engine.start(1)
    asked = PreprocessedRequest(token_ids=[65], stop_conditions=StopConditions(max_tokens=1))

    for _ in range(2):
        clock.advance(1000.0)
        async for _item in engine.generate(asked, GenerateContext(EngineContext("r"))):
            pass
    await engine.cleanup()

    assert clock.time() == pytest.approx(2000.02, abs=1e-6)


async def test_an_ended_or_cancelled_request_frees_its_blocks() -> None:
    clock = VirtualClock()
    config = MockerConfig(block_size=10, num_gpu_blocks=10, enable_prefix_caching=False)
    engine = MockerEngine(config, WorkerConfig(), clock=clock)
    await engine.start(1)

    async def duration(read: int) -> float:
        start = clock.time()
        asked = PreprocessedRequest(token_ids=[65] * 20, stop_conditions=StopConditions(max_tokens=20))
        stream = engine.generate(asked, GenerateContext(EngineContext("r")))
        for _ in range(read):
            await anext(stream)
        assert inspect.isasyncgen(stream)
        await stream.aclose()
        took = clock.time() - start
        for _ in range(5):  # the step that was under way ends
            await asyncio.sleep(0)
        return took

    fresh = await duration(20)
    await duration(5)

    assert await duration(20) == pytest.approx(fresh)
    await engine.cleanup()


async def test_the_sleeper_with_the_earliest_deadline_wakes_first() -> None:
    clock = VirtualClock()
    woken: list[tuple[float, float]] = []

    async def sleep(deadline: float) -> None:
        await clock.sleep_until(deadline)
        woken.append((deadline, clock.time()))

    await asyncio.gather(*(sleep(deadline) for deadline in (30, 10, 20, 10)))

    assert woken == [(10, 10), (10, 10), (20, 20), (30, 30)]


async def test_a_cancelled_sleeper_delays_no_other() -> None:
    clock = VirtualClock()
    clock.pause()
    early = asyncio.ensure_future(clock.sleep_until(5))
    late = asyncio.ensure_future(clock.sleep_until(9))
    await asyncio.sleep(0)

    early.cancel()
    clock.resume()
    await late

    assert clock.time() == 9


async def test_starting_takes_the_startup_time() -> None:
    clock = VirtualClock(start=5.0)
    engine = MockerEngine(MockerConfig(startup_time=30), WorkerConfig(), clock=clock)

    await engine.start(1)
    await engine.cleanup()

    assert clock.deadlines == [35.0]


async def test_the_real_clock_advances_and_yields_to_other_tasks() -> None:
    clock = MonotonicClock()
    ran = asyncio.Event()
    asyncio.get_running_loop().call_soon(ran.set)
    before = clock.time()

    await clock.sleep_until(before - 1)

    assert ran.is_set()
    assert clock.time() >= before
