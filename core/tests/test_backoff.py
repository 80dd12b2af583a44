"""Pauses between attempts."""

from __future__ import annotations

from itertools import islice

import pytest
from dynamo_core.backoff import jitter, pauses


def test_a_jitter_stays_between_its_multiples() -> None:
    found = [jitter(10.0, 0.05, 0.5) for _ in range(1000)]
    assert min(found) >= 0.5
    assert max(found) <= 5.0
    assert len(set(found)) > 1


def test_pauses_double_up_to_the_last() -> None:
    assert list(islice(pauses(0.05, 1.0, least=1, most=1), 7)) == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_the_first_pause_is_not_longer_than_the_last() -> None:
    assert next(pauses(5.0, 1.0, least=1, most=1)) == 1.0


@pytest.mark.parametrize("step", range(3))
def test_each_pause_is_varied(step: int) -> None:
    found = [next(islice(pauses(1.0, 8.0), step, None)) for _ in range(1000)]
    assert min(found) >= 0.5 * 2**step
    assert max(found) <= 1.5 * 2**step
    assert len(set(found)) > 1
