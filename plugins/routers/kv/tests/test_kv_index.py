"""What the index knows of caches: against a model that keeps plain sets, and against what engines do."""

from __future__ import annotations

import random

import pytest
from dynamo_core import KvBlock, KvCleared, KvEvent, KvRemoved, KvStored
from dynamo_core.kv import Rank, block_hashes, sequence_hashes, to_signed
from dynamo_core.protocol import Instance
from dynamo_plugin_router_kv.candidates import Candidates
from dynamo_plugin_router_kv.index import KvIndex, Status
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

#: Prompts over a small alphabet of blocks, so that they share beginnings and come again.
prompts = st.lists(st.integers(1, 2), min_size=1, max_size=6)
ranks = st.tuples(st.integers(1, 3), st.integers(0, 1))


def chain_of(prompt: list[int]) -> list[int]:
    return sequence_hashes([1000 + block for block in prompt])


def named(prompt: list[int], salt: int = 0) -> list[int]:
    """Return the names that an engine has for the blocks of a prompt: not the hashes that routers use."""
    return [hash((salt, tuple(prompt[: depth + 1]))) % 2**64 for depth in range(len(prompt))]


def overlaps(index: KvIndex, prompt: list[int], known: list[Rank]) -> dict[Rank, int]:
    found: dict[Rank, int] = {}
    bits = {index.bit(rank): rank for rank in known if index.bit(rank)}
    for depth, members in index.overlaps(chain_of(prompt)):
        for bit, rank in bits.items():
            if members & bit:
                assert rank not in found
                found[rank] = depth
    return found


class IndexMachine(RuleBasedStateMachine):
    """The model: of each rank the set of prefixes that it holds, by the engine's names for them."""

    def __init__(self) -> None:
        super().__init__()
        self.index = KvIndex()
        self.held: dict[Rank, dict[int, tuple[int, ...]]] = {}

    @rule(rank=ranks, prompt=prompts, start=st.integers(0, 5), salt=st.integers(0, 1))
    def store(self, rank: Rank, prompt: list[int], start: int, salt: int) -> None:
        names = named(prompt, salt)
        start = min(start, len(prompt) - 1)
        blocks = [KvBlock(to_signed(name), 1000 + block) for name, block in zip(names, prompt, strict=True)][start:]
        parent = names[start - 1] if start else None

        status = self.index.apply(rank, KvEvent(0, KvStored(blocks=blocks, parent_hash=parent)))

        own = self.held.setdefault(rank, {})
        if parent is not None and parent not in own:
            assert status is Status.PARENT_NOT_FOUND
            return
        assert status is Status.OK
        for depth in range(start, len(prompt)):
            own[names[depth]] = tuple(prompt[: depth + 1])

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), unknown=st.booleans())
    def remove(self, data: st.DataObject, unknown: bool) -> None:
        rank = data.draw(st.sampled_from([rank for rank, own in self.held.items() if own]))
        names = data.draw(st.lists(st.sampled_from(sorted(self.held[rank])), min_size=1, max_size=4, unique=True))

        status = self.index.apply(rank, KvEvent(0, KvRemoved(block_hashes=[*names, 7] if unknown else names)))

        assert status is (Status.BLOCK_NOT_FOUND if unknown else Status.OK)
        for name in names:
            del self.held[rank][name]

    @rule(rank=ranks)
    def clear(self, rank: Rank) -> None:
        assert self.index.apply(rank, KvEvent(0, KvCleared())) is Status.OK
        self.held.pop(rank, None)

    @rule(limit=st.integers(1, 5))
    def sweep(self, limit: int) -> None:
        self.index.sweep(limit)

    @rule(prompt=prompts)
    def ask(self, prompt: list[int]) -> None:
        self.check(tuple(prompt))

    @invariant()
    def whatever_is_held_is_found_as_far_as_there_is_no_hole(self) -> None:
        for prompt in {prefix for own in self.held.values() for prefix in own.values()}:
            self.check(prompt)

    @invariant()
    def a_rank_counts_as_one_with_holes_exactly_while_it_has_some(self) -> None:
        for rank, own in self.held.items():
            prefixes = set(own.values())
            holes = any(prefix[:-1] not in prefixes for prefix in prefixes if len(prefix) > 1)
            assert bool(self.index._broken & self.index.bit(rank)) is holes

    @invariant()
    def as_many_blocks_are_counted(self) -> None:
        assert all(self.index.held(rank) == len(own) for rank, own in self.held.items())

    def check(self, prompt: tuple[int, ...]) -> None:
        expected: dict[Rank, int] = {}
        for rank, own in self.held.items():
            prefixes = set(own.values())
            depth = 0
            while depth < len(prompt) and prompt[: depth + 1] in prefixes:
                depth += 1
            if depth:
                expected[rank] = depth
        assert overlaps(self.index, list(prompt), list(self.held)) == expected

    def teardown(self) -> None:
        for rank in list(self.held):
            self.index.clear(rank)
        while self.index.sweep(1000):
            pass
        assert self.index.blocks == 0
        assert self.index.overlaps(chain_of([1])) == []


TestIndexAgainstAModel = IndexMachine.TestCase
TestIndexAgainstAModel.settings = settings(stateful_step_count=50, deadline=None)


@pytest.mark.full
def test_the_index_agrees_with_the_model_for_long() -> None:
    run_state_machine_as_test(IndexMachine, settings=settings(max_examples=500, stateful_step_count=100, deadline=None))


def test_a_parent_may_be_of_another_sign_than_the_block_it_names() -> None:
    index, rank = KvIndex(), (1, 0)
    name = 2**64 - 5

    assert index.store(rank, None, [KvBlock(name, 11)]) is Status.OK
    assert index.store(rank, to_signed(name), [KvBlock(3, 12)]) is Status.OK
    assert index.remove(rank, [to_signed(name)]) is Status.OK
    assert index.overlaps(sequence_hashes([11, 12])) == []


def test_blocks_of_an_engine_with_names_of_its_own_are_found_by_the_tokens_of_a_prompt() -> None:
    tokens = list(range(100))
    blocks = block_hashes(tokens, 16)
    index, rank = KvIndex(), (7, 0)
    names = [random.Random(1).getrandbits(64) + at for at in range(len(blocks))]

    index.store(rank, None, [KvBlock(names[0], blocks[0])])
    index.store(rank, names[0], [KvBlock(name, block) for name, block in zip(names[1:4], blocks[1:4], strict=True)])

    assert index.overlaps(sequence_hashes(blocks)) == [(4, index.bit(rank))]
    assert index.overlaps(sequence_hashes(block_hashes([*tokens[:40], 7, *tokens[41:]], 16))) == [(2, index.bit(rank))]


def test_a_block_name_reused_for_other_content_is_invalid() -> None:
    index, rank = KvIndex(), (1, 0)
    index.store(rank, None, [KvBlock(1, 11), KvBlock(2, 12)])

    assert index.store(rank, None, [KvBlock(2, 13)]) is Status.INVALID

    assert index.overlaps(sequence_hashes([11, 12])) == [(2, index.bit(rank))]
    assert index.overlaps([13]) == []


def test_many_ranks_at_different_depths_are_all_found() -> None:
    index = KvIndex()
    blocks = [random.Random(3).getrandbits(64) + at for at in range(512)]
    chain = sequence_hashes(blocks)
    depths = {(worker, 0): random.Random(worker).choice([0, 12, 12, 100, 512, worker]) for worker in range(64)}
    for rank, depth in depths.items():
        if depth:
            index.store(rank, None, [KvBlock(*pair) for pair in zip(chain[:depth], blocks[:depth], strict=True)])
    everybody = Candidates([(Instance(instance_id=rank[0]), rank) for rank in depths])

    assert everybody.overlaps(index, index.overlaps(chain)) == list(depths.values())


def test_bits_of_removed_ranks_are_reused_after_a_sweep() -> None:
    index = KvIndex()
    for turn in range(100):
        index.store((turn, 0), None, [KvBlock(1, 11), KvBlock(2, 12)])
        assert index.overlaps(sequence_hashes([11, 12])) == [(2, index.bit((turn, 0)))]
        index.clear((turn, 0))
        assert index.overlaps([11]) == []
        while index.sweep(1):
            pass

    assert index.bit((99, 0)) == 0
    index.store((5, 0), None, [KvBlock(1, 11)])
    assert index.bit((5, 0)) == 1
