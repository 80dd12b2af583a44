"""Metrics of the stages before a worker has a request: how many are in each, and for how long."""

from __future__ import annotations

import time

from dynamo_telemetry.metrics import Gauge, Histogram, Metrics

PREPROCESS, ROUTE, DISPATCH = "preprocess", "route", "dispatch"

#: Seconds.
BUCKETS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)


class Stage:
    """One stage: the number of requests in it now, and their durations."""

    __slots__ = ("_current", "_duration")

    def __init__(self, duration: Histogram, current: Gauge) -> None:
        self._duration = duration
        self._current = current

    def enter(self) -> float:
        """Count a request in; return the time, for `leave`."""
        self._current.inc()
        return time.perf_counter()

    def leave(self, since: float) -> None:
        """Count the request out."""
        self._current.dec()
        self._duration.observe(time.perf_counter() - since)


class Stages:
    """The metrics of all stages. The code that passes requests through a stage makes it once and keeps it."""

    def __init__(self, metrics: Metrics, prefix: str = "dynamo_frontend") -> None:
        self._durations = metrics.histogram(
            f"{prefix}_stage_duration_seconds",
            "Seconds in a stage: preprocess, route (choosing a worker), dispatch (until the worker accepts). A request "
            "passes the last two for each worker that is tried.",
            ("stage",),
            BUCKETS,
        )
        self._current = metrics.gauge(
            f"{prefix}_stage_requests",
            "Requests in a stage now. phase is the role of the worker to be found, empty in the stage preprocess.",
            ("stage", "phase"),
        )

    def stage(self, name: str, phase: str = "") -> Stage:
        """Return one stage. `phase` is the role of the worker to be found; empty before it is known."""
        return Stage(self._durations.labels(name), self._current.labels(name, phase))
