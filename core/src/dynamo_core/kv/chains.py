"""The active requests of many ranks, by the blocks of chained sequence hashes that they hold.

A sequence hash stands for its whole prefix, so a rank that holds a block holds all blocks before it. Instead of every
block of every request only the places are counted where requests part. A set of ranks is one int, with a bit for each:
`depths` finds by bisection how far along a chain each rank comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import count, islice
from typing import TypeAlias

#: A worker and one of its data-parallel ranks.
Rank: TypeAlias = tuple[int, int]

#: Of a rank: tokens to be prefilled, blocks held, and how many blocks of a chain, from its start, are among these.
Load: TypeAlias = tuple[int, int, int]

_NOTHING: Load = (0, 0, 0)

#: Below zero there are no hashes. One for all routers of a process, as they share one load tracker.
_private = count(-1, -1)


def unshared_blocks(number: int) -> list[int]:
    """Return ids of blocks that no other request shares. No two are alike in one process."""
    return list(islice(_private, number))


def depths(chain: Sequence[int], sets: Mapping[int, int], among: int) -> list[tuple[int, int]]:
    """Return how far the ranks in `among` come along `chain`: depths, each with the ranks that reach exactly it.

    `sets` maps each block to the set of ranks that hold it; restricted to `among` these sets must only shrink along the
    chain. Ranks that do not hold its first block are left out.
    """
    found: list[tuple[int, int]] = []
    get = sets.get
    at_low = get(chain[0], 0) & among if chain else 0
    if not at_low:
        return found
    low, last = 1, len(chain)
    at_high = get(chain[-1], 0) & at_low
    if at_high:
        found.append((last, at_high))
    #: Depths that some ranks do not reach, with the ranks that do; the nearest last.
    ahead = [(last, at_high)]
    while ahead:
        high, at_high = ahead[-1]
        if at_low == at_high:
            low = high
            ahead.pop()
        elif high - low == 1:
            found.append((low, at_low ^ at_high))
            low, at_low = high, at_high
            ahead.pop()
        else:
            middle = (low + high) >> 1
            ahead.append((middle, get(chain[middle - 1], 0) & at_low))
    return found


class _RankLoad:
    """One rank: its bit, and what its requests hold together."""

    __slots__ = ("bit", "blocks", "parts", "prefill_tokens", "requests", "unhashed")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.blocks = 0
        self.unhashed = 0
        self.prefill_tokens = 0
        #: The chain of each request, its tokens still to be prefilled, and its blocks that are not in the chain.
        self.requests: dict[str, tuple[Sequence[int], int, int]] = {}
        #: Blocks behind which requests part, or one ends and another goes on: how many there are beside the first, and
        #: the block's depth.
        self.parts: dict[int, tuple[int, int]] = {}


class ActiveChains:
    """Accounting of many ranks. Blocks that requests of a rank share count once on it."""

    __slots__ = ("_free", "_map", "_ranks", "_slots")

    def __init__(self) -> None:
        self._map: dict[int, int] = {}
        self._ranks: dict[Rank, _RankLoad] = {}
        self._free: list[int] = []
        self._slots = 0

    def __len__(self) -> int:
        """Return how many ranks have requests."""
        return len(self._ranks)

    @property
    def ranks(self) -> Collection[Rank]:
        """The ranks with requests."""
        return self._ranks.keys()

    @property
    def distinct(self) -> int:
        """The number of different blocks that all ranks hold together."""
        return len(self._map)

    def requests(self, rank: Rank) -> int:
        """Return the requests active on a rank."""
        load = self._ranks.get(rank)
        return len(load.requests) if load is not None else 0

    def prefill_tokens(self, rank: Rank) -> int:
        """Return tokens of a rank's requests whose prefill has not been completed."""
        load = self._ranks.get(rank)
        return load.prefill_tokens if load is not None else 0

    def blocks(self, rank: Rank) -> int:
        """Return how many different blocks the requests of a rank hold."""
        load = self._ranks.get(rank)
        return load.blocks if load is not None else 0

    def held(self, rank: Rank) -> int:
        """Return the same, and beside them the blocks that were added without a hash."""
        load = self._ranks.get(rank)
        return load.blocks + load.unhashed if load is not None else 0

    def loads(self, ranks: Sequence[Rank], chain: Sequence[int] = ()) -> list[Load]:
        """Return the load of each rank, as a router weighs it."""
        get = self._ranks.get
        shared = depths(chain, self._map, -1) if chain else []
        if not shared:
            return [
                (load.prefill_tokens, load.blocks, 0) if (load := get(rank)) is not None else _NOTHING for rank in ranks
            ]
        # Most ranks share the same, if anything: what an application begins all its prompts with.
        most, members = max(shared, key=_size)
        rest = {}
        for depth, others in shared:
            while others and others != members:
                bit = others & -others
                others ^= bit
                rest[bit] = depth
        deeper = rest.get
        return [
            (load.prefill_tokens, load.blocks, most if load.bit & members else deeper(load.bit, 0))
            if (load := get(rank)) is not None
            else _NOTHING
            for rank in ranks
        ]

    def add(self, rank: Rank, request_id: str, chain: Sequence[int], new_tokens: int, unhashed: int = 0) -> int:
        """Count a request in, with the sequence hashes of its blocks, each once and from the first.

        `unhashed` are further blocks, of which no hash is known. Return how many more blocks the rank holds now.

        Raises:
            KeyError: the request is already active on that rank.
        """
        load = self._ranks.get(rank)
        if load is None:
            load = self._begin(rank)
        elif request_id in load.requests:
            raise KeyError(request_id)
        load.requests[request_id] = (chain, new_tokens, unhashed)
        load.prefill_tokens += new_tokens
        load.unhashed += unhashed
        return self._hold(load, chain) + unhashed if chain else unhashed

    def _hold(self, load: _RankLoad, chain: Sequence[int]) -> int:
        """Put a request's blocks on a rank; how many it did not hold."""
        table, bit, length = self._map, load.bit, len(chain)
        if chain[0] not in table:
            # The most frequent case: no request of the rank begins like this.
            table.update(dict.fromkeys(chain, bit))
            load.blocks += length
            return length
        shared = _reach(chain, table, bit)
        if shared:
            beside, depth = load.parts.get(chain[shared - 1], (0, shared))
            load.parts[chain[shared - 1]] = (beside + 1, depth)
            if shared == length:
                return 0
        # Blocks that no rank holds need no look-up of their holders.
        known = _reach(chain, table, -1)
        for block in chain[shared:known]:
            table[block] |= bit
        table.update(dict.fromkeys(chain[known:], bit))
        load.blocks += length - shared
        return length - shared

    def complete_prefill(self, rank: Rank, request_id: str) -> bool:
        """Take the request's tokens off the prefill count; False if it is not active. Repeating it changes nothing."""
        load = self._ranks.get(rank)
        entry = load.requests.get(request_id) if load is not None else None
        if load is None or entry is None:
            return False
        chain, tokens, unhashed = entry
        if tokens:
            load.prefill_tokens -= tokens
            load.requests[request_id] = (chain, 0, unhashed)
        return True

    def free(self, rank: Rank, request_id: str) -> bool:
        """Count the request out; False if it was not active."""
        load = self._ranks.get(rank)
        entry = load.requests.pop(request_id, None) if load is not None else None
        if load is None or entry is None:
            return False
        chain, tokens, unhashed = entry
        load.prefill_tokens -= tokens
        load.unhashed -= unhashed
        if chain:
            self._release(load, chain)
        if not load.requests:
            del self._ranks[rank]
            self._free.append(load.bit)
        return True

    def _begin(self, rank: Rank) -> _RankLoad:
        if self._free:
            bit = self._free.pop()
        else:
            bit = 1 << self._slots
            self._slots += 1
        load = self._ranks[rank] = _RankLoad(bit)
        return load

    def _release(self, load: _RankLoad, chain: Sequence[int]) -> None:
        """Take the blocks off a rank that only one of its requests held, the end of a chain."""
        kept = self._kept(load, chain) if load.parts else 0
        own = chain
        if kept:
            own = chain[kept:]
            block = chain[kept - 1]
            beside, depth = load.parts[block]
            if beside > 1:
                load.parts[block] = (beside - 1, depth)
            else:
                del load.parts[block]
        table, bit = self._map, load.bit
        load.blocks -= len(own)
        others = _reach(own, table, ~bit)
        for block in own[:others]:
            table[block] ^= bit
        # In one go; what is given back is of no use.
        deque(map(table.__delitem__, own[others:]), maxlen=0)

    @staticmethod
    def _kept(load: _RankLoad, chain: Sequence[int]) -> int:
        """Return how many blocks of a chain stay when its request ends: up to its last fork from another."""
        parts = load.parts
        if len(parts) * 4 < len(chain):
            length = len(chain)
            return max(
                (depth for block, (_, depth) in parts.items() if depth <= length and chain[depth - 1] == block),
                default=0,
            )
        return next((len(chain) - at for at, block in enumerate(reversed(chain)) if block in parts), 0)


def _reach(chain: Sequence[int], sets: Mapping[int, int], members: int) -> int:
    """Return how far along a chain any of `members` comes; the sets must only shrink along it."""
    get = sets.get
    if not chain or not get(chain[0], 0) & members:
        return 0
    low, high = 1, len(chain)
    if get(chain[-1], 0) & members:
        return high
    while high - low > 1:
        middle = (low + high) >> 1
        if get(chain[middle - 1], 0) & members:
            low = middle
        else:
            high = middle
    return low


def _size(group: tuple[int, int]) -> int:
    return group[1].bit_count()
