"""The router `kv`: chooses the cheapest rank, by cached blocks of the prompt and by load."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import perf_counter
from typing import cast

import msgspec
from dynamo_core import (
    KV_EVENTS,
    KV_HISTORY,
    DynamoError,
    KvHistoryPart,
    KvHistoryRequest,
    Phase,
    PluginConfig,
    PoolView,
    Route,
    Router,
    RouterEvent,
    RouterServices,
    RoutingRequest,
    ScoredRank,
    TaskSet,
)
from dynamo_core.errors import InvalidArgument, NotSupported
from dynamo_core.kv import Load, unshared_blocks
from dynamo_core.protocol import ModelCard, Unreadable, UnreadableWarner, read

from dynamo_plugin_router_kv.candidates import Candidates, CandidateSelector
from dynamo_plugin_router_kv.choice import Weights, best, choose, costs
from dynamo_plugin_router_kv.config import KvConfig
from dynamo_plugin_router_kv.follower import EventFollower
from dynamo_plugin_router_kv.index import KvIndex
from dynamo_plugin_router_kv.metrics import RouterMetrics, ranks_of
from dynamo_plugin_router_kv.predicted_cache import PredictedCache
from dynamo_plugin_router_kv.queue import RouteQueue

log = logging.getLogger(__name__)

#: Seconds between two rounds of maintenance.
TICK = 0.25
#: Workers that are asked for their history at a time; seconds for one answer; how often one is asked; the first pause.
ASKED_AT_ONCE = 8
HISTORY_TIMEOUT = 30.0
HISTORY_TRIES = 4
HISTORY_PAUSE = 0.25
#: Seconds after which a worker that has come is asked again. Its events come over a connection of their own, which may
#: be there only after its first answer; what it told in between would be missed until its next event.
SECOND_LOOK = 3.0
#: Seconds before a broken event plane is listened to again, varied by half.
RETRY = 1.0
#: Blocks of ranks that are gone, taken out in one go.
SWEEP = 5000
#: The assumed block size and largest batch of workers that do not publish them.
NO_BLOCK_SIZE = 16
NO_BATCH = 10_000_000

_decoder = msgspec.msgpack.Decoder(list[RouterEvent])


@dataclass(slots=True)
class _Scores:
    """The candidates of a choice, and their costs."""

    candidates: Candidates
    weights: Weights
    block_size: int | None
    blocks: Sequence[int]
    chain: Sequence[int]
    overlaps: Sequence[int]
    loads: Sequence[Load]
    costs: Sequence[float]
    times: Sequence[float]

    def rated(self, number: int) -> ScoredRank:
        """Return one candidate as others see it."""
        return ScoredRank(
            *self.candidates.ranks[number], self.overlaps[number], *self.loads[number], self.costs[number]
        )


class KvRouter(Router):
    """A router to the rank where the prompt costs least to compute and the worker has least to do beside it."""

    NAME = "kv"
    Config = KvConfig

    def __init__(self, config: KvConfig, services: RouterServices) -> None:
        super().__init__(config, services)
        self._settings = config
        self._pool = services.pool
        self._tracker = services.tracker
        # Spreads load, keeps no secret.
        self._random = random.Random(config.seed)  # noqa: S311
        self._weights = Weights.of(config)
        self._metrics = RouterMetrics(services.metrics, services.pool, config.queue_policy)
        self._index = KvIndex()
        self._follower = EventFollower(self._index, self._metrics.applied, self._metrics.warned)
        self._predicted = None if config.kv_events else PredictedCache(self._index, config.ttl_secs, config.max_blocks)
        self._selector = CandidateSelector()
        self._queue = RouteQueue(config.queue_timeout, config.queue_limit)
        self._tasks = TaskSet()
        self._asking: set[int] = set()
        #: Workers that came lately, and when they are asked a second time.
        self._joined: deque[tuple[float, int]] = deque()
        self._asked = asyncio.Semaphore(ASKED_AT_ONCE)
        #: The cards of the workers that the rest knows.
        self._cards: dict[int, ModelCard] = {}
        #: The pool's version that the rest goes by.
        self._version = -1
        #: The time since which events are due: a request was routed that changes a cache, and no event came.
        self._due_since: float | None = None
        self._silent = False
        self._unreadable = UnreadableWarner(log, "a message about the KV cache of worker")
        if config.queue_threshold is not None:
            self._unwatch = self._tracker.watch(self._queue.notify)

    async def start(self) -> None:
        """Subscribe to cache events, and ask workers for the contents of their caches. Until then load decides."""
        self._tasks.spawn(self._maintain(), name="keep kv index")
        if self._predicted is None:
            self._tasks.spawn(self._listen(), name="hear kv events")

    async def aclose(self) -> None:
        """Stop background work. Safe twice, and without `start`."""
        await self._tasks.aclose()
        if self._settings.queue_threshold is not None:
            self._unwatch()
        self._queue.close()
        self._metrics.close()

    async def reconfigure(self, config: PluginConfig) -> None:
        """Apply the new weights to the next choice."""
        self._settings = self.config = cast(KvConfig, config)
        self._weights = Weights.of(self._settings)

    # Choosing.

    async def route(self, request: RoutingRequest, pool: PoolView) -> Route:
        """Return the cheapest rank; see `Router.route`.

        Raises:
            InvalidArgument: a token id is none, or no worker has the rank that the request names.
        """
        if self._settings.queue_threshold is not None and request.phase is not Phase.DECODE:
            await self._wait_for_room(request, pool, self._settings.queue_threshold)
        scores = self._score(request, pool)
        number = choose(scores.costs, scores.weights.temperature, self._random)
        instance, rank = scores.candidates.instances[number], scores.candidates.ranks[number]
        overlap = scores.overlaps[number]
        self._record_route(request, scores, rank, overlap, pool)
        self._metrics.routed(
            instance,
            request.phase,
            tokens=len(request.request.token_ids),
            blocks=len(scores.chain),
            overlap=overlap,
            most=max(scores.overlaps),
            times=(*scores.times, perf_counter()),
        )
        blocks: Sequence[int] | None = None
        if not self._settings.track_active_blocks:
            blocks = ()
        elif not scores.weights.assume_kv_reuse:
            blocks = unshared_blocks(len(scores.chain))
        candidates = None
        if request.wants_candidates:
            candidates = [scores.rated(index) for index in best(scores.costs, request.wants_candidates, number)]
        return Route(instance, rank[1], overlap, blocks, scores.weights.track_prefill_tokens, candidates=candidates)

    @property
    def follows_caches(self) -> bool:
        """Whether events of the caches come."""
        return self._predicted is None and not self._silent

    def explain(self, request: RoutingRequest, pool: PoolView) -> list[ScoredRank]:
        """Return how every rank that may be chosen looks to a request now. Nothing is chosen, and nothing counted.

        Raises:
            DynamoError: as `route`.
        """
        scores = self._score(request, pool)
        return [scores.rated(number) for number in range(len(scores.costs))]

    def _score(self, request: RoutingRequest, pool: PoolView) -> _Scores:
        begun = perf_counter()
        if pool.version != self._version:
            self._sync_workers(pool)
        candidates = self._selector.candidates(request, pool)
        block_size = pool.cards[candidates.ranks[0][0]].kv_cache_block_size
        blocks, chain, hashed = self._hashes(request, block_size)
        chained = perf_counter()
        weights = self._weights
        override = request.request.router_config_override
        if override is not None:
            weights = weights.overridden(override)
        overlaps = [0] * len(candidates.ranks)
        if request.phase is not Phase.DECODE:
            overlaps = candidates.overlaps(self._index, self._index.overlaps(chain))
        matched = perf_counter()
        loads = self._tracker.loads(candidates.ranks, chain)
        active = None
        if weights.decode_active_request_weight:
            active = [self._tracker.requests(rank[0]) for rank in candidates.ranks]
        found = costs(
            weights,
            tokens=len(request.request.token_ids),
            blocks=len(chain),
            block_size=block_size or NO_BLOCK_SIZE,
            overlaps=overlaps,
            loads=loads,
            requests=active,
        )
        times = (begun, hashed, chained, matched)
        return _Scores(candidates, weights, block_size, blocks, chain, overlaps, loads, found, times)

    @staticmethod
    def _hashes(request: RoutingRequest, block_size: int | None) -> tuple[Sequence[int], Sequence[int], float]:
        """Block hashes and sequence hashes, and when the first were there."""
        if not block_size:
            return (), (), perf_counter()
        try:
            request.block_hashes(block_size)
            hashed = perf_counter()
            blocks, chain = request.hashes(block_size)
        except OverflowError:
            raise InvalidArgument("token_ids holds a number that is no token id of 32 bits") from None
        return blocks, chain, hashed

    def _record_route(
        self, request: RoutingRequest, scores: _Scores, rank: tuple[int, int], overlap: int, pool: PoolView
    ) -> None:
        """Record the effect of a choice on the known caches."""
        if request.phase is Phase.DECODE or not scores.chain:
            return
        if self._predicted is not None:
            now = asyncio.get_running_loop().time()
            capacity = pool.cards[rank[0]].runtime_config.total_kv_blocks
            self._predicted.routed(rank, scores.blocks, scores.chain, now, capacity=capacity)
        elif self._due_since is None and overlap < len(scores.chain):
            self._due_since = asyncio.get_running_loop().time()

    # Waiting for room.

    async def _wait_for_room(self, request: RoutingRequest, pool: PoolView, threshold: float) -> None:
        # A request that no worker can serve fails at once.
        self._selector.candidates(request, pool)
        if not len(self._queue) and self._has_room(request, pool, threshold):
            return
        tokens = len(request.request.token_ids)
        self._metrics.queued.inc()
        self._metrics.queued_tokens.inc(tokens)
        try:
            await self._queue.wait(lambda: self._has_room(request, pool, threshold), self._order(request, pool))
        finally:
            self._metrics.queued.dec()
            self._metrics.queued_tokens.dec(tokens)

    def _has_room(self, request: RoutingRequest, pool: PoolView, threshold: float) -> bool:
        try:
            candidates = self._selector.candidates(request, pool)
        except DynamoError:
            # `route` will raise the same error.
            return True
        loads = self._tracker.loads(candidates.ranks)
        for (worker_id, _), (prefill, _, _) in zip(candidates.ranks, loads, strict=True):
            batch = pool.cards[worker_id].runtime_config.max_num_batched_tokens or NO_BATCH
            if prefill <= threshold * batch:
                return True
        return False

    def _order(self, request: RoutingRequest, pool: PoolView) -> tuple[float, float]:
        """Return the sort key of the queue: `strict_priority`, then arrival or work; the lowest goes first."""
        hints = request.request.routing
        strict = (hints.strict_priority if hints is not None else None) or 0
        jump = max(0.0, (hints.priority_jump if hints is not None else None) or 0.0)
        if self._settings.queue_policy == "wspt":
            scores = self._score(request, pool)
            work = len(request.request.token_ids) - max(scores.overlaps) * (scores.block_size or 0)
            return (-strict, max(work, 0) / (1.0 + jump))
        return (-strict, asyncio.get_running_loop().time() - jump)

    # Following the caches.

    def _sync_workers(self, pool: PoolView) -> None:
        """Add and remove workers as the pool has changed."""
        self._version = pool.version
        self._update(pool.cards, self._cards.keys() - pool.cards.keys())

    def _update(self, cards: Mapping[int, ModelCard], gone: Collection[int] = ()) -> None:
        """Take in the present cards of some workers, and that some are gone."""
        known = self._cards
        changed = [worker_id for worker_id, card in cards.items() if known.get(worker_id) is not card]
        before = {rank for one in (*gone, *changed) if one in known for rank in ranks_of(one, known.pop(one))}
        after = {rank for one in changed for rank in ranks_of(one, cards[one])}
        self._metrics.unregistered(before - after, gone)
        self._metrics.registered(after - before)
        if self._predicted is not None:
            self._predicted.forget(gone)
        for worker_id in gone:
            self._follower.remove(worker_id)
        again = asyncio.get_running_loop().time() + SECOND_LOOK
        for worker_id in changed:
            card = known[worker_id] = cards[worker_id]
            has_history = self._predicted is None and card.runtime_config.enable_local_indexer
            if self._follower.add(worker_id, has_history=has_history) and has_history:
                self._joined.append((again, worker_id))
        self._request_histories()

    def _look_again(self, now: float) -> None:
        """Ask workers that came a while ago once more, for what they told before their events reached this process."""
        while self._joined and self._joined[0][0] <= now:
            self._follower.ask(self._joined.popleft()[1])
        self._request_histories()

    async def _listen(self) -> None:
        """Apply events, for as long as there is an event plane."""
        while True:
            try:
                async with aclosing(self.services.events.subscribe(KV_EVENTS, self.services.directory)) as events:
                    async for source, _, payload in events:
                        self._on_message(source, payload)
            except Exception as error:
                log.warning("the KV caches of model %r are not heard of: %s", self._pool.model, error)
            await asyncio.sleep(RETRY * random.uniform(0.5, 1.5))  # noqa: S311 - spreads retries, guards nothing
            self._follower.on_gap()
            self._request_histories()

    def _on_message(self, source: int, payload: bytes) -> None:
        try:
            router_events = read(_decoder, payload)
        except Unreadable as error:
            self._metrics.warned("unreadable")
            self._unreadable.warn(f"{source:016x}", error)
            return
        self._unreadable.readable(f"{source:016x}")
        if self._pool.version != self._version:
            # No more than these: while many workers come, each would cost as much as there are workers.
            cards = self._pool.cards
            self._update({one: cards[one] for event in router_events if (one := event.worker_id) in cards})
        on_event = self._follower.on_event
        for event in router_events:
            if on_event(event):
                self._due_since = None
        self._request_histories()

    def _request_histories(self) -> None:
        """Ask workers for missing events, unless a request is under way."""
        for worker_id in self._follower.missing - self._asking:
            self._asking.add(worker_id)
            self._tasks.spawn(self._catch_up(worker_id), name=f"kv history of {worker_id:016x}")

    async def _catch_up(self, worker_id: int) -> None:
        pause = HISTORY_PAUSE
        tries = HISTORY_TRIES
        try:
            while worker_id in self._follower.missing:
                instance = self._pool.instances.get(worker_id)
                if instance is None:
                    return
                try:
                    async with self._asked:
                        asked = KvHistoryRequest(self._follower.positions(worker_id))
                        parts = await self.services.call(instance, KV_HISTORY, asked, timeout=HISTORY_TIMEOUT)
                        for part in parts:
                            self._follower.on_history_part(worker_id, cast(KvHistoryPart, part))
                            # A large cache must not hold up the requests of this process.
                            await asyncio.sleep(0)
                except DynamoError as error:
                    tries -= 1
                    if not tries or isinstance(error, NotSupported):
                        log.warning(
                            "what worker %016x holds is not known, only what it tells now: %s", worker_id, error
                        )
                        self._follower.on_history_failed(worker_id)
                        return
                    await asyncio.sleep(pause * self._random.uniform(0.5, 1.5))
                    pause *= 2
                else:
                    self._follower.on_history_complete(worker_id)
                    tries = HISTORY_TRIES
        finally:
            self._asking.discard(worker_id)

    async def _maintain(self) -> None:
        """Maintain the state: workers that came or went between requests, expiry, clean-up, and the alarm."""
        loop = asyncio.get_running_loop()
        while True:
            if self._pool.version != self._version:
                self._sync_workers(self._pool)
            if self._predicted is not None:
                self._predicted.expire(loop.time())
            while self._index.sweep(SWEEP):  # noqa: ASYNC110 - lets others run between two helpings
                await asyncio.sleep(0)
            self._metrics.blocks.set(self._index.blocks)
            self._check_silence(loop.time())
            self._look_again(loop.time())
            await asyncio.sleep(TICK)

    def _check_silence(self, now: float) -> None:
        """Raise or end the alarm: requests come, but no cache events."""
        limit = self._settings.alarm_secs
        silent = self._due_since is not None and now - self._due_since >= limit
        if silent == self._silent:
            return
        self._silent = silent
        self._metrics.silent.set(float(silent))
        if silent:
            log.warning(
                "requests for model %r go to %s workers, and none has told of its KV cache for %g s: are "
                "enable_kv_routing and the engine's prefix caching on, and do all use the same event plane?",
                self._pool.model,
                self._pool.role,
                limit,
            )
        else:
            log.info("workers of model %r tell of their KV caches again", self._pool.model)
