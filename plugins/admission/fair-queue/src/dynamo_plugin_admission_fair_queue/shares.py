"""Fair shares of one model by start-time fair queueing: a clock of tokens, and each tenant's position on it.

A tenant's next request carries the tag at which its last one ends; the lowest tag goes first. A tenant that comes
back after a pause starts at the clock: what it did not use is not saved up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Account:
    """One tenant: where its last request ends, the tag of its next one while any wait, and how many wait or run."""

    finish: float = 0.0
    tag: float = 0.0
    waiting: int = 0
    running: int = 0


class Shares:
    """The accounts of all tenants that have something to do. Costs are in tokens; `weight` tells a tenant's share."""

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._clock = 0.0
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        """Return tenants that have an account."""
        return len(self._accounts)

    def tag(self, tenant: str) -> float:
        """Return where the tenant's next request starts; the lowest goes first."""
        account = self._accounts.get(tenant)
        if account is None:
            return self._clock
        return account.tag if account.waiting else max(self._clock, account.finish)

    def waiting(self, tenant: str) -> int:
        """Return requests of a tenant that wait."""
        account = self._accounts.get(tenant)
        return 0 if account is None else account.waiting

    def load(self, tenant: str, more: int = 0) -> float:
        """Return requests of a tenant that wait, and `more`, by its weight."""
        return (self.waiting(tenant) + more) / self._weight(tenant)

    def part(self, tenant: str) -> float:
        """Return the tenant's part, above 0 to 1, of what all waiting tenants have, itself among them."""
        own = self._weight(tenant)
        others = sum(self._weight(name) for name, one in self._accounts.items() if one.waiting and name != tenant)
        return own / (own + others)

    def has_its_part(self, tenant: str, places: int) -> bool:
        """Return whether it runs as much as its weight gives it of so many places, which is half of them at most."""
        account = self._accounts.get(tenant)
        if account is None:
            return False
        all_of = sum(self._weight(name) for name, one in self._accounts.items() if one.waiting or one.running)
        return account.running >= places * min(0.5, self._weight(tenant) / all_of if all_of else 0.5)

    def enqueue(self, tenant: str) -> None:
        """Add a request of the tenant to the waiting ones."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account()
        if not account.waiting:
            account.tag = max(self._clock, account.finish)
        account.waiting += 1

    def give_up(self, tenant: str) -> None:
        """Remove a request that waited."""
        account = self._accounts[tenant]
        account.waiting -= 1
        self._tidy(tenant, account)

    def begin(self, tenant: str, cost: float, *, waited: bool) -> None:
        """Begin a request of the tenant, which `waited` or did not have to."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account()
        start = self.tag(tenant)
        # Others that still wait must not lose what they are behind, whatever the priority of this one.
        bounds = [one.tag for one in self._accounts.values() if one.waiting and one is not account]
        self._clock = max(self._clock, min([start, *bounds]))
        account.finish = start + cost / self._weight(tenant)
        account.tag = account.finish
        account.running += 1
        account.waiting -= waited

    def end(self, tenant: str, correction: float) -> None:
        """End a request that ran and cost so many tokens more than expected when it began."""
        account = self._accounts[tenant]
        account.running -= 1
        account.finish = max(0.0, account.finish + correction / self._weight(tenant))
        if account.waiting:
            account.tag = max(0.0, account.tag + correction / self._weight(tenant))
        self._tidy(tenant, account)

    def _tidy(self, tenant: str, account: _Account) -> None:
        if account.waiting or account.running:
            return
        if account.finish <= self._clock:
            del self._accounts[tenant]
        if not any(one.waiting or one.running for one in self._accounts.values()):
            # No tenant is behind another: begin anew, before numbers grow large.
            self._accounts.clear()
            self._clock = 0.0
