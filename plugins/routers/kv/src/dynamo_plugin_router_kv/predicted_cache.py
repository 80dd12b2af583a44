"""Predicted caches of workers without events: the blocks of recent prompts sent to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from dynamo_core import KvBlock
from dynamo_core.kv import Rank

from dynamo_plugin_router_kv.index import KvIndex


class PredictedCache:
    """Puts the blocks of routed prompts into an index, and takes them out after `ttl` seconds without use.

    Of one rank at most `limit` blocks are kept; if there are more, those unused for longest go.
    """

    def __init__(self, index: KvIndex, ttl: float, limit: int) -> None:
        self._index = index
        self._ttl = ttl
        self._limit = limit
        #: By rank: sequence hash -> when it expires. The first expires first; of one prompt, the last block.
        self._ranks: dict[Rank, OrderedDict[int, float]] = {}

    def routed(
        self, rank: Rank, blocks: Sequence[int], chain: Sequence[int], now: float, *, capacity: int | None = None
    ) -> None:
        """Record that a prompt, given by its hashes, went to a rank that has room for `capacity` blocks."""
        expiries = self._ranks.get(rank)
        if expiries is None:
            expiries = self._ranks[rank] = OrderedDict()
        limit = self._limit if capacity is None else min(self._limit, capacity)
        blocks, chain = blocks[:limit], chain[:limit]
        if not chain:
            return
        until = now + self._ttl
        known = 0
        for sequence in chain:
            if sequence not in expiries:
                break
            known += 1
        for sequence in reversed(chain):
            expiries[sequence] = until
            expiries.move_to_end(sequence)
        if known < len(chain):
            self._index.store(
                rank,
                chain[known - 1] if known else None,
                [KvBlock(name, tokens) for name, tokens in zip(chain[known:], blocks[known:], strict=True)],
            )
        if len(expiries) > limit:
            self._index.remove(rank, [expiries.popitem(last=False)[0] for _ in range(len(expiries) - limit)])

    def expire(self, now: float) -> None:
        """Take out what has not been used for long."""
        for rank, expiries in self._ranks.items():
            gone = []
            for sequence, until in expiries.items():
                if until > now:
                    break
                gone.append(sequence)
            for sequence in gone:
                del expiries[sequence]
            if gone:
                self._index.remove(rank, gone)

    def forget(self, worker_ids: Collection[int]) -> None:
        """Forget what workers hold that are gone."""
        for rank in [rank for rank in self._ranks if rank[0] in worker_ids] if worker_ids else ():
            del self._ranks[rank]
            self._index.clear(rank)
