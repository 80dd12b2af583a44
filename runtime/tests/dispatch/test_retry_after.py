"""The `Retry-After` of refused requests."""

from __future__ import annotations

import pytest
from dynamo_runtime.dispatch.load.retry_after import LONGEST, SHORTEST, UNKNOWN, WINDOW, RetryAfterEstimator


class Bench:
    """Rates by a clock that the test turns."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.rates = RetryAfterEstimator(clock=lambda: self.now, seed=1)

    def mean(self) -> float:
        return sum(self.rates.retry_after("m") for _ in range(2000)) / 2000

    def run(self, seconds: int, *, ended: int, refused: int) -> None:
        """Send so many of each in every second."""
        for _ in range(seconds):
            for _ in range(refused):
                self.rates.refused("m")
            for _ in range(ended):
                self.rates.ended("m")
            self.now += 1.0


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_answer_is_whole_seconds_within_bounds_and_differs(bench: Bench) -> None:
    bench.run(5, ended=1, refused=10)

    answers = {bench.rates.retry_after("m") for _ in range(200)}

    assert len(answers) > 5
    assert all(SHORTEST <= answer <= LONGEST and answer == int(answer) for answer in answers)


def test_the_initial_retry_after_is_the_default(bench: Bench) -> None:
    assert bench.mean() == pytest.approx(UNKNOWN, abs=0.2)


def test_retry_after_is_the_time_to_end_as_many_as_were_refused(bench: Bench) -> None:
    bench.run(60, ended=10, refused=10)
    even = bench.mean()
    bench.run(60, ended=10, refused=20)

    assert even == pytest.approx(WINDOW, rel=0.15)
    assert bench.mean() == pytest.approx(2 * WINDOW, rel=0.15)


def test_requests_ended_before_a_refusal_do_not_count(bench: Bench) -> None:
    """A quiet model would seem slow: hardly anything had been asked of it."""
    for _ in range(100):
        bench.rates.ended("m")
        bench.now += 5
    bench.run(2, ended=20, refused=5)

    assert bench.mean() < UNKNOWN


def test_while_nothing_ends_the_wait_grows_with_the_standstill(bench: Bench) -> None:
    bench.run(2, ended=0, refused=5)
    early = bench.mean()
    bench.run(20, ended=0, refused=5)

    assert early < bench.mean()


def test_an_overload_that_is_over_is_forgotten(bench: Bench) -> None:
    bench.run(30, ended=1, refused=30)
    bench.now += WINDOW + 1

    assert bench.mean() == pytest.approx(UNKNOWN, abs=0.2)
    bench.run(2, ended=20, refused=5)
    assert bench.mean() < UNKNOWN


def test_models_do_not_wait_for_each_other(bench: Bench) -> None:
    bench.run(30, ended=1, refused=30)

    assert sum(bench.rates.retry_after("another") for _ in range(100)) / 100 < 4
