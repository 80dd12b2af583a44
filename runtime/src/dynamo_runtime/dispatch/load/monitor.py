"""The worker monitor: reads the load reports of workers, and decides which of them are busy.

How many KV blocks a rank holds is what its worker told last and what was placed since: only the engine knows how long
the answers have become, but the load tracker knows of a request the moment it is placed, a worker a tenth of a second
later (`used_blocks`). How many tokens wait to be prefilled is the load tracker's alone. With several frontends the
tracker holds what each of them has placed (`peer_load_sync`).

A worker is looked at when one of the two has changed, never when a request asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from dynamo_core.contracts.discovery import Discovery
from dynamo_core.contracts.thresholds import RankLoad
from dynamo_core.contracts.transports.events import EventPlane
from dynamo_core.protocol.decoding import read
from dynamo_core.protocol.events import KV_METRICS, ActiveLoad
from dynamo_core.resources import AsyncResource
from dynamo_core.tasks import TaskSet

from dynamo_runtime.dispatch.load.load_subscription import listen
from dynamo_runtime.dispatch.load.tracker import LoadTracker
from dynamo_runtime.dispatch.pools.pool import Pool

log = logging.getLogger(__name__)

#: Seconds of silence after which what a worker told counts no more. Workers repeat themselves every 2 s.
EXPIRY = 10.0
#: Seconds between two looks for workers that are silent.
SWEEP = 1.0

Rank = tuple[int, int]
#: Whether a worker of a model with these loads is busy.
BusyRule = Callable[[str, Sequence[RankLoad]], bool]

_decoder = msgspec.msgpack.Decoder(list[ActiveLoad])


class _LoadReport(NamedTuple):
    """The last word of a rank, and when it came."""

    load: ActiveLoad
    heard: float


class WorkerMonitor(AsyncResource):
    """Keeps the busy marks of all pools that are put in its care.

    Without a rule no worker counts as busy, and changes of the tracker are ignored. Reports of workers are still
    received, so that the gauges show them before thresholds are set.
    """

    def __init__(
        self, tracker: LoadTracker, events: EventPlane, directory: Discovery, *, rule: BusyRule | None = None
    ) -> None:
        self._tracker = tracker
        self._events = events
        self._directory = directory
        self._rule: BusyRule | None = None
        self._told: dict[Rank, _LoadReport] = {}
        self._places: dict[int, Pool] = {}
        self._tasks = TaskSet()
        if rule is not None:
            self.use_rule(rule)

    def use_rule(self, rule: BusyRule) -> None:
        """Mark workers by a rule, which may know of this monitor. To be called before `start`."""
        self._rule = rule
        self._tracker.on_load = self._placed

    def start(self) -> None:
        """Begin to listen."""
        self._tasks.spawn(
            listen(self._events, self._directory, KV_METRICS, self.apply, whose="worker"), name="receive worker loads"
        )
        self._tasks.spawn(self._sweep(), name="expire worker loads")

    async def aclose(self) -> None:
        """Stop. Safe twice, and without `start`."""
        if self._rule is not None:
            self._tracker.on_load = None
        await self._tasks.aclose()

    def take(self, pool: Pool) -> None:
        """Put a pool, which has no workers yet, into its care."""
        pool.on_add = self._added
        pool.on_remove = self._removed

    def load(self, instance_id: int, dp_rank: int) -> RankLoad:
        """Return what a rank is doing, as far as is known."""
        told = self._told.get((instance_id, dp_rank))
        total = None if told is None else told.load.kv_total_blocks
        pool = self._places.get(instance_id)
        card = None if pool is None else pool.cards.get(instance_id)
        batch = block_size = None
        if card is not None:
            block_size = card.kv_cache_block_size
            batch = card.runtime_config.max_num_batched_tokens
            total = card.runtime_config.total_kv_blocks if total is None else total
        tracker = self._tracker
        return RankLoad(
            tracker.used_blocks(instance_id, dp_rank, block_size),
            total,
            tracker.prefill_tokens(instance_id, dp_rank),
            batch,
        )

    def reported_blocks(self, instance_id: int, dp_rank: int) -> int | None:
        """Return the KV blocks in use on a rank, as its worker told last; None if it tells nothing."""
        told = self._told.get((instance_id, dp_rank))
        return None if told is None else _blocks(told.load)

    def reconsider(self, model: str | None = None) -> None:
        """Look at workers again after a change of the rule, for one model or for all."""
        for instance_id, pool in list(self._places.items()):
            if model is None or pool.model == model:
                self._look(pool, instance_id)

    def apply(self, payload: bytes, now: float | None = None) -> None:
        """Take in a message of a worker, received at `now` by the loop's clock.

        Raises:
            Unreadable: it is none.
        """
        now = asyncio.get_running_loop().time() if now is None else now
        heard = read(_decoder, payload)
        for load in heard:
            rank = (load.worker_id, load.dp_rank)
            self._told[rank] = _LoadReport(load, now)
            blocks = _blocks(load)
            if blocks is not None:
                self._tracker.reported(rank, blocks, now)
        for instance_id in {load.worker_id for load in heard}:
            self._recompute(instance_id)

    def expire(self, now: float) -> None:
        """Forget the words of ranks that have been silent for `EXPIRY`."""
        for rank in [rank for rank, told in self._told.items() if now - told.heard >= EXPIRY]:
            del self._told[rank]
            self._tracker.forget_reports(rank)
            self._recompute(rank[0])

    # What has changed.

    def _added(self, pool: Pool, instance_id: int) -> None:
        self._places[instance_id] = pool
        self._look(pool, instance_id)

    def _removed(self, instance_id: int) -> None:
        del self._places[instance_id]

    def _placed(self, rank: Rank) -> None:
        pool = self._places.get(rank[0])
        if pool is not None:
            self._look(pool, rank[0])

    def _recompute(self, instance_id: int) -> None:
        pool = self._places.get(instance_id)
        if pool is not None:
            pool.report_load(instance_id)
            self._look(pool, instance_id)

    def _look(self, pool: Pool, instance_id: int) -> None:
        if self._rule is None:
            return
        config = pool.cards[instance_id].runtime_config
        start, size = config.data_parallel_start_rank, config.data_parallel_size
        ranks = [self.load(instance_id, rank) for rank in range(start, start + size)]
        pool.set_busy(instance_id, self._rule(pool.model, ranks))

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP)
            self.expire(loop.time())


def _blocks(load: ActiveLoad) -> int | None:
    return load.kv_used_blocks if load.active_decode_blocks is None else load.active_decode_blocks
