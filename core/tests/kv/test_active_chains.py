"""What the requests of many ranks hold, against a model that keeps their blocks as sets."""

from __future__ import annotations

import pytest
from dynamo_core.kv import sequence_hashes
from dynamo_core.kv.chains import ActiveChains, Rank, depths
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

ranks = st.sampled_from([(1, 0), (1, 1), (2, 0)])
prompts = st.lists(st.integers(1, 3), max_size=9)


def chain_of(prompt: list[int]) -> list[int]:
    return sequence_hashes([1000 + block for block in prompt])


class ActiveChainsModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.chains = ActiveChains()
        self.model: dict[Rank, dict[str, tuple[list[int], int]]] = {}
        self.unhashed: dict[tuple[Rank, str], int] = {}
        self.number = 0

    @rule(rank=ranks, prompt=prompts, tokens=st.integers(0, 50), unhashed=st.integers(0, 3))
    def add(self, rank: Rank, prompt: list[int], tokens: int, unhashed: int) -> None:
        self.number += 1
        chain = chain_of(prompt)
        new = set(chain) - self.held(rank)
        assert self.chains.add(rank, f"r{self.number}", chain, tokens, unhashed) == len(new) + unhashed
        self.model.setdefault(rank, {})[f"r{self.number}"] = (chain, tokens)
        self.unhashed[rank, f"r{self.number}"] = unhashed

    @rule(rank=ranks, blocks=st.integers(0, 4))
    def add_one_that_shares_nothing(self, rank: Rank, blocks: int) -> None:
        self.number += 1
        chain = list(range(-self.number * 10, -self.number * 10 + blocks))
        self.chains.add(rank, f"r{self.number}", chain, 1)
        self.model.setdefault(rank, {})[f"r{self.number}"] = (chain, 1)

    @precondition(lambda self: any(self.model.values()))
    @rule(data=st.data(), again=st.booleans())
    def complete_prefill(self, data: st.DataObject, again: bool) -> None:
        rank, name = data.draw(st.sampled_from(self.names()))
        for _ in range(1 + again):
            assert self.chains.complete_prefill(rank, name)
        self.model[rank][name] = (self.model[rank][name][0], 0)

    @precondition(lambda self: any(self.model.values()))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        rank, name = data.draw(st.sampled_from(self.names()))
        assert self.chains.free(rank, name)
        del self.model[rank][name]
        self.unhashed.pop((rank, name), None)
        assert not self.chains.free(rank, name)
        assert not self.chains.complete_prefill(rank, name)

    @precondition(lambda self: any(self.model.values()))
    @rule(data=st.data())
    def add_twice(self, data: st.DataObject) -> None:
        rank, name = data.draw(st.sampled_from(self.names()))
        with pytest.raises(KeyError):
            self.chains.add(rank, name, [1], 5)

    @rule(prompt=prompts)
    def ask(self, prompt: list[int]) -> None:
        everywhere = [(1, 0), (1, 1), (2, 0), (3, 0)]
        chain = chain_of(prompt)
        expected = []
        for rank in everywhere:
            held = self.held(rank)
            shared = next((at for at, block in enumerate(chain) if block not in held), len(chain))
            expected.append((self.tokens(rank), len(held), shared))
        assert self.chains.loads(everywhere, chain) == expected

    @invariant()
    def every_figure_is_that_of_the_model(self) -> None:
        assert set(self.chains.ranks) == {rank for rank, own in self.model.items() if own}
        assert self.chains.distinct == len(set().union(*(self.held(rank) for rank in self.model)))
        for rank, own in self.model.items():
            assert self.chains.requests(rank) == len(own)
            assert self.chains.prefill_tokens(rank) == self.tokens(rank)
            assert self.chains.blocks(rank) == len(self.held(rank))
            unhashed = sum(blocks for (where, _), blocks in self.unhashed.items() if where == rank)
            assert self.chains.held(rank) == len(self.held(rank)) + unhashed

    def names(self) -> list[tuple[Rank, str]]:
        return [(rank, name) for rank, own in self.model.items() for name in own]

    def held(self, rank: Rank) -> set[int]:
        return {block for chain, _ in self.model.get(rank, {}).values() for block in chain}

    def tokens(self, rank: Rank) -> int:
        return sum(tokens for _, tokens in self.model.get(rank, {}).values())

    def teardown(self) -> None:
        for rank, name in self.names():
            self.chains.free(rank, name)
        assert not self.chains.ranks
        assert self.chains.distinct == 0


TestActiveChains = ActiveChainsModel.TestCase
TestActiveChains.settings = settings(stateful_step_count=50, deadline=None)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(1, 20), st.integers(0, 2**12 - 1))
def test_depths_equal_each_members_reach(reaches: list[int], length: int, among: int) -> None:
    chain = list(range(length))
    sets = {at: sum(1 << who for who, reach in enumerate(reaches) if reach > at) for at in chain}

    found = {bit: depth for depth, members in depths(chain, sets, among) for bit in range(12) if members >> bit & 1}

    assert found == {who: min(reach, length) for who, reach in enumerate(reaches) if reach and among >> who & 1}
