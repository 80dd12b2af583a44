"""Events: the KV cache and the load of workers, and the load that frontends have placed on them."""

from __future__ import annotations

import msgspec

#: Subject of cache changes; each payload is a msgpack list of `RouterEvent`.
KV_EVENTS = "kv-events"
#: Subject of loads; each payload is a msgpack list of `ActiveLoad`.
KV_METRICS = "kv_metrics"
#: Subject of the load that frontends have placed on workers; each payload is one msgpack `PlacedLoads`.
PLACED_LOADS = "placed_loads"


class KvBlock(msgspec.Struct, array_like=True, frozen=True):
    """One stored block: the engine's own hash of it and the local hash of its tokens (`dynamo_core.kv`)."""

    block_hash: int
    tokens_hash: int


class KvStored(msgspec.Struct, tag="stored", frozen=True):
    """Blocks that now follow `parent_hash` (None: from the start of the sequence)."""

    blocks: list[KvBlock]
    parent_hash: int | None = None


class KvRemoved(msgspec.Struct, tag="removed", frozen=True):
    """Blocks that were evicted, by the engine's own hash."""

    block_hashes: list[int]


class KvCleared(msgspec.Struct, tag="cleared", frozen=True):
    """The whole cache of one worker and rank is gone."""


class KvEvent(msgspec.Struct, frozen=True):
    """A change of one rank's cache; `event_id` counts up per worker and rank."""

    event_id: int
    data: KvStored | KvRemoved | KvCleared
    dp_rank: int = 0


class RouterEvent(msgspec.Struct, array_like=True, frozen=True):
    """A cache change together with the worker it happened on.

    `epoch` grows whenever a worker restarts the numbering of its events; 0 where that is not known.
    """

    worker_id: int
    event: KvEvent
    epoch: int = 0


class KvSeen(msgspec.Struct, array_like=True, frozen=True):
    """A router's position in the events of one rank: the last applied event of an epoch."""

    dp_rank: int
    epoch: int
    event_id: int


class KvHistoryRequest(msgspec.Struct, frozen=True):
    """Asks a worker for the KV caches of all its ranks. Of the ranks in `seen` the changes since then are enough."""

    seen: list[KvSeen] = []


class KvHistoryPart(msgspec.Struct, array_like=True, frozen=True):
    """Some events of one rank, in order.

    With `fresh` they begin with an empty cache, and stand for its contents rather than for what happened. `event_id` is
    the event after which the rank was in this state; None: there are further parts; -1: there was no event yet.
    """

    dp_rank: int
    epoch: int
    fresh: bool
    events: list[KvEvent]
    event_id: int | None = None


class ActiveLoad(msgspec.Struct, omit_defaults=True, frozen=True):
    """The load of one rank, as its worker reports it.

    `active_prefill_tokens` are prompt tokens that are still to be computed, of waiting requests too. `kv_used_blocks`
    are the KV blocks that requests hold and that cannot be evicted; `active_decode_blocks` the same, as the engine's
    scheduler counts them. `kv_total_blocks` are all there are; the framework fills it in if the engine does not.
    """

    worker_id: int
    dp_rank: int = 0
    active_decode_blocks: int | None = None
    active_prefill_tokens: int | None = None
    kv_used_blocks: int | None = None
    kv_total_blocks: int | None = None


class PlacedLoad(msgspec.Struct, array_like=True, frozen=True):
    """The load that one frontend has on one rank of a worker, as its load tracker counts it; all zero if none.

    `blocks` are those with known hashes; `held` counts the blocks of requests without hashes too.
    """

    worker_id: int
    dp_rank: int
    requests: int
    prefill_tokens: int
    blocks: int
    held: int | None = None


class PlacedLoads(msgspec.Struct, array_like=True, frozen=True):
    """The message of one frontend to the others: the present load of each named rank, never a difference.

    Every process draws a new `frontend`, and `number` counts its messages. With `whole` the ranks that are not named
    have no load; without it the message says nothing of them.
    """

    frontend: int
    number: int
    whole: bool
    loads: list[PlacedLoad]
