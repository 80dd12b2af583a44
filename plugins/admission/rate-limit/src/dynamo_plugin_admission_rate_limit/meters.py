"""The metrics of the limits."""

from __future__ import annotations

from dynamo_core import MetricsScope

#: Refusals because the server that counts does not answer: the rule is none, and so is the limit.
OUTAGE = "outage"


class Meters:
    """Counts refusals by rule and limit; names of keys, tenants, users and models are no labels."""

    def __init__(self, metrics: MetricsScope) -> None:
        self._metrics = metrics
        self._refused = metrics.counter(
            "dynamo_admission_rate_limited_total",
            "Requests that were refused. limit is requests, tokens, concurrency or outage; an outage has no rule.",
            ("rule", "limit"),
        )

    def refused(self, rule: str, limit: str) -> None:
        """Record that a request was refused."""
        self._refused.labels(rule, limit).inc()

    def stale(self, stale: bool) -> None:
        """Set whether the server that counts for all frontends cannot be asked now."""
        self._metrics.gauge(
            "dynamo_admission_rate_limit_stale", "1 while Redis does not answer, which counts for all frontends."
        ).labels().set(stale)
