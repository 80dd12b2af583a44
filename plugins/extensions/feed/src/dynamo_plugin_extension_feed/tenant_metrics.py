"""Metrics by tenant, which the frontend lacks, since only some deployments know tenants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dynamo_core import CounterLike, MetricsScope
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
            f"{prefix}_{_REQUESTS}",
            "Requests of a tenant that have ended: answered, refused or failed.",
            ("tenant", "outcome"),
        )
        self._tokens = metrics.counter(
            f"{prefix}_{_TOKENS}",
            "Tokens of the ended requests of a tenant. kind is prompt, output, or cached: of prompts, from a cache.",
            ("tenant", "kind"),
        )
        self._known: dict[str, _Tenant] = {}

    def add(self, record: RequestRecord, refused: bool) -> None:
        """Record that a request has ended."""
        tenant = self._known.get(record.tenant) or self._tenant(record.tenant)
        outcome = ANSWERED if record.status == "success" else REFUSED if refused else FAILED
        tenant.requests[outcome].inc()
        tenant.tokens[_PROMPT].inc(record.prompt_tokens)
        tenant.tokens[_OUTPUT].inc(record.output_tokens)
        tenant.tokens[_CACHED].inc(record.cached_tokens or 0)

    def _tenant(self, name: str) -> _Tenant:
        name = name if len(self._known) < TENANTS else OTHER
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = _Tenant(
                {outcome: self._requests.labels(name, outcome) for outcome in (ANSWERED, REFUSED, FAILED)},
                {kind: self._tokens.labels(name, kind) for kind in (_PROMPT, _OUTPUT, _CACHED)},
            )
        return known


@dataclass(frozen=True, slots=True)
class _Tenant:
    """The counters of one tenant, which are looked up once."""

    requests: Mapping[str, CounterLike]
    tokens: Mapping[str, CounterLike]
