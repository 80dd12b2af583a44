"""When a rank is over a threshold, when a worker is busy, and where the thresholds of a model come from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.thresholds import THRESHOLDS, RankLoad, Thresholds, check_changes
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_runtime.dispatch.pools.thresholds import ThresholdBook
from dynamo_telemetry.metrics import Metrics
from hypothesis import given
from hypothesis import strategies as st

BLOCKS, TOKENS, FRACTION = THRESHOLDS


@pytest.mark.parametrize(
    ("own", "load", "exceeded"),
    [
        (Thresholds(0.85), RankLoad(85, 100), False),
        (Thresholds(0.85), RankLoad(86, 100), True),
        (Thresholds(0.0), RankLoad(0, 100), False),
        (Thresholds(0.0), RankLoad(1, 100), True),
        (Thresholds(1.0), RankLoad(100, 100), False),
        (Thresholds(0.5), RankLoad(10**6, None), False),
        (Thresholds(0.5), RankLoad(10**6, 0), False),
        (Thresholds(None, 10_000), RankLoad(active_prefill_tokens=10_000), False),
        (Thresholds(None, 10_000), RankLoad(active_prefill_tokens=10_001), True),
        (Thresholds(None, None, 0.1), RankLoad(active_prefill_tokens=819, max_num_batched_tokens=8192), False),
        (Thresholds(None, None, 0.1), RankLoad(active_prefill_tokens=820, max_num_batched_tokens=8192), True),
        (Thresholds(None, None, 0.1), RankLoad(active_prefill_tokens=1_000_000), False),
        (Thresholds(None, None, 0.1), RankLoad(active_prefill_tokens=1_000_001), True),
        (Thresholds(0.5, 10), RankLoad(51, 100, 0), True),
        (Thresholds(0.5, 10), RankLoad(50, 100, 11), True),
        (Thresholds(), RankLoad(100, 100, 10**9, 1), False),
    ],
)
def test_a_rank_is_over_a_threshold_only_above_it(own: Thresholds, load: RankLoad, exceeded: bool) -> None:
    assert own.exceeded(load) is exceeded


@given(
    share=st.none() | st.floats(0, 1),
    tokens=st.none() | st.integers(0, 50),
    ranks=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 60)), max_size=4),
)
def test_a_worker_is_busy_exactly_when_all_its_ranks_are_over_one(
    share: float | None, tokens: int | None, ranks: list[tuple[int, int]]
) -> None:
    own = Thresholds(share, tokens)
    loads = [RankLoad(blocks, 20, prefill) for blocks, prefill in ranks]

    over = [
        (share is not None and blocks / 20 > share) or (tokens is not None and prefill > tokens)
        for blocks, prefill in ranks
    ]
    assert own.busy(loads) is (bool(ranks) and all(over))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({BLOCKS: 1.01}, "active_decode_blocks_threshold must be between 0.0 and 1.0, got 1.01"),
        ({BLOCKS: float("nan")}, "active_decode_blocks_threshold must be between 0.0 and 1.0, got nan"),
        ({TOKENS: -1}, "active_prefill_tokens_threshold must be at least 0, got -1"),
        (
            {FRACTION: float("inf")},
            "active_prefill_tokens_threshold_frac must be a finite value greater than or equal to 0.0, got inf",
        ),
    ],
)
def test_a_value_out_of_range_is_named(changes: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_changes(changes)


def test_values_at_the_ends_of_the_range_are_fine() -> None:
    check_changes({BLOCKS: 0, TOKENS: 0, FRACTION: 0})
    check_changes({BLOCKS: 1, TOKENS: 2**64, FRACTION: 1e9})


class Frontends:
    """Books over one store, and the models that each was told have changed."""

    def __init__(self) -> None:
        self.store = MemoryDiscovery(PluginConfig(), Metrics())
        self.told: list[str] = []
        self.books: list[ThresholdBook] = []

    def book(self, namespace: str = "n", **options: Any) -> ThresholdBook:
        known: dict[str, Any] = {"common": Thresholds(0.9, 500), "models": {}, "armed": True}
        book = ThresholdBook(self.store, namespace, changed=self.told.append, **(known | options))
        book.start()
        self.books.append(book)
        return book

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.002)


@pytest.fixture
async def frontends() -> AsyncIterator[Frontends]:
    made = Frontends()
    yield made
    for book in made.books:
        await book.aclose()
        await book.aclose()
    await made.store.aclose()


async def test_a_model_has_its_own_values_over_the_common_ones(frontends: Frontends) -> None:
    book = frontends.book(models={"m": {TOKENS: 7}, "open": {BLOCKS: None, TOKENS: None}})

    assert book.of("any") == Thresholds(0.9, 500)
    assert book.of("m") == Thresholds(0.9, 7)
    assert not book.of("open")


async def test_thresholds_set_at_one_frontend_apply_at_all(frontends: Frontends) -> None:
    one, other = frontends.book(), frontends.book()

    assert await one.change("Qwen/Qwen3-0.6B", {BLOCKS: 0.5}) == Thresholds(0.5, 500)

    await frontends.until(lambda: other.of("Qwen/Qwen3-0.6B") == Thresholds(0.5, 500))
    assert list(other.changed_models()) == ["Qwen/Qwen3-0.6B"]
    assert other.of("Qwen") == Thresholds(0.9, 500)
    assert set(frontends.told) == {"Qwen/Qwen3-0.6B"}


async def test_concurrent_threshold_changes_are_merged(frontends: Frontends) -> None:
    one, other = frontends.book(), frontends.book()

    await asyncio.gather(
        one.change("m", {BLOCKS: 0.1}), other.change("m", {TOKENS: None}), one.change("m", {FRACTION: 2})
    )

    for book in (one, other):
        await frontends.until(lambda: book.of("m") == Thresholds(0.1, None, 2))  # noqa: B023 - used at once


async def test_a_later_frontend_has_the_set_thresholds(frontends: Frontends) -> None:
    await frontends.book().change("m", {TOKENS: 1})

    late = frontends.book()

    await frontends.until(lambda: late.of("m") == Thresholds(0.9, 1))


async def test_set_thresholds_can_be_reset(frontends: Frontends) -> None:
    one, other = frontends.book(), frontends.book()
    await one.change("m", {TOKENS: 1, BLOCKS: None})
    await frontends.until(lambda: other.of("m") == Thresholds(None, 1))

    assert await other.reset("m") == Thresholds(0.9, 500)

    await frontends.until(lambda: one.of("m") == Thresholds(0.9, 500))
    assert list(one.changed_models()) == []


async def test_an_out_of_range_value_changes_nothing(frontends: Frontends) -> None:
    book = frontends.book()

    with pytest.raises(ValueError, match="must be between"):
        await book.change("m", {TOKENS: 1, BLOCKS: 2})

    assert book.of("m") == Thresholds(0.9, 500)


async def test_namespaces_do_not_share_values(frontends: Frontends) -> None:
    one, other = frontends.book("a"), frontends.book("b")
    await one.change("m", {TOKENS: 1})
    await other.change("n", {TOKENS: 2})

    assert (one.of("n").active_prefill_tokens_threshold, other.of("m").active_prefill_tokens_threshold) == (500, 500)


@pytest.mark.parametrize("value", [b"not json", b'"text"', b"7.5e400", b"-1"])
async def test_a_record_that_makes_no_sense_is_left_out(frontends: Frontends, value: bytes) -> None:
    book = frontends.book()
    frontends.store.put("v1/values/n/busy_threshold/m/active_prefill_tokens_threshold", value)
    frontends.store.put("v1/values/n/busy_threshold/m/of_a_later_version", b"1")

    await book.change("n", {TOKENS: 1})

    assert book.of("m") == Thresholds(0.9, 500)
