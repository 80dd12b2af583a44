"""Gauges computed at scrape time: current models and workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dynamo_core.protocol.records import ModelCard, RequestRecord
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from dynamo_runtime.dispatch.load.monitor import WorkerMonitor
from dynamo_runtime.dispatch.load.tracker import LoadTracker
from dynamo_runtime.dispatch.models.models import Models

_WORKER = ("worker_id", "dp_rank", "worker_type")
_ROLE = ("model", "worker_id", "worker_type")
#: The rank of a request to a worker with several: nothing above the pipeline knows it.
_ANY_RANK = "any"

_CARD = {
    "model_context_length": "Tokens that a prompt and its answer may have together.",
    "model_kv_cache_block_size": "Tokens in a block of the KV cache.",
    "model_max_num_batched_tokens": "Tokens that an engine computes in one step at most.",
    "model_max_num_seqs": "Requests that an engine runs at a time at most.",
    "model_total_kv_blocks": "KV blocks of one rank.",
    "model_migration_limit": "Moves to another worker that a request may make once its answer has begun.",
}


class FrontGauges(Collector):
    """A collector of the current models and workers, their load, and each worker's last request.

    Costs nothing between two readings but a note of the last request of each worker. Read from a thread.
    """

    def __init__(self, models: Models, tracker: LoadTracker, prefix: str, monitor: WorkerMonitor | None = None) -> None:
        self._models = models
        self._tracker = tracker
        self._monitor = monitor
        self._prefix = prefix
        self._last: dict[int, RequestRecord] = {}
        #: The last with more than one token, between which there is time.
        self._spread: dict[int, RequestRecord] = {}

    def finished(self, record: RequestRecord) -> None:
        """Record that a request has ended."""
        if record.instance_id is not None and record.time_to_first_token is not None:
            self._last[record.instance_id] = record
            if record.output_tokens > 1:
                self._spread[record.instance_id] = record

    def describe(self) -> Iterable[Metric]:
        """Return the names, without a look at anything."""
        return self._families().values()

    def collect(self) -> Iterable[Metric]:
        """Return everything as it is now."""
        families = self._families()
        workers: set[int] = set()
        for name, ready in self._models.readiness().items():
            families["model_ready"].add_metric([name], float(ready))
        for model in self._models.list():
            for name, value in _facts(model.card):
                families[name].add_metric([model.name], value)
            for role, group in list(model.groups.items()):
                for instance_id, card in list(group.pool.cards.items()):
                    workers.add(instance_id)
                    labels = [model.name, f"{instance_id:016x}", role]
                    if (instance := group.pool.instances.get(instance_id)) is not None:
                        families["worker_state"].add_metric([*labels, instance.state_name], 1.0)
                    self._add_worker(families, instance_id, role, card)
                    families["worker_busy"].add_metric(labels, float(instance_id in group.pool.busy))
        for gone in set(self._last) - workers:
            self._last.pop(gone, None)
            self._spread.pop(gone, None)
        return families.values()

    def _add_worker(self, families: dict[str, GaugeMetricFamily], instance_id: int, role: str, card: ModelCard) -> None:
        config, worker = card.runtime_config, f"{instance_id:016x}"
        first, size = config.data_parallel_start_rank, config.data_parallel_size
        for rank in range(first, first + size):
            labels = [worker, str(rank), role]
            families["worker_active_prefill_tokens"].add_metric(labels, self._tracker.prefill_tokens(instance_id, rank))
            used = self._tracker.used_blocks(instance_id, rank, card.kv_cache_block_size)
            families["worker_active_decode_blocks"].add_metric(labels, used)
            if self._monitor is not None:
                load = self._monitor.load(instance_id, rank)
                told = self._monitor.reported_blocks(instance_id, rank)
                families["worker_kv_blocks_active"].add_metric(labels[:2], used if told is None else told)
                if load.kv_total_blocks is not None:
                    families["worker_kv_blocks_total"].add_metric(labels[:2], load.kv_total_blocks)
        if (last := self._last.get(instance_id)) is None or last.time_to_first_token is None:
            return
        labels = [worker, str(first) if size == 1 else _ANY_RANK, role]
        families["worker_last_time_to_first_token_seconds"].add_metric(labels, last.time_to_first_token)
        families["worker_last_input_sequence_tokens"].add_metric(labels, last.prompt_tokens)
        if (spread := self._spread.get(instance_id)) is not None and spread.time_to_first_token is not None:
            gap = (spread.duration - spread.time_to_first_token) / (spread.output_tokens - 1)
            families["worker_last_inter_token_latency_seconds"].add_metric(labels, gap)

    def _families(self) -> dict[str, GaugeMetricFamily]:
        told: dict[str, tuple[str, tuple[str, ...]]] = {
            "model_ready": (
                "1 while the model can be asked: every role that it needs has a worker. 0 also without any worker.",
                ("model",),
            ),
            **{name: (text, ("model",)) for name, text in _CARD.items()},
            "worker_active_decode_blocks": (
                "KV blocks in use on a rank: reported by its worker, or placed since. Thresholds are compared with it.",
                _WORKER,
            ),
            "worker_active_prefill_tokens": (
                "Tokens of prompts that a rank has yet to compute, as far as frontends know.",
                _WORKER,
            ),
            "worker_kv_blocks_active": (
                "KV blocks in use on a rank, as its worker reported last, or else as placed.",
                _WORKER[:2],
            ),
            "worker_kv_blocks_total": ("KV blocks of a rank.", _WORKER[:2]),
            "worker_busy": ("1 while a worker is over its thresholds, so that routers pass it over.", _ROLE),
            "worker_state": (
                "1 for the state that a worker is in: serving, cordoned or draining, as operators set it.",
                (*_ROLE, "state"),
            ),
            "worker_last_time_to_first_token_seconds": (
                "Seconds from the arrival of the last request of a worker to its first output.",
                _WORKER,
            ),
            "worker_last_inter_token_latency_seconds": (
                "Seconds between two tokens, on average over the last answer of a worker with more than one.",
                _WORKER,
            ),
            "worker_last_input_sequence_tokens": ("Tokens of the prompt of the last request of a worker.", _WORKER),
        }
        return {
            name: GaugeMetricFamily(f"{self._prefix}_{name}", text, labels=labels)
            for name, (text, labels) in told.items()
        }


def _facts(card: ModelCard) -> Iterator[tuple[str, int]]:
    """Return what a card tells in numbers; what it does not tell is left out."""
    config = card.runtime_config
    told = {
        "model_context_length": card.context_length,
        "model_kv_cache_block_size": card.kv_cache_block_size,
        "model_max_num_batched_tokens": config.max_num_batched_tokens,
        "model_max_num_seqs": config.max_num_seqs,
        "model_total_kv_blocks": config.total_kv_blocks,
        "model_migration_limit": card.migration_limit,
    }
    return ((name, value) for name, value in told.items() if value is not None)
