"""The metrics of the service, for ``GET /metrics``."""

from __future__ import annotations

from collections.abc import Callable

from dynamo_telemetry import Counter, Gauge, Metrics

from dynamo_plugin_router_slot_tracker.registry import Registry
from dynamo_plugin_router_slot_tracker.replication.replicas import Replicas

_PREFIX = "dynamo_slot_tracker"
_SCOPE = ("model", "tenant_id")


class ServiceMetrics:
    """Counts calls as they come, and reads all else at each scrape."""

    def __init__(self, registry: Registry, replicas: Replicas | None) -> None:
        self._registry = registry
        self._replicas = replicas
        self._metrics = metrics = Metrics()
        self._calls = metrics.counter(
            f"{_PREFIX}_calls_total", "Calls that were answered, by HTTP status.", ("route", "status")
        )
        self._known_calls: dict[tuple[str, int], Counter] = {}
        self._expired = metrics.gauge(
            f"{_PREFIX}_expired_requests", "Requests that were counted out because of their age, since the start."
        ).labels()
        self._gauges = {
            name: metrics.gauge(f"{_PREFIX}_{name}", meaning, _SCOPE)
            for name, meaning in (
                ("workers", "Workers that are registered."),
                ("active_requests", "Requests that are active."),
                ("active_prefill_tokens", "Tokens of prompts that are yet to be computed."),
                ("active_decode_blocks", "KV blocks of active requests, each counted once on a rank."),
            )
        }
        self._sync: list[tuple[Gauge, Callable[[Replicas], int]]] = []
        if replicas is not None:
            events = metrics.gauge(
                f"{_PREFIX}_replica_events",
                "Events of replicas since the start: published, applied, dropped, malformed, missed.",
                ("kind",),
            )
            self._sync = [
                (events.labels("published"), lambda replicas: replicas.replication.counts.published),
                (events.labels("applied"), lambda replicas: replicas.replication.counts.applied),
                (events.labels("dropped"), lambda replicas: replicas.replication.counts.dropped),
                (events.labels("malformed"), lambda replicas: replicas.replication.counts.malformed),
                (events.labels("missed"), lambda replicas: replicas.replication.counts.missed),
                (
                    metrics.gauge(
                        f"{_PREFIX}_replica_repairs",
                        "Repairs since the start: all that a replica has was fetched because of a gap.",
                    ).labels(),
                    lambda replicas: replicas.replication.counts.repaired,
                ),
                (
                    metrics.gauge(f"{_PREFIX}_peers", "Replicas that this one listens to.").labels(),
                    lambda replicas: len(replicas.peers),
                ),
            ]
        self._shown: set[tuple[str, str]] = set()

    def count(self, route: str, status: int) -> None:
        """Record that one call was answered."""
        counter = self._known_calls.get((route, status))
        if counter is None:
            counter = self._known_calls[route, status] = self._calls.labels(route, str(status))
        counter.inc()

    async def render(self) -> bytes:
        """Return everything as Prometheus text."""
        self._read()
        return await self._metrics.render()

    def _read(self) -> None:
        self._expired.set(self._registry.expired)
        scopes = dict(self._registry.scopes())
        for gone in self._shown - scopes.keys():
            for gauge in self._gauges.values():
                gauge.remove(*gone)
        self._shown = set(scopes)
        for key, scope in scopes.items():
            ranks = [rank.active for rank in scope.ranks.values()]
            self._gauges["workers"].labels(*key).set(len(scope.workers))
            self._gauges["active_requests"].labels(*key).set(len(scope.requests))
            self._gauges["active_prefill_tokens"].labels(*key).set(sum(rank.prefill_tokens for rank in ranks))
            self._gauges["active_decode_blocks"].labels(*key).set(sum(rank.blocks for rank in ranks))
        if self._replicas is not None:
            for shown, read in self._sync:
                shown.set(read(self._replicas))
