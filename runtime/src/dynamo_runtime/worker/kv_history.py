"""A worker's history of its KV events, for routers that missed some or came later.

Of each rank it keeps the newest events, and what the cache holds after all of them. Who has missed a few events is told
those; everybody else is told what is held.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator

from dynamo_core.contracts.transports.call import ServedContext
from dynamo_core.errors import NotSupported
from dynamo_core.protocol.events import (
    KvBlock,
    KvEvent,
    KvHistoryPart,
    KvHistoryRequest,
    KvRemoved,
    KvStored,
)

#: Events that are kept of each rank.
RECENT = 1024
#: Blocks, or events, in one part of an answer.
PART = 1024

#: A block that is held: the block before it, or None, and the local hash of its tokens.
_Held = tuple[int | None, int]


class _Rank:
    """One rank: its newest events, and its blocks, each after the one it follows if that is still there."""

    __slots__ = ("held", "last", "recent")

    def __init__(self) -> None:
        self.recent: deque[KvEvent] = deque(maxlen=RECENT)
        self.held: dict[int, _Held] = {}
        self.last = -1

    def note(self, event: KvEvent) -> None:
        self.recent.append(event)
        self.last = event.event_id
        data = event.data
        held = self.held
        if isinstance(data, KvStored):
            parent = data.parent_hash
            for block in data.blocks:
                held[block.block_hash] = (parent, block.tokens_hash)
                parent = block.block_hash
        elif isinstance(data, KvRemoved):
            for block_hash in data.block_hashes:
                held.pop(block_hash, None)
        else:
            held.clear()

    def since(self, event_id: int) -> list[KvEvent] | None:
        """Return the events after one; None if they are not all here."""
        missed = self.last - event_id
        if not 0 <= missed <= len(self.recent):
            return None
        return list(self.recent)[len(self.recent) - missed :]


class KvHistory:
    """The event history of one worker, and the handler of ``kv_history``; `epoch` identifies this run."""

    def __init__(self, epoch: int, *, kept: bool = True) -> None:
        """Remember nothing without `kept`, and refuse every question."""
        self._epoch = epoch
        self._kept = kept
        self._ranks: dict[int, _Rank] = {}

    def begin(self, dp_rank: int) -> None:
        """Begin the history of a rank on which nothing has happened yet."""
        self._ranks.setdefault(dp_rank, _Rank())

    def note(self, event: KvEvent) -> None:
        """Take an event of any rank, in order."""
        if self._kept:
            rank = self._ranks.get(event.dp_rank)
            if rank is None:
                rank = self._ranks[event.dp_rank] = _Rank()
            rank.note(event)

    async def serve(self, request: KvHistoryRequest, ctx: ServedContext) -> AsyncGenerator[KvHistoryPart, None]:
        """Return the handler.

        Raises:
            NotSupported: nothing is kept here.
        """
        if not self._kept:
            raise NotSupported("this worker does not keep track of its KV cache: enable_local_indexer is off")
        return self._parts(request)

    async def _parts(self, request: KvHistoryRequest) -> AsyncGenerator[KvHistoryPart, None]:
        seen = {one.dp_rank: one.event_id for one in request.seen if one.epoch == self._epoch}
        for number, rank in list(self._ranks.items()):
            # As it is now: while the parts are sent, more may happen.
            last, events = rank.last, rank.since(seen[number]) if number in seen else None
            if events is not None:
                yield KvHistoryPart(number, self._epoch, False, events, last)
                continue
            fresh = True
            for stored in _chains(list(rank.held.items())):
                yield KvHistoryPart(number, self._epoch, fresh, [KvEvent(last, stored, number)])
                fresh = False
                # A large cache must not hold up the answers of this process.
                await asyncio.sleep(0)
            yield KvHistoryPart(number, self._epoch, fresh, [], last)


def _chains(held: list[tuple[int, _Held]]) -> Iterator[KvStored]:
    """Return blocks in runs that follow one another, each after its parent. Blocks without a parent are left out."""
    told: set[int] = set()
    waiting: dict[int, list[tuple[int, int]]] = {}
    run: list[KvBlock] = []
    begin: int | None = None
    before: int | None = None
    for first, (after, first_tokens) in held:
        if after is not None and after not in told:
            # It was stored again after its successors.
            waiting.setdefault(after, []).append((first, first_tokens))
            continue
        ready: list[tuple[int, int | None, int]] = [(first, after, first_tokens)]
        while ready:
            block_hash, parent, tokens = ready.pop()
            if run and (parent != before or len(run) >= PART):
                yield KvStored(blocks=run, parent_hash=begin)
                run = []
            if not run:
                begin = parent
            run.append(KvBlock(block_hash, tokens))
            told.add(block_hash)
            before = block_hash
            if waiting:
                ready += [(one, block_hash, hashed) for one, hashed in waiting.pop(block_hash, ())]
    if run:
        yield KvStored(blocks=run, parent_hash=begin)
