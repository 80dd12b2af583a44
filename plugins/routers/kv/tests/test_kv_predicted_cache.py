"""Without events: the blocks of routed prompts, for as long as they are taken to be held."""

from __future__ import annotations

from dynamo_core.kv import Rank, sequence_hashes
from dynamo_plugin_router_kv.index import KvIndex
from dynamo_plugin_router_kv.predicted_cache import PredictedCache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

prompts = st.lists(st.integers(1, 3), min_size=1, max_size=7)
ranks = st.tuples(st.integers(1, 2), st.integers(0, 1))

TTL = 10.0
LIMIT = 12


def blocks_of(prompt: list[int]) -> tuple[list[int], list[int]]:
    blocks = [1000 + block for block in prompt]
    return blocks, sequence_hashes(blocks)


def overlap(index: KvIndex, rank: Rank, prompt: list[int]) -> int:
    bit = index.bit(rank)
    return max((depth for depth, members in index.overlaps(blocks_of(prompt)[1]) if members & bit), default=0)


class GuessMachine(RuleBasedStateMachine):
    """The model: of each rank, every prefix with its time and turn of last use.

    The oldest go first, the deepest of one prompt before the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.turn = 0
        self.index = KvIndex()
        self.predicted = PredictedCache(self.index, TTL, LIMIT)
        self.used: dict[Rank, dict[tuple[int, ...], tuple[float, int, int]]] = {}

    @rule(rank=ranks, prompt=prompts)
    def route(self, rank: Rank, prompt: list[int]) -> None:
        self.turn += 1
        own = self.used.setdefault(rank, {})
        for depth in range(1, len(prompt) + 1):
            own[tuple(prompt[:depth])] = (self.now, self.turn, -depth)
        while len(own) > LIMIT:
            del own[min(own, key=own.__getitem__)]

        self.predicted.routed(rank, *blocks_of(prompt), self.now)

    @rule(seconds=st.floats(0, 15))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds
        for own in self.used.values():
            for prefix in [prefix for prefix, (at, _, _) in own.items() if at + TTL <= self.now]:
                del own[prefix]

        self.predicted.expire(self.now)

    @rule(worker=st.integers(1, 2))
    def leave(self, worker: int) -> None:
        self.used = {rank: own for rank, own in self.used.items() if rank[0] != worker}

        self.predicted.forget({worker})

    @rule(rank=ranks, prompt=prompts)
    def ask(self, rank: Rank, prompt: list[int]) -> None:
        own = self.used.get(rank, {})
        expected = max((len(prefix) for prefix in own if prefix == tuple(prompt[: len(prefix)])), default=0)
        assert overlap(self.index, rank, prompt) == expected

    @invariant()
    def all_that_is_kept_is_found_and_nothing_else(self) -> None:
        for rank, own in self.used.items():
            assert self.index.held(rank) == len(own)
            assert all(overlap(self.index, rank, list(prefix)) == len(prefix) for prefix in own)

    def teardown(self) -> None:
        self.predicted.expire(self.now + TTL)
        while self.index.sweep(1000):
            pass
        assert self.index.blocks == 0


TestGuessAgainstAModel = GuessMachine.TestCase
TestGuessAgainstAModel.settings = settings(stateful_step_count=50, deadline=None)


def test_a_rank_is_never_taken_to_hold_more_than_it_has_room_for() -> None:
    index = KvIndex()
    predicted = PredictedCache(index, TTL, LIMIT)
    prompt = list(range(20))

    predicted.routed((1, 0), *blocks_of(prompt), 0.0, capacity=5)
    assert overlap(index, (1, 0), prompt) == 5

    predicted.routed((1, 0), *blocks_of([99, 98]), 0.0, capacity=5)
    assert overlap(index, (1, 0), prompt) == 3
    assert overlap(index, (1, 0), [99, 98]) == 2
