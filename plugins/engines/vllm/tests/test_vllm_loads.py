"""The load of each rank, as routers are told of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from dynamo_core import ActiveLoad
from dynamo_plugin_engine_vllm.load import Rank, least_loaded, ranks_of


def stats(usage: float, queries: int = 0, hits: int = 0) -> SimpleNamespace:
    found = SimpleNamespace(queries=queries, hits=hits)
    return SimpleNamespace(kv_cache_usage=usage, prefix_cache_stats=found, num_running_reqs=1, num_waiting_reqs=0)


@pytest.fixture
def rank() -> Rank:
    return Rank(2, worker_id=7, blocks=100)


def told(rank: Rank) -> list[ActiveLoad]:
    loads: list[ActiveLoad] = []
    rank.source().subscribe(loads.append)
    return loads


def test_a_prompt_waits_until_its_first_token_is_there(rank: Rank) -> None:
    loads = told(rank)
    with rank.request(40) as request_load:
        assert loads[-1].active_prefill_tokens == 40
        request_load.prefilled()
        assert loads[-1].active_prefill_tokens == 0
        request_load.prefilled()
    assert [load.active_prefill_tokens for load in loads] == [40, 0, 0]
    assert (loads[-1].worker_id, loads[-1].dp_rank) == (7, 2)


def test_used_blocks_are_vllms_share_of_all_blocks(rank: Rank) -> None:
    loads = told(rank)
    with rank.request(1):
        rank.record(stats(0.25))
        assert (loads[-1].kv_used_blocks, loads[-1].active_decode_blocks) == (25, 25)


def test_the_load_is_zero_once_no_request_runs(rank: Rank) -> None:
    loads = told(rank)
    with rank.request(10):
        rank.record(stats(0.5))
    assert (loads[-1].kv_used_blocks, loads[-1].active_prefill_tokens) == (0, 0)

    rank.record(stats(0.5))
    assert loads[-1].kv_used_blocks == 0


def test_prefix_statistics_are_of_one_step_each_and_are_added_up(rank: Rank) -> None:
    rank.record(stats(0.0, queries=100, hits=64))
    rank.record(stats(0.0, queries=50, hits=32))

    assert (rank.queried_tokens, rank.hit_tokens) == (150, 96)


def test_a_request_without_a_rank_goes_where_the_fewest_are() -> None:
    ranks = [Rank(number, 1, 1) for number in range(3)]
    with ranks[0].request(1), ranks[1].request(1):
        assert least_loaded(ranks).number == 2
    assert least_loaded(ranks).number == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, range(1)),
        ({"data_parallel_size": 4}, range(4)),
        ({"data_parallel_size": 4, "data_parallel_rank": 2, "data_parallel_external_lb": True}, range(2, 3)),
        (
            {
                "data_parallel_size": 8,
                "data_parallel_rank": 4,
                "data_parallel_size_local": 2,
                "data_parallel_hybrid_lb": True,
            },
            range(4, 6),
        ),
    ],
)
def test_the_ranks_are_those_that_this_engine_has(options: dict[str, object], expected: range) -> None:
    defaults = {
        "data_parallel_size": 1,
        "data_parallel_rank": 0,
        "data_parallel_size_local": 1,
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
    }
    assert ranks_of(SimpleNamespace(**defaults | options)) == expected
