"""What a tenant may have for itself, whether others want anything or not: requests at once, and tokens a second."""

from __future__ import annotations

import math
from collections.abc import Callable

from dynamo_plugin_admission_fair_queue.config import TenantSettings

#: Seconds' worth of tokens that may be saved up, unless the settings say how many.
_BURST = 10.0


class _Use:
    """What a tenant has now: requests under way, and tokens it may still spend, as of a time."""

    __slots__ = ("at", "running", "tokens")

    def __init__(self, tokens: float, at: float) -> None:
        self.running = 0
        self.tokens = tokens
        self.at = at


class TenantLimits:
    """Counts what tenants have, over all models. `settings` are those of a tenant; `now` is in seconds of one clock.

    Tokens are paid for when a request begins, as far as they are known, and the rest when it ends. A tenant in debt
    waits until it is paid off: then one request may begin, however large.
    """

    def __init__(self, settings: Callable[[str], TenantSettings]) -> None:
        self._settings = settings
        self._uses: dict[str, _Use] = {}

    def __len__(self) -> int:
        """Tenants that have something under way, or are not yet back at what they may save up."""
        return len(self._uses)

    def running(self, tenant: str) -> int:
        """Requests that a tenant has under way."""
        use = self._uses.get(tenant)
        return 0 if use is None else use.running

    def full(self, tenant: str) -> bool:
        """Whether it has as many requests under way as it may."""
        limit = self._settings(tenant).concurrency
        return limit is not None and self.running(tenant) >= limit

    def ready_at(self, tenant: str, now: float) -> float:
        """When it may spend tokens again: `now`, or later."""
        use, rate = self._uses.get(tenant), self._settings(tenant).tokens_per_second
        if use is None or rate is None:
            return now
        self._refill(tenant, use, now)
        if use.tokens > 0:
            return now
        # The next number that is later for sure, as no time passes otherwise where a debt is tiny.
        return max(math.nextafter(now, math.inf), now + (1e-6 - use.tokens) / rate)

    def begin(self, tenant: str, cost: float, now: float) -> None:
        """A request begins that is expected to cost so many tokens."""
        use = self._uses.get(tenant)
        if use is None:
            use = self._uses[tenant] = _Use(self._burst(tenant), now)
        self._refill(tenant, use, now)
        use.running += 1
        use.tokens -= cost

    def end(self, tenant: str, correction: float, now: float) -> None:
        """It is over, and has cost so many tokens more."""
        use = self._uses[tenant]
        use.running -= 1
        self._refill(tenant, use, now)
        use.tokens = min(use.tokens - correction, self._burst(tenant))
        self.tidy(tenant, now)

    def tidy(self, tenant: str, now: float) -> None:
        """Forgets a tenant that is as one never seen."""
        use = self._uses.get(tenant)
        if use is None or use.running:
            return
        self._refill(tenant, use, now)
        if self._settings(tenant).tokens_per_second is None or use.tokens >= self._burst(tenant):
            del self._uses[tenant]

    def _refill(self, tenant: str, use: _Use, now: float) -> None:
        rate = self._settings(tenant).tokens_per_second
        if rate is not None:
            use.tokens = min(use.tokens + (now - use.at) * rate, self._burst(tenant))
        use.at = now

    def _burst(self, tenant: str) -> float:
        settings = self._settings(tenant)
        if settings.burst_tokens is not None:
            return float(settings.burst_tokens)
        return _BURST * (settings.tokens_per_second or 0.0)
