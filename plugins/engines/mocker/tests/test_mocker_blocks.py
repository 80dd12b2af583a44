"""The KV cache of one rank: counting, sharing, eviction, events."""

from __future__ import annotations

from dynamo_core import KvCleared, KvEvent, KvRemoved, KvStored
from dynamo_core.kv import block_hashes, sequence_hashes
from dynamo_plugin_engine_mocker.block_table import BlockTable, PrefixHashes
from dynamo_plugin_engine_mocker.blocks import BlockPool
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

SIZE = 2


class Listener:
    """Follows the events of a pool as a router would, and checks that they make sense."""

    def __init__(self, pool: BlockPool) -> None:
        self.events: list[KvEvent] = []
        #: Block -> the block before it.
        self.known: dict[int, int | None] = {}
        pool.subscribe(self)

    def __call__(self, event: KvEvent) -> None:
        assert event.event_id == len(self.events)
        self.events.append(event)
        match event.data:
            case KvStored(blocks, parent):
                assert blocks
                assert parent is None or parent in self.known, "stored behind a block that is not there"
                for block in blocks:
                    assert block.block_hash not in self.known, "stored twice"
                    self.known[block.block_hash] = parent
                    parent = block.block_hash
            case KvRemoved(hashes):
                for block_hash in hashes:
                    del self.known[block_hash]
                    assert block_hash not in self.known.values(), "removed before the blocks behind it"
            case KvCleared():
                self.known.clear()


def table(pool: BlockPool, prompt: list[int], answer: list[int] | None = None) -> BlockTable:
    return BlockTable(pool, SIZE, PrefixHashes(prompt, [] if answer is None else answer, SIZE, None))


def use(pool: BlockPool, prompt: list[int]) -> int:
    """Reserve, compute and release a prompt; how many of its blocks were there before."""
    held = table(pool, prompt)
    matched = held.match(len(prompt))
    assert held.reserve(len(prompt), matched)
    held.complete(len(prompt))
    held.release()
    return matched


@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    answer=st.lists(st.integers(0, 9), max_size=30),
    size=st.integers(1, 7),
    lora=st.none() | st.just("a"),
)
def test_hashes_of_an_answer_are_those_of_the_same_tokens_in_a_prompt(
    prompt: list[int], answer: list[int], size: int, lora: str | None
) -> None:
    whole = prompt + answer
    hashes = PrefixHashes(prompt, answer, size, lora)

    hashes.extend(len(whole) // size)

    assert hashes.blocks == block_hashes(whole, size, lora_name=lora)
    assert hashes.chain == sequence_hashes(hashes.blocks)


def test_a_block_is_stored_once_with_its_own_and_its_chained_hash() -> None:
    pool = BlockPool(10, dp_rank=3)
    listener = Listener(pool)

    use(pool, [1, 2, 3, 4, 5])
    use(pool, [1, 2, 3, 4, 5])
    use(pool, [1, 2, 9, 9, 5])

    local, other = block_hashes([1, 2, 3, 4], SIZE), block_hashes([1, 2, 9, 9], SIZE)
    chain, fork = sequence_hashes(local), sequence_hashes(other)
    first, second = listener.events
    assert isinstance(first.data, KvStored)
    assert isinstance(second.data, KvStored)
    assert (first.dp_rank, first.data.parent_hash) == (3, None)
    assert [(block.block_hash, block.tokens_hash) for block in first.data.blocks] == [*zip(chain, local, strict=True)]
    assert second.data.parent_hash == chain[0]
    assert [(block.block_hash, block.tokens_hash) for block in second.data.blocks] == [(fork[1], other[1])]


def test_the_prefix_unused_for_longest_is_evicted_first_and_from_its_end() -> None:
    pool = BlockPool(6)
    listener = Listener(pool)
    use(pool, [1, 1, 2, 2])
    use(pool, [3, 3, 4, 4])
    use(pool, [1, 1, 2, 2, 0])

    held = table(pool, [5] * 6)
    held.reserve(6, 0)

    old = sequence_hashes(block_hashes([3, 3, 4, 4], SIZE))
    assert [event.data for event in listener.events if isinstance(event.data, KvRemoved)] == [KvRemoved([old[1]])]
    assert (pool.used, pool.cached, pool.free) == (3, 3, 0)
    held.grow()
    assert listener.events[-1].data == KvRemoved([old[0]])


def test_blocks_without_hashes_are_neither_shared_nor_cached_nor_announced() -> None:
    pool = BlockPool(4)
    listener = Listener(pool)
    held = BlockTable(pool, SIZE, None)

    assert held.match(5) == 0
    assert held.reserve(5, 0)
    assert held.complete(5) == 0
    held.release()
    held.release()

    assert (pool.used, pool.cached, pool.free, listener.events) == (0, 0, 4, [])


def test_clearing_drops_cached_blocks() -> None:
    pool = BlockPool(4)
    listener = Listener(pool)
    use(pool, [1, 1, 2, 2])

    pool.clear()

    assert isinstance(listener.events[-1].data, KvCleared)
    assert (pool.cached, pool.free) == (0, 4)
    assert use(pool, [1, 1, 2, 2]) == 0


class Holding:
    """A sequence of the model: its tokens, how many are computed, and its table."""

    def __init__(self, pool: BlockPool, prompt: list[int]) -> None:
        self.answer: list[int] = []
        self.prompt = prompt
        self.table = table(pool, prompt, self.answer)
        self.slots = 0
        self.computed = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def chain(self) -> list[int]:
        return sequence_hashes(block_hashes(self.tokens[: self.computed], SIZE))


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, are computed, grow, and go, in a cache that is too small; a plain model keeps count."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.listener = Listener(self.pool)
        self.holdings: list[Holding] = []

    @rule(target=held, prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def admit(self, prompt: list[int]) -> object:
        holding = Holding(self.pool, prompt)
        matched = holding.table.match(len(prompt))
        chain = sequence_hashes(block_hashes(prompt, SIZE))
        known = [block in self.listener.known for block in chain[: (len(prompt) - 1) // SIZE]]
        assert matched == (known.index(False) if False in known else len(known))
        revived = sum(self.pool.references(block) == 0 for block in chain[:matched])
        needed = -(-len(prompt) // SIZE) - matched
        room = self.pool.free + self.pool.cached - revived
        before = (self.pool.used, self.pool.cached, self.pool.free)

        reserved = holding.table.reserve(len(prompt), matched)

        assert reserved == (needed <= room)
        if not reserved:
            assert (self.pool.used, self.pool.cached, self.pool.free) == before
            return multiple()
        holding.slots = -(-len(prompt) // SIZE)
        holding.computed = matched * SIZE
        self.holdings.append(holding)
        return holding

    @rule(holding=held, count=st.integers(1, 6))
    def compute(self, holding: Holding, count: int) -> None:
        holding.computed = min(holding.computed + count, len(holding.tokens))
        holding.table.complete(holding.computed)

    @rule(holding=held, token=st.integers(0, 1))
    def produce(self, holding: Holding, token: int) -> None:
        if len(holding.tokens) == holding.slots * SIZE:
            room = self.pool.free + self.pool.cached > 0
            assert holding.table.grow() == room
            if not room:
                return
            holding.slots += 1
        holding.answer.append(token)

    @rule(holding=consumes(held))
    def release(self, holding: Holding) -> None:
        holding.table.release()
        holding.table.release()
        self.holdings.remove(holding)

    @invariant()
    def nothing_leaks_and_nothing_is_counted_twice(self) -> None:
        pool = self.pool
        references: dict[int, int] = {}
        for holding in self.holdings:
            assert list(holding.table.hashes) == holding.chain
            assert holding.table.shared + holding.table.private == holding.slots
            for before, block in zip([None, *holding.chain], holding.chain, strict=False):
                assert self.listener.known[block] == before, "told behind another block than its own"
                references[block] = references.get(block, 0) + 1
        private = sum(holding.slots - len(holding.chain) for holding in self.holdings)
        assert {block: pool.references(block) for block in references} == references
        assert pool.active == len(references)
        assert pool.used == len(references) + private
        assert pool.cached == len(self.listener.known.keys() - references)
        assert pool.free >= 0
        assert pool.free + pool.cached + pool.used == pool.total

    def teardown(self) -> None:
        for holding in self.holdings:
            holding.table.release()
        assert self.pool.used == 0
        assert self.pool.cached == len(self.listener.known)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(stateful_step_count=40, deadline=None)
