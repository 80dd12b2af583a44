"""Metrics by tenant, which the frontend's own do not have, since only some deployments know tenants."""

from __future__ import annotations

from typing import Final

from dynamo_core import MetricsScope
from dynamo_core.protocol import RequestRecord

from dynamo_plugin_extension_feed.rates import OTHER, TENANTS

ANSWERED, REFUSED, FAILED = "answered", "refused", "failed"
_PROMPT, _OUTPUT, _CACHED = "prompt", "output", "cached"

#: Metrics by tenant, after the prefix of the frontend's.
_REQUESTS: Final = "tenant_requests_total"
_TOKENS: Final = "tenant_tokens_total"


class TenantMeters:
    """Counts the requests of the first `TENANTS` tenants, and of all others together as `OTHER`."""

    def __init__(self, metrics: MetricsScope, prefix: str) -> None:
        self._requests = metrics.counter(
            f"{prefix}_{_REQUESTS}", "Requests that have ended, by tenant.", ("tenant", "outcome")
        )
        self._tokens = metrics.counter(f"{prefix}_{_TOKENS}", "Tokens of requests, by tenant.", ("tenant", "kind"))
        self._known: set[str] = set()

    def add(self, record: RequestRecord, refused: bool) -> None:
        """A request has ended."""
        tenant = record.tenant
        if tenant not in self._known:
            if len(self._known) < TENANTS:
                self._known.add(tenant)
            else:
                tenant = OTHER
        outcome = ANSWERED if record.status == "success" else REFUSED if refused else FAILED
        self._requests.labels(tenant, outcome).inc()
        counts = {_PROMPT: record.prompt_tokens, _OUTPUT: record.output_tokens, _CACHED: record.cached_tokens or 0}
        for kind, count in counts.items():
            self._tokens.labels(tenant, kind).inc(count)
