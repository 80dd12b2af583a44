"""The limits of each tenant, independent of others: concurrent requests, and tokens per second.

Other frontends count as well, as far as they report their usage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dynamo_plugin_admission_fair_queue.config import TenantSettings
from dynamo_plugin_admission_fair_queue.usage_codec import TenantUse

#: Seconds' worth of tokens that may be saved up, unless the settings say how many.
_BURST = 10.0


@dataclass(slots=True, eq=False)
class _Use:
    """The usage of a tenant: requests under way here, and tokens it may still spend, as of a time.

    `spent` is what it has spent here, less what came back; `number` tells it from an earlier one of the same tenant.
    """

    number: int
    tokens: float
    at: float
    running: int = 0
    spent: float = 0.0


class TenantLimits:
    """Counts the usage of tenants, over all models. `settings` are those of a tenant; `now` is in seconds of one clock.

    Tokens are paid for when a request begins, as far as they are known, and the rest when it ends. A tenant in debt
    waits until it is paid off: then one request may begin, however large.

    With `shared`, no tenant is forgotten before its usage has been reported.
    """

    def __init__(self, settings: Callable[[str], TenantSettings], *, shared: bool = False) -> None:
        self._settings = settings
        self._shared = shared
        self._uses: dict[str, _Use] = {}
        self._made = 0
        self._peer_running: Mapping[str, int] = {}
        #: How often a request has begun or ended here.
        self.changes = 0

    def __len__(self) -> int:
        """Return tenants that have something under way, or are not yet back at what they may save up."""
        return len(self._uses)

    def running(self, tenant: str) -> int:
        """Return requests that a tenant has under way here."""
        use = self._uses.get(tenant)
        return 0 if use is None else use.running

    def full(self, tenant: str) -> bool:
        """Return whether it has as many requests under way as it may."""
        limit = self._settings(tenant).concurrency
        return limit is not None and self.running(tenant) + self._peer_running.get(tenant, 0) >= limit

    def ready_at(self, tenant: str, now: float) -> float:
        """Return when it may spend tokens again: `now`, or later."""
        use, rate = self._uses.get(tenant), self._settings(tenant).tokens_per_second
        if use is None or rate is None:
            return now
        self._refill(tenant, use, now)
        if use.tokens > 0:
            return now
        # The next number that is later for sure, as no time passes otherwise where a debt is tiny.
        return max(math.nextafter(now, math.inf), now + (1e-6 - use.tokens) / rate)

    def begin(self, tenant: str, cost: float, now: float) -> None:
        """Begin a request that is expected to cost so many tokens."""
        use = self._use(tenant, now)
        use.running += 1
        self._spend(tenant, use, cost)
        self.changes += 1

    def end(self, tenant: str, correction: float, now: float) -> None:
        """End a request that has cost so many tokens more."""
        use = self._uses[tenant]
        self._refill(tenant, use, now)
        use.running -= 1
        self._spend(tenant, use, correction)
        self.changes += 1
        if not self._shared:
            self.tidy(tenant, now)

    def tidy(self, tenant: str, now: float) -> None:
        """Forget a tenant that is as one never seen."""
        use = self._uses.get(tenant)
        if use is None or use.running:
            return
        self._refill(tenant, use, now)
        if self._settings(tenant).tokens_per_second is None or use.tokens >= self._burst(tenant):
            del self._uses[tenant]

    def change(self, settings: Callable[[str], TenantSettings], now: float) -> None:
        """Go by other settings from now on. A debt stays one, but a tenant that had no rate owes nothing."""
        for tenant, use in self._uses.items():
            self._refill(tenant, use, now)
        former, self._settings = self._settings, settings
        for tenant, use in list(self._uses.items()):
            burst = self._burst(tenant)
            use.tokens = burst if former(tenant).tokens_per_second is None else min(use.tokens, burst)
            if not self._shared:
                self.tidy(tenant, now)

    # Peers.

    def report(self, now: float) -> dict[str, TenantUse]:
        """Return the usage that peers need, by tenant: of those with a limit and with usage.

        Forget the tenants without usage, once they have been reported so.
        """
        usage = {}
        for tenant, use in list(self._uses.items()):
            settings = self._settings(tenant)
            if settings.concurrency is not None or settings.tokens_per_second is not None:
                self._refill(tenant, use, now)
                usage[tenant] = TenantUse(use.number, use.running, use.spent, use.tokens)
            self.tidy(tenant, now)
        return usage

    def set_peer_running(self, running: Mapping[str, int]) -> None:
        """Set how many requests tenants have under way in all other frontends together."""
        self._peer_running = running

    def spent_by_peer(self, tenant: str, tokens: float, now: float) -> None:
        """Count tokens that a tenant spent in another frontend; below 0 if some came back."""
        if tokens and self._settings(tenant).tokens_per_second is not None:
            use = self._use(tenant, now)
            use.tokens = min(use.tokens - tokens, self._burst(tenant))

    def at_most(self, tenant: str, tokens: float, age: float, now: float) -> None:
        """Apply the report of another frontend, `age` seconds old, of how many tokens a tenant may still spend."""
        rate = self._settings(tenant).tokens_per_second
        if rate is not None:
            use = self._use(tenant, now)
            use.tokens = min(use.tokens, tokens + age * rate)

    def _use(self, tenant: str, now: float) -> _Use:
        """Return what it has as of now."""
        use = self._uses.get(tenant)
        if use is None:
            self._made += 1
            use = self._uses[tenant] = _Use(self._made, self._burst(tenant), now)
        self._refill(tenant, use, now)
        return use

    def _spend(self, tenant: str, use: _Use, tokens: float) -> None:
        before = use.tokens
        use.tokens = min(before - tokens, self._burst(tenant))
        # What comes back beyond what may be saved up is lost here, and so must be elsewhere.
        use.spent += before - use.tokens

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
