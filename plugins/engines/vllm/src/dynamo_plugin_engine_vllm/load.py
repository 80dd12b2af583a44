"""The load of each rank: from vLLM's own statistics, and from requests that it has not begun."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dynamo_core import ActiveLoad, CounterLike, GaugeLike, LoadSource, MetricsScope


@dataclass(slots=True)
class RequestLoad:
    """One request's part of the load of a rank."""

    rank: Rank
    prefill_tokens: int

    def prefilled(self) -> None:
        """Record that its prompt has been computed. Repeating it does nothing."""
        tokens, self.prefill_tokens = self.prefill_tokens, 0
        if tokens:
            self.rank.waiting_tokens -= tokens
            self.rank.report()


@dataclass(slots=True)
class _Metrics:
    running: GaugeLike
    waiting: GaugeLike
    used: GaugeLike
    queried: CounterLike
    hit: CounterLike


class Rank:
    """The load of one data-parallel rank."""

    def __init__(self, number: int, worker_id: int, blocks: int) -> None:
        self.number = number
        self._worker_id = worker_id
        self._blocks = blocks
        self._subscribers: list[Callable[[ActiveLoad], None]] = []
        self._metrics: _Metrics | None = None
        #: Requests that were handed to vLLM and have not ended.
        self.requests = 0
        #: Their prompt tokens, of those that have no token yet.
        self.waiting_tokens = 0
        self.used_blocks = 0
        #: Steps that vLLM has made.
        self.steps = 0
        #: Prompt tokens that were looked up in the prefix cache since the start, and found there.
        self.queried_tokens = 0
        self.hit_tokens = 0

    @contextmanager
    def request(self, prompt_tokens: int) -> Iterator[RequestLoad]:
        """Wrap one request."""
        request_load = RequestLoad(self, prompt_tokens)
        self.requests += 1
        self.waiting_tokens += prompt_tokens
        self.report()
        try:
            yield request_load
        finally:
            self.requests -= 1
            request_load.prefilled()
            if not self.requests:
                # Statistics come with steps, and there may be no further one.
                self.used_blocks = 0
                self.report()

    def record(self, stats: Any) -> None:
        """Take the `SchedulerStats` of a step."""
        self.steps += 1
        # What an aborted request held is given back with the next step only.
        self.used_blocks = round(stats.kv_cache_usage * self._blocks) if self.requests else 0
        found = stats.prefix_cache_stats
        self.queried_tokens += found.queries
        self.hit_tokens += found.hits
        if self._metrics is not None:
            self._metrics.running.set(stats.num_running_reqs)
            self._metrics.waiting.set(stats.num_waiting_reqs)
            self._metrics.queried.inc(found.queries)
            self._metrics.hit.inc(found.hits)
        self.report()

    def report(self) -> None:
        """Report the load to metrics and subscribers."""
        if self._metrics is not None:
            self._metrics.used.set(self.used_blocks)
        if self._subscribers:
            load = ActiveLoad(
                self._worker_id,
                self.number,
                active_decode_blocks=self.used_blocks,
                active_prefill_tokens=self.waiting_tokens,
                kv_used_blocks=self.used_blocks,
            )
            for subscriber in self._subscribers:
                subscriber(load)

    def source(self) -> LoadSource:
        """Return the source of this load."""
        return LoadSource(self.number, self._subscribers.append)

    def setup_metrics(self, metrics: MetricsScope) -> None:
        """Register the metrics of this rank."""
        label, rank = ("dp_rank",), str(self.number)

        def gauge(name: str, help: str) -> GaugeLike:
            return metrics.gauge(f"dynamo_vllm_{name}", help, label).labels(rank)

        def counter(name: str, help: str) -> CounterLike:
            return metrics.counter(f"dynamo_vllm_{name}", help, label).labels(rank)

        self._metrics = _Metrics(
            gauge("running_requests", "Requests that vLLM computes."),
            gauge("waiting_requests", "Requests that wait for a slot in vLLM."),
            gauge("kv_used_blocks", "KV blocks that requests hold."),
            counter("prefix_queried_tokens", "Tokens of prompts that were looked up in the prefix cache."),
            counter("prefix_hit_tokens", "Tokens of prompts that were found in the prefix cache."),
        )


def least_loaded(ranks: Sequence[Rank]) -> Rank:
    """Return the rank with the fewest requests, the first of several."""
    return min(ranks, key=lambda rank: rank.requests)


def ranks_of(parallel: Any) -> range:
    """Return the numbers of the ranks that an engine with this `ParallelConfig` has, among those of the whole model."""
    first, size = parallel.data_parallel_rank, parallel.data_parallel_size
    if parallel.data_parallel_external_lb:
        return range(first, first + 1)
    if parallel.data_parallel_hybrid_lb:
        return range(first, first + parallel.data_parallel_size_local)
    return range(size)


def stat_logger(base: type[Any], record: Callable[[int, Any], None]) -> type[Any]:
    """Return a stat logger class for vLLM: it calls `record` in the event loop's thread, after each step of a rank."""

    # vLLM's class is known at run time only.
    class Recorder(base):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._rank = engine_index

        def record(self, scheduler_stats: Any = None, *args: Any, **more: Any) -> None:
            if scheduler_stats is not None:
                record(self._rank, scheduler_stats)

        def log_engine_initialized(self) -> None:
            """Log nothing."""

    return Recorder
