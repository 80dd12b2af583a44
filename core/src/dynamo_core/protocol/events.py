"""Events of workers: what their KV cache holds and how loaded they are; and what frontends have placed on them."""

from __future__ import annotations

import msgspec

#: Subject of cache changes; each payload is a msgpack list of `RouterEvent`.
KV_EVENTS = "kv-events"
#: Subject of loads; each payload is a msgpack list of `ActiveLoad`.
KV_METRICS = "kv_metrics"
#: Subject of what frontends have placed on workers; each payload is one msgpack `PlacedLoads`.
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

    `epoch` is higher whenever a worker begins anew to count its events; 0 where that is not known.
    """

    worker_id: int
    event: KvEvent
    epoch: int = 0


class KvSeen(msgspec.Struct, array_like=True, frozen=True):
    """How far somebody has followed one rank: the last event of an epoch that was taken in."""

    dp_rank: int
    epoch: int
    event_id: int


class KvHistoryRequest(msgspec.Struct, frozen=True):
    """Asks a worker what the KV caches of all its ranks hold. Of the ranks in `seen` what has changed since will do."""

    seen: list[KvSeen] = []


class KvHistoryPart(msgspec.Struct, array_like=True, frozen=True):
    """Some events of one rank, in order.

    With `fresh` they begin with an empty cache, and stand for what it holds rather than for what happened. `event_id`
    says after which event the rank was in this state; None: there are further parts; -1: nothing has happened yet.
    """

    dp_rank: int
    epoch: int
    fresh: bool
    events: list[KvEvent]
    event_id: int | None = None


class ActiveLoad(msgspec.Struct, omit_defaults=True, frozen=True):
    """The load of one rank, as its worker sees it.

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
    """What one frontend has running on one rank of a worker, as its load tracker counts it; all zero if nothing.

    `blocks` are those whose hashes a router asked for; `held` are all, of requests without hashes too.
    """

    worker_id: int
    dp_rank: int
    requests: int
    prefill_tokens: int
    blocks: int
    held: int | None = None


class PlacedLoads(msgspec.Struct, array_like=True, frozen=True):
    """What one frontend tells the others: how things are on each rank named, never what was added or taken away.

    `frontend` is drawn anew by every process and `number` counts its messages up. With `whole` there is nothing on the
    ranks that are not named; without, nothing is said of them.
    """

    frontend: int
    number: int
    whole: bool
    loads: list[PlacedLoad]
