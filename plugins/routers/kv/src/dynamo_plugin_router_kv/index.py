"""The index of KV blocks by rank: a flat map from sequence hashes to sets of ranks.

A sequence hash stands for its whole prefix, so the deepest block that a rank holds *without a hole before it* is its
overlap, and no tree is needed. As long as every block that a rank holds has its parent there too, that block is found
by jumping. Engines may evict from the middle of a sequence; ranks with such holes are known, and looked at block by
block instead, so that the answer is always the same.

A set of ranks is one int. Every rank has two bits, side by side: `held`, it has the block; and `child`, it has a block
that follows this one. All tables map ints to ints, of which the garbage collector need not look at any.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import xxhash
from dynamo_core import KvBlock, KvEvent, KvRemoved, KvStored
from dynamo_core.kv import SEED, Rank, depths

#: A depth in blocks, and the set of ranks that hold so many from the start of a prompt, and no more.
Depths: TypeAlias = list[tuple[int, int]]

_LOW = 2**64 - 1
_xxh3 = xxhash.xxh3_64_intdigest
_pack_pair = struct.Struct("<QQ").pack


class Status(enum.StrEnum):
    """The result of an event."""

    OK = "ok"
    PARENT_NOT_FOUND = "parent_block_not_found"
    BLOCK_NOT_FOUND = "block_not_found"
    INVALID = "invalid_block"


class _RankBlocks:
    """The blocks of one rank."""

    __slots__ = ("blocks", "child", "children", "copies", "held", "orphans")

    def __init__(self, slot: int) -> None:
        self.held = 1 << (2 * slot)
        self.child = self.held << 1
        #: The engine's own hash of a block -> its sequence hash, and above that the one of its parent; 0 for none.
        self.blocks: dict[int, int] = {}
        #: Sequence hash -> how many blocks of this rank follow it, where that is more than one.
        self.children: dict[int, int] = {}
        #: Sequence hash -> how many further blocks of the engine have the same contents and the same prefix.
        self.copies: dict[int, int] = {}
        #: How many blocks are held whose parent is not.
        self.orphans = 0


class KvIndex:
    """The blocks of all ranks of one pool. Not safe for threads; nothing here waits."""

    def __init__(self) -> None:
        self._map: dict[int, int] = {}
        self._ranks: dict[Rank, _RankBlocks] = {}
        #: The `held` bits of all ranks, and of those among them that have holes.
        self._live = 0
        self._broken = 0
        #: Ranks that are gone, whose bits are still in the map; and slots that are free.
        self._dead: deque[_RankBlocks] = deque()
        self._free: list[int] = []
        self._slots = 0
        #: Counts up whenever a rank is given another bit, or none.
        self.generation = 0

    @property
    def blocks(self) -> int:
        """The number of different blocks that are known, those not yet swept away included."""
        return len(self._map)

    def held(self, rank: Rank) -> int:
        """Return how many blocks a rank holds."""
        holder = self._ranks.get(rank)
        return len(holder.blocks) if holder is not None else 0

    def bit(self, rank: Rank) -> int:
        """Return the bit of a rank in the sets of `overlaps`; 0 if it has none. It holds until the rank is cleared."""
        holder = self._ranks.get(rank)
        return holder.held if holder is not None else 0

    # What ranks tell.

    def apply(self, rank: Rank, event: KvEvent) -> Status:
        """Apply an event of one rank."""
        data = event.data
        if type(data) is KvStored:
            return self.store(rank, data.parent_hash, data.blocks)
        if type(data) is KvRemoved:
            return self.remove(rank, data.block_hashes)
        self.clear(rank)
        return Status.OK

    def store(self, rank: Rank, parent_hash: int | None, blocks: Sequence[KvBlock]) -> Status:
        """Store blocks that follow one another, behind `parent_hash`, which the rank must hold; None: from the start.

        Hashes of the engine may be of either sign. A block that is there already stays where it is.
        """
        holder = self._ranks.get(rank)
        parent = 0
        if parent_hash is not None:
            known = holder.blocks.get(parent_hash & _LOW) if holder is not None else None
            if known is None:
                return Status.PARENT_NOT_FOUND
            parent = known & _LOW
        if not blocks:
            return Status.OK
        if holder is None:
            holder = self._add(rank)
        table, own, held, child = self._map, holder.blocks, holder.held, holder.child
        both = held | child
        get, name = table.get, own.setdefault
        #: Whether the parent was not known anywhere until just now.
        new = False
        for block in blocks:
            external, tokens = block.block_hash, block.tokens_hash
            if external < 0:
                external &= _LOW
            if tokens < 0:
                tokens &= _LOW
            sequence = _xxh3(_pack_pair(parent, tokens), SEED) if parent else tokens
            packed = parent << 64 | sequence
            before = name(external, packed)
            if before is not packed:
                if before != packed:
                    # The engine uses one name for two things; what comes behind cannot be placed.
                    return Status.INVALID
                parent, new = sequence, False
                continue
            ranks = get(sequence)
            if ranks is None:
                # Nearly always no other rank has it: the same few numbers serve for all such blocks.
                table[sequence] = held
                if new:
                    table[parent] = both
                elif parent:
                    self._add_child(holder, parent)
                parent, new = sequence, True
                continue
            if ranks & held:
                holder.copies[sequence] = holder.copies.get(sequence, 0) + 1
            else:
                table[sequence] = ranks | held
                if ranks & child:
                    self._remove_orphans(holder, holder.children.get(sequence, 1))
                if parent:
                    self._add_child(holder, parent)
            parent, new = sequence, False
        return Status.OK

    def _add_child(self, holder: _RankBlocks, parent: int) -> None:
        """Add a child to a block of a rank."""
        ranks = self._map[parent]
        if ranks & holder.child:
            holder.children[parent] = holder.children.get(parent, 1) + 1
        else:
            self._map[parent] = ranks | holder.child

    def remove(self, rank: Rank, block_hashes: Iterable[int]) -> Status:
        """Remove blocks that a rank holds no more, in any order; those that are not known are left out."""
        status = Status.OK
        holder = self._ranks.get(rank)
        if holder is None:
            return Status.BLOCK_NOT_FOUND
        table, own, held, child = self._map, holder.blocks, holder.held, holder.child
        for external in block_hashes:
            packed = own.pop(external & _LOW, None)
            if packed is None:
                status = Status.BLOCK_NOT_FOUND
                continue
            sequence, parent = packed & _LOW, packed >> 64
            if holder.copies and sequence in holder.copies:
                left = holder.copies[sequence] - 1
                if left:
                    holder.copies[sequence] = left
                else:
                    del holder.copies[sequence]
                continue
            ranks = table[sequence] ^ held
            if ranks & child:
                self._add_orphans(holder, holder.children.get(sequence, 1))
            if ranks:
                table[sequence] = ranks
            else:
                del table[sequence]
            if not parent:
                continue
            ranks = table[parent]
            if not ranks & held:
                self._remove_orphans(holder, 1)
            if holder.children and parent in holder.children:
                left = holder.children[parent] - 1
                if left > 1:
                    holder.children[parent] = left
                else:
                    del holder.children[parent]
                continue
            ranks ^= child
            if ranks:
                table[parent] = ranks
            else:
                del table[parent]
        return status

    def clear(self, rank: Rank) -> None:
        """Clear a rank, which is not found from now on; `sweep` tidies up after it."""
        holder = self._ranks.pop(rank, None)
        if holder is not None:
            self._live &= ~holder.held
            self._broken &= ~holder.held
            self._dead.append(holder)
            self.generation += 1

    def sweep(self, limit: int) -> bool:
        """Take up to `limit` blocks of ranks that are gone out of the map; whether there are more."""
        table = self._map
        while self._dead and limit > 0:
            holder = self._dead[0]
            others = ~(holder.held | holder.child)
            own = holder.blocks
            while own and limit > 0:
                packed = own.popitem()[1]
                limit -= 1
                # The parent too: it may be one that the rank no longer held.
                for sequence in (packed & _LOW, packed >> 64):
                    ranks = table.get(sequence)
                    if ranks is not None:
                        ranks &= others
                        if ranks:
                            table[sequence] = ranks
                        else:
                            del table[sequence]
            if not own:
                self._dead.popleft()
                self._free.append(holder.held.bit_length() >> 1)
        return bool(self._dead)

    # What requests ask.

    def overlaps(self, hashes: Sequence[int]) -> Depths:
        """Return how many of a prompt's sequence hashes each rank holds from the start.

        Ranks with none are left out.
        """
        if not hashes:
            return []
        get = self._map.get
        first = get(hashes[0], 0)
        whole = first & self._live & ~self._broken
        found: Depths = depths(hashes, self._map, whole) if whole else []
        if self._broken:
            ranks = first & self._broken
            depth = 1
            while ranks:
                further = ranks & get(hashes[depth], 0) if depth < len(hashes) else 0
                if further != ranks:
                    found.append((depth, ranks ^ further))
                    ranks = further
                depth += 1
        return found

    # Holes.

    def _add(self, rank: Rank) -> _RankBlocks:
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._slots
            self._slots += 1
        holder = self._ranks[rank] = _RankBlocks(slot)
        self._live |= holder.held
        self.generation += 1
        return holder

    def _add_orphans(self, holder: _RankBlocks, orphans: int) -> None:
        holder.orphans += orphans
        self._broken |= holder.held

    def _remove_orphans(self, holder: _RankBlocks, orphans: int) -> None:
        holder.orphans -= orphans
        if not holder.orphans:
            self._broken &= ~holder.held
