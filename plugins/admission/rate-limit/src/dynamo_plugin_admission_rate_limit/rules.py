"""A rule: the requests it applies to, the key it counts by, and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from dynamo_core import Principal

from dynamo_plugin_admission_rate_limit.config import Dimension, RuleSettings

#: The limits that a rule can have, as metrics name them.
REQUESTS, TOKENS, CONCURRENCY = "requests", "tokens", "concurrency"


@dataclass(frozen=True, slots=True)
class Rate:
    """An amount a minute, of which at most `capacity` is saved up."""

    per_minute: float
    capacity: float

    @classmethod
    def of(cls, per_minute: float | None, burst: int | None) -> Self | None:
        """Return a rate of the settings; None if they have none. A whole one can be saved up always."""
        return None if per_minute is None else cls(per_minute, max(1.0, per_minute if burst is None else burst))

    @property
    def per_second(self) -> float:
        """The same for a second."""
        return self.per_minute / 60


@dataclass(frozen=True, slots=True)
class Rule:
    """The limits of each combination of `by`, for the requests that it covers."""

    name: str
    by: tuple[Dimension, ...]
    keys: frozenset[str] | None
    tenants: frozenset[str] | None
    models: frozenset[str] | None
    requests: Rate | None
    tokens: Rate | None
    concurrency: int | None

    @classmethod
    def of(cls, settings: RuleSettings) -> Self:
        """Return the rule that settings describe."""
        return cls(
            settings.label,
            settings.by,
            settings.keys,
            settings.tenants,
            settings.models,
            Rate.of(settings.requests_per_minute, settings.burst_requests),
            Rate.of(settings.tokens_per_minute, settings.burst_tokens),
            settings.concurrent_requests,
        )

    def values(self, principal: Principal, model: str) -> tuple[str, ...] | None:
        """Return what the rule tells this request apart by; None if it does not apply."""
        if self.keys is not None and principal.key_id not in self.keys:
            return None
        if self.tenants is not None and principal.tenant not in self.tenants:
            return None
        if self.models is not None and model not in self.models:
            return None
        known = {"key": principal.key_id, "tenant": principal.tenant, "model": model, "user": principal.user}
        return tuple([known[name] for name in self.by])

    def message(self, limit: str) -> str:
        """Return what a client is told that is over a limit; never a name of a key, tenant, user or model."""
        whose = f"for each {' and '.join(self.by)}" if self.by else "for all clients together"
        if limit == CONCURRENCY:
            allowed = f"{self.concurrency} concurrent requests"
        else:
            rate = self.requests if limit == REQUESTS else self.tokens
            allowed = f"{_number(rate.per_minute)} {limit} per minute" if rate is not None else limit
        return f"Rate limit reached: {allowed} {whose}, please retry later"


def _number(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() else f"{value:g}"
