"""The KV block pool of one rank: held and cached blocks, and their events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from dynamo_core import KvBlock, KvCleared, KvEvent, KvRemoved, KvStored

KvListener = Callable[[KvEvent], None]


class BlockPool:
    """Counts blocks; they have no contents, so that none needs a number.

    A block is *free*; or *private* to one sequence, while it is being filled; or *active*: full, known by its sequence
    hash and held by one sequence or several; or *cached*: full, not held, kept until its place is needed. The
    one unused for longest goes first. A sequence holds all blocks of its prefix and gives back the last one first, so
    that a block never outlives those before it.
    """

    __slots__ = ("_active", "_cached", "_dp_rank", "_event_id", "_listener", "_private", "total")

    def __init__(self, total: int, dp_rank: int = 0) -> None:
        self.total = total
        self._dp_rank = dp_rank
        self._active: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._private = 0
        self._listener: KvListener | None = None
        self._event_id = 0

    @property
    def active(self) -> int:
        """Full blocks that sequences hold, each counted once."""
        return len(self._active)

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return len(self._active) + self._private

    @property
    def cached(self) -> int:
        """Full blocks that no sequence holds."""
        return len(self._cached)

    @property
    def free(self) -> int:
        """Blocks without contents."""
        return self.total - len(self._active) - len(self._cached) - self._private

    def references(self, block_hash: int) -> int | None:
        """Return how many sequences hold a full block; 0 if it is cached, None if it is not there."""
        if block_hash in self._cached:
            return 0
        return self._active.get(block_hash)

    def subscribe(self, listener: KvListener) -> None:
        """Send one listener every change of the full blocks from now on."""
        self._listener = listener

    def match(self, hashes: Iterable[int]) -> int:
        """Return how many blocks from the start of a chain of sequence hashes are there."""
        active, cached = self._active, self._cached
        count = 0
        for block_hash in hashes:
            if block_hash not in active and block_hash not in cached:
                break
            count += 1
        return count

    def acquire(self, hashes: Sequence[int], private: int) -> bool:
        """Take full blocks that are there, and so many to fill; all of them, or none if there are too few."""
        active, cached = self._active, self._cached
        revived = sum(block_hash in cached for block_hash in hashes)
        if private > self.free + len(cached) - revived:
            return False
        for block_hash in hashes:
            if block_hash in cached:
                del cached[block_hash]
                active[block_hash] = 1
            else:
                active[block_hash] += 1
        self._evict(private - self.free)
        self._private += private
        return True

    def fill(self, blocks: Sequence[KvBlock], parent: int | None) -> None:
        """Make as many private blocks full, one after the other behind `parent`.

        One that is there already under the same hash is held instead, and the private block is free.
        """
        active = self._active
        new: list[KvBlock] = []
        for block in blocks:
            block_hash = block.block_hash
            if block_hash in active:
                active[block_hash] += 1
            else:
                active[block_hash] = 1
                if block_hash in self._cached:
                    del self._cached[block_hash]
                else:
                    new.append(block)
            if not new:
                parent = block_hash
        self._private -= len(blocks)
        if new:
            self._publish(KvStored(blocks=new, parent_hash=parent))

    def release(self, hashes: Sequence[int], private: int) -> None:
        """Release the blocks of one sequence: the full blocks of its prefix, in order, and the private ones."""
        active = self._active
        for block_hash in reversed(hashes):
            count = active[block_hash] - 1
            if count:
                active[block_hash] = count
            else:
                del active[block_hash]
                self._cached[block_hash] = None
        self._private -= private

    def clear(self) -> None:
        """Forget every cached block. Told as an event that stands for the whole rank: nothing may be held."""
        self._cached.clear()
        self._publish(KvCleared())

    def _evict(self, count: int) -> None:
        if count <= 0:
            return
        evicted = [self._cached.popitem(last=False)[0] for _ in range(count)]
        self._publish(KvRemoved(block_hashes=evicted))

    def _publish(self, data: KvStored | KvRemoved | KvCleared) -> None:
        if self._listener is not None:
            event = KvEvent(self._event_id, data, self._dp_rank)
            self._event_id += 1
            self._listener(event)
