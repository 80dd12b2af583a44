"""One data-parallel rank: its scheduler, its KV blocks, and its events and load."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynamo_core import ActiveLoad, CounterLike, GaugeLike, KvEventSource, LoadSource, MetricsScope, TaskSet

from dynamo_plugin_engine_mocker.blocks import BlockPool
from dynamo_plugin_engine_mocker.clock import Clock
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.rank_limits import Limits
from dynamo_plugin_engine_mocker.scheduler import Scheduler
from dynamo_plugin_engine_mocker.timing import step_time, transfer_time

LoadListener = Callable[[ActiveLoad], None]

_GAUGES = (
    ("running_requests", "Requests that hold a slot."),
    ("waiting_requests", "Requests that wait for a slot."),
    ("kv_used_blocks", "KV blocks that requests hold."),
    ("kv_cached_blocks", "KV blocks that are kept for later requests."),
)
_COUNTERS = (
    ("preemptions", "Preemptions: requests that lost their slot because KV blocks ran out."),
    ("computed_prompt_tokens", "Tokens that were computed before a request decoded, those computed again too."),
    ("cached_prompt_tokens", "Tokens that were found in the KV cache instead."),
    ("received_prompt_tokens", "Tokens whose KV cache came from a prefill worker instead."),
)


class Rank:
    """Runs the requests of one rank, and reports."""

    def __init__(self, number: int, settings: MockerConfig, *, worker_id: int, clock: Clock, tasks: TaskSet) -> None:
        self.number = number
        self._worker_id = worker_id
        self._pool = BlockPool(settings.num_gpu_blocks, number)
        self.scheduler = Scheduler(
            clock=clock,
            step_time=step_time(settings),
            transfer_time=transfer_time(settings),
            tasks=tasks,
            pool=self._pool,
            limits=Limits(
                block_size=settings.block_size,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                chunked_prefill=settings.enable_chunked_prefill,
                preempt_oldest=settings.preemption_mode == "fifo",
            ),
            on_change=self._report,
        )
        self._gauges: Sequence[GaugeLike] = ()
        self._counters: Sequence[CounterLike] = ()
        self._counted = (0, 0, 0, 0)
        self._on_load: LoadListener | None = None

    @property
    def requests(self) -> int:
        """Requests that run or wait."""
        return self.scheduler.running + self.scheduler.waiting

    @property
    def load(self) -> ActiveLoad:
        """The load now."""
        used = self._pool.used
        return ActiveLoad(
            worker_id=self._worker_id,
            dp_rank=self.number,
            active_decode_blocks=used,
            active_prefill_tokens=self.scheduler.prefill_tokens,
            kv_used_blocks=used,
        )

    def kv_event_source(self) -> KvEventSource:
        """Return where the changes of its cache can be heard."""
        return KvEventSource(self.number, self._pool.subscribe)

    def load_source(self) -> LoadSource:
        """Return where its load can be heard; the present one is told at once."""
        return LoadSource(self.number, self._subscribe)

    def setup_metrics(self, metrics: MetricsScope) -> None:
        """Register the gauges and counters of this rank."""
        label, number = ("dp_rank",), str(self.number)
        self._gauges = [metrics.gauge(f"dynamo_mocker_{name}", text, label).labels(number) for name, text in _GAUGES]
        self._counters = [
            metrics.counter(f"dynamo_mocker_{name}", text, label).labels(number) for name, text in _COUNTERS
        ]
        self._report()

    def _subscribe(self, listener: LoadListener) -> None:
        self._on_load = listener
        listener(self.load)

    def _report(self) -> None:
        scheduler, pool = self.scheduler, self._pool
        if self._gauges:
            figures = (scheduler.running, scheduler.waiting, pool.used, pool.cached)
            for gauge, figure in zip(self._gauges, figures, strict=True):
                gauge.set(figure)
            counts = (
                scheduler.preemptions,
                scheduler.computed_tokens,
                scheduler.cached_tokens,
                scheduler.received_tokens,
            )
            if counts != self._counted:
                for counter, count, before in zip(self._counters, counts, self._counted, strict=True):
                    counter.inc(count - before)
                self._counted = counts
        if self._on_load is not None:
            self._on_load(self.load)
