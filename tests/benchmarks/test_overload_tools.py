"""The clients of the overload benchmark see what servers tell them; figures, table and picture are made of it."""

from dataclasses import replace

import pytest

from benchmarks.overload import Cost, Fairness, Outcome, misses
from benchmarks.overload_clients import (
    ANSWERED,
    REFUSED,
    Attempt,
    by_second,
    pause,
    rate,
    ttft,
)

GOOD = Outcome(0.2, 10.0, 0.1, 0.3, 20.0, 0.0, 0, 0.5, {}, [9.0, 11.0], [0.3, None])
FAIR, CHEAP = Fairness(0.2, 0.22, 50, 0), {"fair-queue": Cost(0.1, 0.01)}


@pytest.mark.parametrize(("told", "seconds"), [("7", 7.5), (None, 4.5), ("soon", 4.5), ("1000", 60.0)])
def test_a_pause_follows_retry_after_or_grows(told: str | None, seconds: float) -> None:
    assert pause(2, told, 0.5) == seconds


def test_figures_are_of_the_time_that_counts() -> None:
    met = [Attempt(at, at + 0.5, ANSWERED, at + at / 10) for at in (1.0, 2.0, 3.0)] + [Attempt(3.0, 3.1, REFUSED)]

    assert rate(met, 2.0, 4.0) == 1.0
    assert rate(met, 2.0, 4.0, REFUSED) == 0.5
    assert ttft(met, 0.5, 2.0) == pytest.approx(0.25)
    assert ttft([], 0.5) is None
    assert by_second(met, 1.0, 3, lambda some: float(len(some))) == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"goodput": 8.9}, "goodput"),
        ({"p99": 0.41}, "p99 TTFT"),
        ({"probe": None}, "fresh client"),
        ({"left": {"x": 1.0}}, "left in accounts"),
        ({"failed": 1}, "1 requests failed"),
    ],
)
def test_missed_promises_are_reported(bad: dict[str, object], said: str) -> None:
    outcomes = {"fair-queue": replace(GOOD, **bad)}  # type: ignore[arg-type]

    assert misses({"fair-queue": GOOD, "none": replace(GOOD, goodput=1.0)}, 10.0, FAIR, CHEAP) == []
    assert [said in line for line in misses(outcomes, 10.0, FAIR, CHEAP)] == [True]
