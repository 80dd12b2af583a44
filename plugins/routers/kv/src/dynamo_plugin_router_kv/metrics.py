"""The metrics of one router, under the names that dashboards of the original know. Worker ids are in hex."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from dynamo_core import CounterLike, HistogramLike, MetricsScope, Phase, PoolView
from dynamo_core.kv import Rank
from dynamo_core.protocol import Instance, ModelCard, RequestRecord

from dynamo_plugin_router_kv.follower import kinds
from dynamo_plugin_router_kv.index import Status
from dynamo_plugin_router_kv.listeners import register, unregister

_COMPONENT = "dynamo_component"
_LABELS = ("dynamo_namespace", "dynamo_component", "router_id", "worker_id")

_MS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 50.0)
_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_TOKENS = (16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
_BLOCKS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
_ITL = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

#: The parts of a choice whose time is taken, in order, and what the router does in each.
_PARTS = {
    "block_hashing": "hash the blocks of a prompt",
    "seq_hashing": "chain the hashes of a prompt",
    "indexer_find_matches": "find the ranks that hold the prompt",
    "scheduling": "weigh the ranks and choose one",
    "total": "choose a worker, without the wait for room",
}


@dataclass(frozen=True, slots=True)
class _WorkerMetrics:
    """The children of one worker."""

    started: CounterLike
    requests: CounterLike
    hit_rate: HistogramLike
    first_token: HistogramLike
    between_tokens: HistogramLike
    input_tokens: HistogramLike
    output_tokens: HistogramLike
    non_max: CounterLike
    lost: HistogramLike
    #: Takes them out of what is shown.
    remove: Callable[[], None]


class _WorkerFamilies:
    """The metrics that have a child per worker."""

    def __init__(self, scope: MetricsScope) -> None:
        typed = (*_LABELS, "worker_type")
        self.started = scope.counter(
            f"{_COMPONENT}_router_requests_started_total", "Requests for which the worker was chosen.", _LABELS
        )
        self.requests = scope.counter(
            f"{_COMPONENT}_router_requests_total",
            "Requests that the worker answered and that have ended, also those of other routers.",
            _LABELS,
        )
        self.hit_rate = scope.histogram(
            f"{_COMPONENT}_router_kv_hit_rate",
            "Share of the blocks of a prompt that the chosen worker held, from 0 to 1.",
            _LABELS,
            _SHARES,
        )
        self.first_token = scope.histogram(
            f"{_COMPONENT}_router_time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first output.",
            _LABELS,
        )
        self.between_tokens = scope.histogram(
            f"{_COMPONENT}_router_inter_token_latency_seconds",
            "Seconds between two tokens, on average over an answer.",
            _LABELS,
            _ITL,
        )
        self.input_tokens = scope.histogram(
            f"{_COMPONENT}_router_input_sequence_tokens",
            "Tokens of a prompt.",
            (*_LABELS, "model", "phase"),
            _TOKENS,
        )
        self.output_tokens = scope.histogram(
            f"{_COMPONENT}_router_output_sequence_tokens", "Tokens of an answer.", _LABELS, _TOKENS
        )
        self.non_max = scope.counter(
            f"{_COMPONENT}_router_non_max_overlap_selections_total",
            "Requests for which the worker was chosen although another held more of the prompt.",
            typed,
        )
        self.lost = scope.histogram(
            f"{_COMPONENT}_router_overlap_blocks_lost",
            "KV blocks of a prompt that another worker held beyond those of the chosen one.",
            typed,
            _BLOCKS,
        )


class RouterMetrics:
    """The metrics of one router. Children are looked up once per worker."""

    def __init__(self, scope: MetricsScope, pool: PoolView, policy: str) -> None:
        self._pool = pool
        self._router_id = f"{secrets.randbits(64):016x}"
        self._families = _WorkerFamilies(scope)
        self._registered = scope.gauge(
            f"{_COMPONENT}_router_worker_registered",
            "1 for each rank that requests can be routed to.",
            ("worker_id", "dp_rank", "worker_type", "router_worker_id"),
        )
        applied = scope.counter(
            f"{_COMPONENT}_kv_cache_events_applied",
            "Events of KV caches that the router has taken in: stored, removed, cleared. status is ok, or why one does "
            "not fit: parent_block_not_found, block_not_found, invalid_block.",
            ("event_type", "status"),
        )
        self._applied = {(kind, status): applied.labels(kind, status) for kind in kinds() for status in Status}
        self._warnings = scope.counter(
            f"{_COMPONENT}_kv_cache_event_warnings",
            "Warnings about events of KV caches: gap, duplicate, restart, overflow, unreadable.",
            ("warning_kind",),
        )
        overheads = (
            scope.histogram(
                f"dynamo_router_overhead_{part}_ms",
                f"Milliseconds to {work}.",
                ("router_id",),
                _MS,
            )
            for part, work in _PARTS.items()
        )
        self._overheads = [overhead.labels(self._router_id) for overhead in overheads]
        #: 1 while nothing is heard of the caches though requests are routed.
        self.silent = scope.gauge(
            "dynamo_router_kv_events_silent",
            "1 while workers get requests and send no events of their KV caches, for router.alarm_secs.",
            ("model", "worker_type"),
        ).labels(pool.model, pool.role)
        self.blocks = scope.gauge(
            "dynamo_router_kv_index_blocks",
            "KV blocks that the router knows of, each counted once.",
            ("model", "worker_type"),
        ).labels(pool.model, pool.role)
        queue = ("model", "policy_class", "worker_type")
        self.queued = scope.gauge(
            "dynamo_frontend_router_queue_pending_requests",
            "Requests that wait in the router for room at a worker.",
            queue,
        ).labels(pool.model, policy, pool.role)
        self.queued_tokens = scope.gauge(
            "dynamo_frontend_router_queue_pending_isl_tokens",
            "Tokens of the prompts of requests that wait in the router.",
            queue,
        ).labels(pool.model, policy, pool.role)
        self._workers: dict[tuple[int, Phase], _WorkerMetrics] = {}
        self._latest: dict[int, _WorkerMetrics] = {}
        self._ranks: set[Rank] = set()
        register(self)

    def applied(self, kind: str, status: Status) -> None:
        """Record that an event was taken in."""
        self._applied[kind, status].inc()

    def warned(self, kind: str) -> None:
        """Record that an event was odd."""
        self._warnings.labels(kind).inc()

    def registered(self, ranks: Collection[Rank]) -> None:
        """Show that these ranks can be routed to now."""
        for worker_id, rank in ranks:
            self._registered.labels(f"{worker_id:016x}", str(rank), self._pool.role, self._router_id).set(1)
        self._ranks.update(ranks)

    def unregistered(self, ranks: Collection[Rank], workers: Iterable[int]) -> None:
        """Show nothing of these ranks and workers any more."""
        for worker_id, rank in ranks:
            self._registered.remove(f"{worker_id:016x}", str(rank), self._pool.role, self._router_id)
        for worker_id in workers:
            for phase in Phase:
                worker = self._workers.pop((worker_id, phase), None)
                if worker is not None:
                    worker.remove()
            self._latest.pop(worker_id, None)
        self._ranks.difference_update(ranks)

    def routed(
        self,
        instance: Instance,
        phase: Phase,
        *,
        tokens: int,
        blocks: int,
        overlap: int,
        most: int,
        times: Sequence[float],
    ) -> None:
        """Record that a worker was chosen that holds `overlap` of a prompt's blocks, where another one holds `most`.

        `times` are seconds: when the choice began, and when each of its parts had ended.
        """
        worker = self._workers.get((instance.instance_id, phase)) or self._worker(instance, phase)
        worker.started.inc()
        worker.input_tokens.observe(tokens)
        if blocks:
            worker.hit_rate.observe(overlap / blocks)
        if most > overlap:
            worker.non_max.inc()
            worker.lost.observe(most - overlap)
        before = times[0]
        for overhead, after in zip(self._overheads, times[1:], strict=False):
            overhead.observe((after - before) * 1000)
            before = after
        self._overheads[-1].observe((before - times[0]) * 1000)

    def finished(self, record: RequestRecord) -> None:
        """Record that a request has ended, of this router or another one."""
        if record.instance_id is None or record.model != self._pool.model:
            return
        instance = self._pool.instances.get(record.instance_id)
        if instance is None:
            return
        # What is told of answers is the same in all phases.
        worker = self._latest.get(record.instance_id) or self._worker(instance, Phase.AGGREGATED)
        worker.requests.inc()
        worker.output_tokens.observe(record.output_tokens)
        first = record.time_to_first_token
        if first is not None:
            worker.first_token.observe(first)
            if record.output_tokens > 1:
                worker.between_tokens.observe((record.duration - first) / (record.output_tokens - 1))

    def close(self) -> None:
        """Remove the router's metrics of its workers."""
        unregister(self)
        self.unregistered(tuple(self._ranks), {worker_id for worker_id, _ in self._ranks})
        self.silent.set(0)
        self.blocks.set(0)

    def _worker(self, instance: Instance, phase: Phase) -> _WorkerMetrics:
        labels = (instance.namespace, instance.component, self._router_id, f"{instance.instance_id:016x}")
        asked = (*labels, self._pool.model, phase.value)
        typed = (*labels, self._pool.role)

        def remove() -> None:
            for family in (self._families.started, self._families.requests):
                family.remove(*labels)
            for histogram in (
                self._families.hit_rate,
                self._families.first_token,
                self._families.between_tokens,
                self._families.output_tokens,
            ):
                histogram.remove(*labels)
            self._families.input_tokens.remove(*asked)
            self._families.non_max.remove(*typed)
            self._families.lost.remove(*typed)

        worker = self._workers[instance.instance_id, phase] = self._latest[instance.instance_id] = _WorkerMetrics(
            started=self._families.started.labels(*labels),
            requests=self._families.requests.labels(*labels),
            hit_rate=self._families.hit_rate.labels(*labels),
            first_token=self._families.first_token.labels(*labels),
            between_tokens=self._families.between_tokens.labels(*labels),
            input_tokens=self._families.input_tokens.labels(*asked),
            output_tokens=self._families.output_tokens.labels(*labels),
            non_max=self._families.non_max.labels(*typed),
            lost=self._families.lost.labels(*typed),
            remove=remove,
        )
        return worker


def ranks_of(instance_id: int, card: ModelCard) -> Sequence[Rank]:
    """Return all ranks of a worker."""
    facts = card.runtime_config
    start = facts.data_parallel_start_rank
    return [(instance_id, rank) for rank in range(start, start + facts.data_parallel_size)]
