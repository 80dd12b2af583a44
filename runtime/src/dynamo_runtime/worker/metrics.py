"""Counters and gauges of one worker."""

from __future__ import annotations

import time
from collections.abc import Callable

from dynamo_core.contracts.metrics import MetricsScope

_DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class WorkerMetrics:
    """The metrics of a worker's requests. Children are looked up once."""

    def __init__(self, metrics: MetricsScope) -> None:
        prefix = "dynamo_component_"
        self._changed = metrics.changed
        self._requests = metrics.counter(
            f"{prefix}requests_total", "Requests that have ended, failed and cancelled ones too."
        ).labels()
        self._inflight = metrics.gauge(
            f"{prefix}inflight_requests",
            "Requests that were accepted and have not ended, those that wait for the engine too.",
        ).labels()
        self._duration = metrics.histogram(
            f"{prefix}request_duration_seconds",
            "Seconds from the acceptance of a request to its end.",
            (),
            _DURATION_BUCKETS,
        ).labels()
        self._cancellations = metrics.counter(
            f"{prefix}cancellation_total", "Requests that their caller cancelled while the engine had them."
        ).labels()
        self._errors = metrics.counter(
            f"{prefix}errors_total", "Requests that failed in the engine. error_type is generate.", ("error_type",)
        )
        self._load_time = metrics.gauge(
            f"{prefix}model_load_time_seconds", "Seconds that the engine took to start."
        ).labels()
        self._drain_time = metrics.gauge(
            f"{prefix}drain_time_seconds", "Seconds that the engine took to drain."
        ).labels()
        self._cleanup_time = metrics.gauge(
            f"{prefix}cleanup_time_seconds", "Seconds that the engine took to clean up."
        ).labels()

    def request(self) -> Callable[[], None]:
        """Count a request in; the result counts it out."""
        begun = time.perf_counter()
        self._inflight.inc()

        def ended() -> None:
            self._inflight.dec()
            self._requests.inc()
            self._duration.observe(time.perf_counter() - begun)
            self._changed()

        return ended

    def cancelled(self) -> None:
        """Record that the caller of a request gave up."""
        self._cancellations.inc()

    def error(self, error_type: str) -> None:
        """Record that a request failed."""
        self._errors.labels(error_type).inc()

    def loaded(self, seconds: float) -> None:
        """Record that the engine has started."""
        self._load_time.set(seconds)

    def drained(self, seconds: float) -> None:
        """Record that the engine has been drained, or was given up."""
        self._drain_time.set(seconds)

    def cleaned_up(self, seconds: float) -> None:
        """Record that the engine has been cleaned up, or was given up."""
        self._cleanup_time.set(seconds)
