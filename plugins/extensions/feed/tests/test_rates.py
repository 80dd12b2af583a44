"""Rates are kept for 15 minutes in fixed memory, and sums over frontends are those of one with all requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dynamo_core.protocol import RequestRecord
from dynamo_plugin_extension_feed.rates import (
    BOUNDS,
    MODELS,
    NOW,
    OTHER,
    SLOT,
    SLOTS,
    ModelCounts,
    Rates,
    percentiles,
    summed,
)
from hypothesis import given
from hypothesis import strategies as st

from plugins.conftest import Clock


def record(model: str = "m", first: float = 0.1, tokens: int = 3, worker: int = 1) -> RequestRecord:
    return RequestRecord(
        request_id="r",
        model=model,
        endpoint="chat_completions",
        request_type="stream",
        status="success",
        error_type="",
        http_status=200,
        prompt_tokens=10,
        output_tokens=tokens,
        duration=first + 1.0,
        time_to_first_token=first,
        finish_reason="stop",
        instance_id=worker,
        trace_id="t",
        span_id="s",
        x_request_id=None,
        cached_tokens=4,
    )


Happening = tuple[int, int, str, float]
Moment = tuple[int, str, float]
happenings = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40), st.sampled_from("abc"), st.floats(0.0, 100.0)), max_size=40
)


@given(happenings)
def test_the_sum_of_all_frontends_is_that_of_one_with_all_requests(all_of_them: Sequence[Happening]) -> None:
    clock = Clock()
    several, one = [Rates(clock) for _ in range(3)], Rates(clock)
    for frontend, pause, model, first in all_of_them:
        clock.now += pause
        for rates in (several[frontend], one):
            rates.add(record(model, first))

    parts, whole = [rates.counted() for rates in several], one.counted()
    assert summed(part.models.minute for part in parts) == whole.models.minute
    assert summed(part.models.whole for part in parts) == whole.models.whole
    assert summed(part.tenants.minute for part in parts) == whole.tenants.minute
    assert summed(part.tenants.whole for part in parts) == whole.tenants.whole
    assert summed(part.workers for part in parts) == whole.workers
    assert summed(part.history for part in parts) == whole.history


moments = st.lists(st.tuples(st.integers(-30, 400), st.sampled_from("abc"), st.floats(0.0, 100.0)), max_size=40)


@given(moments)
def test_the_counts_are_those_of_the_requests_of_the_last_fifteen_minutes(all_of_them: Sequence[Moment]) -> None:
    clock = Clock()
    rates = Rates(clock)
    kept: list[tuple[int, str, float]] = []
    for pause, model, first in all_of_them:
        # A pause may be negative: the clock is set back.
        clock.now += pause
        rates.add(record(model, first))
        now = int(clock.now) // SLOT * SLOT
        kept = [one for one in kept if now - (SLOTS - 1) * SLOT <= one[0] <= now]
        kept.append((now, model, first))
    counted = rates.counted()

    whole = {name: [first for _, model, first in kept if model == name] for name in {model for _, model, _ in kept}}
    assert {name: counts.requests for name, counts in counted.models.whole.items()} == {
        name: len(latencies) for name, latencies in whole.items()
    }
    assert counted.models.whole == {name: alone(name, latencies) for name, latencies in whole.items()}
    recent = [model for slot, model, _ in kept if slot >= clock.now - NOW]
    assert {name: counts.requests for name, counts in counted.models.minute.items()} == Counter(recent)
    by_slot = Counter(slot for slot, *_ in kept)
    assert {slot: counts.requests for slot, counts in counted.history.items()} == by_slot


def alone(model: str, latencies: Sequence[float]) -> ModelCounts:
    """Return the counts of these requests, all of which end now."""
    rates = Rates(Clock())
    for first in latencies:
        rates.add(record(model, first))
    return rates.counted().models.whole[model]


def test_names_above_the_bound_count_together() -> None:
    rates = Rates(Clock())
    for number in range(MODELS + 5):
        rates.add(record(f"model-{number}"))

    names = rates.counted().models.whole

    assert len(names) == MODELS + 1
    assert names[OTHER].requests == 5


@given(st.lists(st.floats(0.0006, 100.0), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_is_exact_to_a_quarter(latencies: list[float], share: float) -> None:
    rates = Rates(Clock())
    for first in latencies:
        rates.add(record(first=first))

    (told,) = percentiles(rates.counted().models.whole["m"].ttft, [share])

    # As many as that share of them, or more, are no longer than what is told.
    ordered = sorted(latencies)
    exact = next(one for number, one in enumerate(ordered, 1) if number >= share * len(ordered) - 1e-9)
    assert told is not None
    assert exact <= told <= exact * 1.2501


def test_durations_over_the_last_bound_are_reported_as_it() -> None:
    rates = Rates(Clock())
    rates.add(record(first=10 * BOUNDS[-1]))

    assert percentiles(rates.counted().models.whole["m"].ttft, [0.5, 0.9]) == [BOUNDS[-1], BOUNDS[-1]]
    assert percentiles({}, [0.5, 0.9]) == [None, None]
