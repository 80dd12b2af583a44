"""The router `kv` chooses as well as is promised, on small traces in virtual time; and what measures it works."""

import asyncio
from dataclasses import replace

import pytest

from benchmarks.kv_quality import WORKERS, Answer, Quality, play
from benchmarks.traces import SHARED, UNSHARED, Traffic, make_trace
from benchmarks.virtual_time import run_at_once

SMALL_SHARED = replace(SHARED, chats=160, applications=96, answer_tokens=(5, 20))
SMALL_UNSHARED = replace(UNSHARED, chats=320, answer_tokens=(5, 20))


def quality(traffic: Traffic, router: str, seed: int = 1) -> Quality:
    return Quality.of(play(make_trace(traffic, seed), router, seed))


def test_kv_routing_halves_ttft_for_shared_prompts() -> None:
    kv, base = quality(SMALL_SHARED, "kv"), quality(SMALL_SHARED, "round-robin")

    assert kv.ttft_mean < 0.45 * base.ttft_mean
    assert kv.ttft_p50 < 0.8 * base.ttft_p50
    assert kv.ttft_p99 < base.ttft_p99
    assert kv.hit_rate > base.hit_rate + 0.2
    assert kv.request_imbalance < 1.5


@pytest.mark.full
def test_kv_routing_is_no_worse_for_unshared_prompts() -> None:
    kv, base = quality(SMALL_UNSHARED, "kv"), quality(SMALL_UNSHARED, "round-robin")

    assert kv.ttft_mean < 1.05 * base.ttft_mean
    assert kv.ttft_p99 < 1.1 * base.ttft_p99
    assert kv.hit_rate == base.hit_rate == 0
    assert kv.request_imbalance < 1.25


@pytest.mark.full
def test_session_affinity_raises_the_hit_rate_without_kv_events() -> None:
    sticky = quality(SMALL_SHARED, "affinity, kv without events")

    assert sticky.hit_rate > quality(SMALL_SHARED, "kv without events").hit_rate


@pytest.mark.parametrize("router", ["kv", "affinity, kv without events"])
def test_the_same_seed_gives_the_same_figures(router: str) -> None:
    traffic = replace(SMALL_SHARED, chats=12)
    first, again = (play(make_trace(traffic, 7), router, 7) for _ in range(2))
    # Workers are numbered anew in each run.
    assert _without_names(first) == _without_names(again)
    assert play(make_trace(traffic, 8), router, 8) != first


def _without_names(answers: list[Answer]) -> list[Answer]:
    names: dict[int, int] = {}
    return [replace(answer, worker=names.setdefault(answer.worker, len(names))) for answer in answers]


def test_the_figures_of_a_run_are_those_of_its_answers() -> None:
    answers = [Answer(0.0, 1.0, 1, 100, 0), Answer(0.0, 2.0, 1, 100, 80), Answer(0.0, 6.0, 2, 200, 200)]

    found = Quality.of(answers, workers=2)

    assert (found.requests, found.hit_rate, found.ttft_mean, found.ttft_p50) == (3, 0.7, 3.0, 2.0)
    assert found.ttft_p99 == pytest.approx(5.92)
    assert found.request_imbalance == pytest.approx(4 / 3)
    assert found.token_imbalance == 2.0
    assert Quality.of(answers[:1]).request_imbalance == WORKERS


def test_sleeping_in_virtual_time_is_instant_and_exact() -> None:
    async def main() -> list[float]:
        clock = asyncio.get_running_loop().time
        woken = []

        async def sleeper(seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append(clock())

        async with asyncio.TaskGroup() as group:
            for seconds in (3600.0, 0.5, 60.0):
                group.create_task(sleeper(seconds))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(86_400):
                await asyncio.Event().wait()
        return [*woken, clock()]

    assert run_at_once(main()) == pytest.approx([0.5, 60.0, 3600.0, 90_000.0])
