"""The metrics of the queue."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

from dynamo_core import MetricFamily, MetricsScope

#: Tenants with a label of their own beside those of the settings; all others share one.
_TENANTS = 64
OTHERS = "(others)"
_WAITS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60)

ChildT = TypeVar("ChildT")


class _Children(Generic[ChildT]):
    """The children of a metric, each looked up once."""

    __slots__ = ("_family", "_known")

    def __init__(self, family: MetricFamily[ChildT]) -> None:
        self._family = family
        self._known: dict[tuple[str, ...], ChildT] = {}

    def of(self, *values: str) -> ChildT:
        """Return the child with these values."""
        child = self._known.get(values)
        if child is None:
            child = self._known[values] = self._family.labels(*values)
        return child


class Meters:
    """Gauges and counters by model and tenant; of priorities only whether they are above or below the usual."""

    def __init__(self, metrics: MetricsScope, tenants: Collection[str]) -> None:
        self._named = set(tenants)
        self._room = _TENANTS
        self._waiting = _Children(
            metrics.gauge(
                "dynamo_admission_queue_requests",
                "Requests that wait to be admitted. priority is high, normal or low.",
                ("model", "tenant", "priority"),
            )
        )
        self._running = _Children(
            metrics.gauge(
                "dynamo_admission_running_requests",
                "Requests that were admitted and have not ended.",
                ("model", "tenant"),
            )
        )
        self._waits = _Children(
            metrics.histogram(
                "dynamo_admission_wait_seconds", "Seconds that an admitted request has waited.", ("model",), _WAITS
            )
        )
        self._refused = _Children(
            metrics.counter(
                "dynamo_admission_refusals_total",
                "Requests that were refused. reason is full, waited, deadline, pushed_out, rate or closed.",
                ("model", "tenant", "reason"),
            )
        )

    def waiting(self, model: str, tenant: str, priority: int, change: int) -> None:
        """Add to the number of requests that wait."""
        rank = "high" if priority > 0 else "low" if priority < 0 else "normal"
        self._waiting.of(model, self._label(tenant), rank).inc(change)

    def running(self, model: str, tenant: str, change: int) -> None:
        """Add to the number of requests that run."""
        self._running.of(model, self._label(tenant)).inc(change)

    def waited(self, model: str, seconds: float) -> None:
        """Record that a request was admitted."""
        self._waits.of(model).observe(seconds)

    def refused(self, model: str, tenant: str, reason: str) -> None:
        """Record that a request was refused."""
        self._refused.of(model, self._label(tenant), reason).inc()

    def _label(self, tenant: str) -> str:
        if tenant not in self._named:
            if not self._room:
                return OTHERS
            self._room -= 1
            self._named.add(tenant)
        return tenant


class SharingMeters:
    """The metric of whether limits hold over all frontends."""

    def __init__(self, metrics: MetricsScope) -> None:
        self._peers = metrics.gauge(
            "dynamo_admission_shared_peers",
            "Frontends, other than this one, whose requests count for the limits of tenants.",
        ).labels()
        self._stale = metrics.gauge(
            "dynamo_admission_shared_stale",
            "1 while Redis does not answer, and what other frontends have is not known.",
        ).labels()

    def peers(self, count: int, *, stale: bool) -> None:
        """Set the number of peers that count; `stale` if they could not be asked."""
        self._peers.set(count)
        self._stale.set(stale)
