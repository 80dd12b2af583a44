from __future__ import annotations

import pytest
from dynamo_core.kv import sequence_hashes
from dynamo_plugin_router_slot_tracker.sequences import ActiveSequences, prefix_keys
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

#: Few different blocks, so that requests share prefixes.
chains = st.lists(st.integers(1, 3), max_size=5).map(sequence_hashes)
raw = st.lists(st.integers(1, 4), max_size=5)
ids = st.sampled_from(["a", "b", "c", "d"])
tokens = st.integers(0, 100)


class ActiveSequencesModel(RuleBasedStateMachine):
    """Compares the accounting with one that works everything out anew from the list of requests."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = ActiveSequences()
        self.now = 0.0
        self.added: dict[str, float] = {}
        self.active: dict[str, list[int]] = {}
        self.prefill: dict[str, int] = {}
        #: Requests whose hashes are no chain: any numbers, with repeats.
        self.free_form: set[str] = set()

    @rule(request=ids, hashes=raw, new_tokens=tokens)
    def add_any_hashes(self, request: str, hashes: list[int], new_tokens: int) -> None:
        if request not in self.active:
            self.free_form.add(request)
        self.add(request, hashes, new_tokens)

    @rule(request=ids, hashes=chains, new_tokens=tokens)
    def add_chain(self, request: str, hashes: list[int], new_tokens: int) -> None:
        if request not in self.active:
            self.free_form.discard(request)
        self.add(request, hashes, new_tokens)

    def add(self, request: str, hashes: list[int], new_tokens: int) -> None:
        if request in self.active:
            with pytest.raises(KeyError):
                self.sequences.add(request, hashes, new_tokens)
            return
        self.now += 1
        self.sequences.add(request, hashes, new_tokens, self.now)
        self.added[request] = self.now
        self.active[request] = hashes
        self.prefill[request] = new_tokens

    @rule(request=ids)
    def complete_prefill(self, request: str) -> None:
        assert self.sequences.complete_prefill(request) == (request in self.active)
        self.prefill.pop(request, None)

    @rule(request=ids)
    def free(self, request: str) -> None:
        assert self.sequences.free(request) == (request in self.active)
        self.active.pop(request, None)
        self.prefill.pop(request, None)

    @rule(age=st.integers(0, 4))
    def expire(self, age: int) -> None:
        before = self.now - age
        old = [request for request in self.active if self.added[request] < before]

        assert self.sequences.expire(before) == sorted(old, key=self.added.__getitem__)

        for request in old:
            del self.active[request]
            self.prefill.pop(request, None)

    @rule(hashes=chains | raw)
    def potential_blocks(self, hashes: list[int]) -> None:
        held = self.held()
        longest = next((at for at, block in enumerate(hashes) if block not in held), len(hashes))

        assert self.sequences.potential_blocks(hashes) == len(held) + len(hashes) - longest

    @rule(hashes=chains)
    def potential_blocks_of_a_chain_are_the_blocks_after_adding_it(self, hashes: list[int]) -> None:
        # Only true if what is held are chains too: then a shared block implies all blocks before it.
        if self.free_form & set(self.active):
            return
        potential = self.sequences.potential_blocks(hashes)

        self.sequences.add("probe", hashes, 0)

        assert self.sequences.blocks == potential
        assert self.sequences.free("probe")

    def held(self) -> set[int]:
        return {block for hashes in self.active.values() for block in hashes}

    @invariant()
    def figures_are_those_of_the_requests(self) -> None:
        assert self.sequences.blocks == len(self.held())
        assert self.sequences.requests == len(self.active)
        assert self.sequences.prefill_tokens == sum(self.prefill.values())
        assert all((request in self.sequences) == (request in self.active) for request in "abcd")
        assert {request: self.sequences.get(request) for request in "abcd"} == dict.fromkeys("abcd") | {
            one.request_id: one for one in self.sequences
        }
        assert [(one.request_id, list(one.hashes), one.prefill_tokens, one.added) for one in self.sequences] == [
            (request, list(dict.fromkeys(hashes)), self.prefill.get(request, 0), self.added[request])
            for request, hashes in self.active.items()
        ]

    def teardown(self) -> None:
        for request in list(self.active):
            self.sequences.free(request)
        assert (self.sequences.blocks, self.sequences.requests, self.sequences.prefill_tokens) == (0, 0, 0)
        assert not self.sequences._blocks


TestActiveSequences = ActiveSequencesModel.TestCase


def test_prefixes_of_small_numbers_differ() -> None:
    prefixes = [[], [0], [0, 0], [0, 1], [1], [1, 0], [-1], [-2], [0, -1], [-1, 0]]

    keys = {tuple(prefix): prefix_keys(prefix) for prefix in prefixes}

    assert [len(key) for key in keys.values()] == [len(prefix) for prefix in prefixes]
    assert len({key[-1] for key in keys.values() if key}) == len(prefixes) - 1
