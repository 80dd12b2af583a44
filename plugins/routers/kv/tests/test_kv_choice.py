"""What a worker costs, and who is taken."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from dynamo_core import RouterConfigOverride
from dynamo_core.kv import Load
from dynamo_plugin_router_kv.choice import Weights, best, choose, costs
from dynamo_plugin_router_kv.config import KvConfig
from hypothesis import given
from hypothesis import strategies as st

IDLE: Load = (0, 0, 0)


def cost(
    weights: Weights, overlap: int = 0, load: Load = IDLE, *, requests: int = 0, tokens: int = 160, size: int = 16
) -> float:
    (one,) = costs(
        weights,
        tokens=tokens,
        blocks=tokens // size,
        block_size=size,
        overlaps=[overlap],
        loads=[load],
        requests=[requests],
    )
    return one


def test_active_requests_cost_their_weight() -> None:
    assert cost(Weights(decode_active_request_weight=1.5), requests=4) == 20 + 6


@given(
    overlaps=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    data=st.data(),
    tokens=st.integers(0, 700),
    credit=st.sampled_from([0.0, 0.3, 1.0]),
    scale=st.sampled_from([0.0, 0.7, 1.0]),
    decay=st.sampled_from([0.0, 0.5]),
    tracks=st.booleans(),
    reuse=st.booleans(),
)
def test_fast_and_full_cost_agree_with_the_formula(
    overlaps: list[int],
    data: st.DataObject,
    tokens: int,
    credit: float,
    scale: float,
    decay: float,
    tracks: bool,
    reuse: bool,
) -> None:
    size, blocks = 16, tokens // 16
    loads = [
        (data.draw(st.integers(0, 9999)), data.draw(st.integers(0, 99)), data.draw(st.integers(0, blocks)))
        for _ in overlaps
    ]
    weights = Weights(credit, decay, scale, 0.0, 0.0, tracks, reuse)
    least = min(load[0] for load in loads)

    found = costs(weights, tokens=tokens, blocks=blocks, block_size=size, overlaps=overlaps, loads=loads)

    for one, overlap, (prefill, held, shared) in zip(found, overlaps, loads, strict=True):
        raw = (prefill + tokens) / size if tracks else 0
        worth = credit * overlap / (1 + decay * (prefill - least) / max(tokens, 1))
        expected = scale * max(0, raw - worth) + held + blocks - (shared if reuse else 0)
        assert one == pytest.approx(expected)


def test_the_cheapest_is_taken_and_among_those_alike_any() -> None:
    draw = random.Random(1)

    drawn = Counter(choose([3.0, 1.0, 2.0, 1.0], 0.0, draw) for _ in range(2000))

    assert set(drawn) == {1, 3}
    assert abs(drawn[1] - 1000) < 6 * 2000**0.5 / 2


def test_with_a_temperature_the_cheaper_is_the_likelier() -> None:
    draw = random.Random(1)
    times = 20_000

    drawn = Counter(choose([0.0, 5.0, 10.0], 1.0, draw) for _ in range(times))

    # e^0, e^-0.5, e^-1, of their sum.
    for number, share in enumerate([0.5065, 0.3072, 0.1863]):
        assert abs(drawn[number] / times - share) < 0.02


@pytest.mark.parametrize("temperature", [0.0, 0.5, 3.0])
def test_if_all_cost_the_same_all_have_the_same_chance(temperature: float) -> None:
    drawn = Counter(choose([4.0] * 4, temperature, random.Random(seed)) for seed in range(4000))

    assert all(abs(drawn[number] - 1000) < 200 for number in range(4))


def test_a_request_may_weigh_otherwise() -> None:
    weights = Weights.of(KvConfig(overlap_score_credit=0.9, temperature=0.2))

    changed = weights.overridden(
        RouterConfigOverride(overlap_score_credit=0.0, router_temperature=0.7, track_prefill_tokens=False)
    )

    assert weights.overridden(RouterConfigOverride()) == weights
    assert (changed.overlap_score_credit, changed.temperature, changed.track_prefill_tokens) == (0.0, 0.7, False)
    assert changed.assume_kv_reuse is True


@given(st.lists(st.integers(0, 5).map(float), min_size=1, max_size=20), st.integers(1, 25), st.data())
def test_the_best_are_the_cheapest_and_the_chosen_one_is_among_them(
    costs: list[float], count: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.integers(0, len(costs) - 1))

    found = best(costs, count, chosen)

    assert chosen in found
    assert len(found) == len(set(found)) == min(count, len(costs))
    cheapest = sorted(costs)[: len(found)]
    assert [costs[index] for index in found[:-1]] == cheapest[:-1]
    assert costs[found[-1]] == cheapest[-1] or found[-1] == chosen


def test_every_weight_can_change_while_the_router_runs_and_nothing_that_is_read_once() -> None:
    weights = set(Weights.__slots__)

    assert weights <= KvConfig.LIVE
    assert KvConfig.LIVE - weights == {"track_active_blocks", "alarm_secs"}
