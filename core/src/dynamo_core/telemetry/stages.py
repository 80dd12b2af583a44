"""Where requests are before a worker has them, and how long each part of that way takes."""

from __future__ import annotations

import time

from dynamo_core.telemetry.metrics import Gauge, Histogram, Metrics

PREPROCESS, ROUTE, DISPATCH = "preprocess", "route", "dispatch"

#: Seconds.
BUCKETS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)


class Stage:
    """One part of the way: how many requests are in it now, and how long they were."""

    __slots__ = ("_current", "_duration")

    def __init__(self, duration: Histogram, current: Gauge) -> None:
        self._duration = duration
        self._current = current

    def enter(self) -> float:
        """A request comes; returns when, for `leave`."""
        self._current.inc()
        return time.perf_counter()

    def leave(self, since: float) -> None:
        """It goes on, or ends here."""
        self._current.dec()
        self._duration.observe(time.perf_counter() - since)


class Stages:
    """The metrics of all parts. A part is made once and kept by whoever passes requests through it."""

    def __init__(self, metrics: Metrics, prefix: str = "dynamo_frontend") -> None:
        self._durations = metrics.histogram(
            f"{prefix}_stage_duration_seconds", "Time that requests spend in a part of their way.", ("stage",), BUCKETS
        )
        self._current = metrics.gauge(
            f"{prefix}_stage_requests", "Requests in a part of their way now.", ("stage", "phase")
        )

    def stage(self, name: str, phase: str = "") -> Stage:
        """One part. `phase` is the role of the worker that is sought; before it is known there is none."""
        return Stage(self._durations.labels(name), self._current.labels(name, phase))
