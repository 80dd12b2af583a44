"""What the other frontends have, as they last told. Knows of time what it is told, and of no event loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from dynamo_core.protocol.unreadable import UnreadableWarner

from dynamo_plugin_admission_fair_queue.limits import TenantLimits
from dynamo_plugin_admission_fair_queue.told import Look, TenantUse, decode

log = logging.getLogger(__name__)


class _Other:
    """One other frontend: what its tenants have, and until when that counts."""

    __slots__ = ("tenants", "until")

    def __init__(self) -> None:
        self.tenants: dict[str, TenantUse] = {}
        self.until = 0.0


class Others:
    """Has the limits of tenants count what others have. `ttl` and `now` are in seconds, of this process's clock.

    What a frontend has counts until `ttl` after it told so, by the server's clock, and not beyond however often it is
    looked at. One that is not listed any more counts until then as well: a server that was emptied lists nobody.
    """

    def __init__(self, limits: TenantLimits, ttl: float) -> None:
        self._limits = limits
        self._ttl = ttl
        self._others: dict[str, _Other] = {}
        self._unreadable = UnreadableWarner(log, "what is told of tenants by frontend")
        #: When those who were listed at the last look had told what is known of them.
        self.stamps: Mapping[str, int] = {}

    def __len__(self) -> int:
        """Frontends that count."""
        return len(self._others)

    @property
    def until(self) -> float | None:
        """When the first of them stops to count, unless it is heard of; None if there is none."""
        return min((other.until for other in self._others.values()), default=None)

    def hear(self, look: Look, now: float) -> bool:
        """Takes in what a look has shown; whether anything is different."""
        for name, data in look.told.items():
            age = max(0.0, (look.now - look.stamps[name]) / 1e6)
            # Without data it has expired in the meantime.
            if data and age < self._ttl:
                self._take_in(name, data, age, now)
        self.stamps = look.stamps
        self._sum()
        return self.expire(now) or bool(look.told)

    def expire(self, now: float) -> bool:
        """Frontends that have been silent for too long count no more; whether there were any."""
        silent = [name for name, other in self._others.items() if other.until <= now]
        for name in silent:
            del self._others[name]
        if silent:
            self._sum()
        return bool(silent)

    def clear(self) -> None:
        """Nobody counts any more."""
        self._others.clear()
        self._sum()

    def _take_in(self, name: str, data: bytes, age: float, now: float) -> None:
        try:
            told = decode(data)
        except ValueError as error:
            self._unreadable.warn(name, error)
            return
        self._unreadable.readable(name)
        other = self._others.get(name)
        first = other is None
        if other is None:
            other = self._others[name] = _Other()
        for tenant, use in told.tenants.items():
            if first:
                # How much of its spending is known here nobody can say; what was left is what others know as well.
                self._limits.at_most(tenant, use.left, age, now)
                continue
            before = other.tenants.get(tenant)
            known = before.spent if before is not None and before.number == use.number else 0.0
            self._limits.spent_elsewhere(tenant, use.spent - known, now)
        other.tenants, other.until = told.tenants, now + self._ttl - age
        if told.leaving:
            del self._others[name]

    def _sum(self) -> None:
        running: dict[str, int] = {}
        for other in self._others.values():
            for tenant, use in other.tenants.items():
                running[tenant] = running.get(tenant, 0) + use.running
        self._limits.elsewhere(running)
