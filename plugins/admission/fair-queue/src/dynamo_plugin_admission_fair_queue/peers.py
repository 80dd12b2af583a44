"""The usage of other frontends, as each last reported it. Callers pass the time; no event loop is involved."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_core.protocol import UnreadableWarner

from dynamo_plugin_admission_fair_queue.tenant_quotas import TenantLimits
from dynamo_plugin_admission_fair_queue.usage_codec import PeerSnapshot, TenantUse, decode

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Peer:
    """Another frontend: the usage of its tenants, and until when that counts."""

    tenants: dict[str, TenantUse] = field(default_factory=dict)
    until: float = 0.0


class Peers:
    """Makes the limits of tenants count the usage of peers. `ttl` and `now` are in seconds, of this process's clock.

    A report counts until `ttl` after the peer made it, by the server's clock, however often it is read. A peer that is
    not listed any more counts until then as well: a server that was emptied lists none.
    """

    def __init__(self, limits: TenantLimits, ttl: float) -> None:
        self._limits = limits
        self._ttl = ttl
        self._peers: dict[str, _Peer] = {}
        self._unreadable = UnreadableWarner(log, "what is told of tenants by frontend")
        #: When each peer of the last snapshot made its report.
        self.stamps: Mapping[str, int] = {}

    def __len__(self) -> int:
        """Return peers that count."""
        return len(self._peers)

    @property
    def until(self) -> float | None:
        """The time at which the next peer stops to count unless it reports; None if there is none."""
        return min((peer.until for peer in self._peers.values()), default=None)

    def apply(self, snapshot: PeerSnapshot, now: float) -> bool:
        """Take in a snapshot; whether anything has changed."""
        for name, data in snapshot.reports.items():
            age = max(0.0, (snapshot.now - snapshot.stamps[name]) / 1e6)
            # Without data the report has expired in the meantime.
            if data and age < self._ttl:
                self._take_in(name, data, age, now)
        self.stamps = snapshot.stamps
        self._sum()
        return self.expire(now) or bool(snapshot.reports)

    def expire(self, now: float) -> bool:
        """Drop the peers that have been silent for too long; whether there were any."""
        silent = [name for name, peer in self._peers.items() if peer.until <= now]
        for name in silent:
            del self._peers[name]
        if silent:
            self._sum()
        return bool(silent)

    def clear(self) -> None:
        """Drop all peers."""
        self._peers.clear()
        self._sum()

    def _take_in(self, name: str, data: bytes, age: float, now: float) -> None:
        try:
            report = decode(data)
        except ValueError as error:
            self._unreadable.warn(name, error)
            return
        self._unreadable.readable(name)
        peer = self._peers.get(name)
        first = peer is None
        if peer is None:
            peer = self._peers[name] = _Peer()
        for tenant, use in report.tenants.items():
            if first:
                # How much of its spending is known here already is unclear; the tokens left are known to all.
                self._limits.at_most(tenant, use.left, age, now)
                continue
            before = peer.tenants.get(tenant)
            known = before.spent if before is not None and before.number == use.number else 0.0
            self._limits.spent_by_peer(tenant, use.spent - known, now)
        peer.tenants, peer.until = report.tenants, now + self._ttl - age
        if report.leaving:
            del self._peers[name]

    def _sum(self) -> None:
        running: dict[str, int] = {}
        for peer in self._peers.values():
            for tenant, use in peer.tenants.items():
                running[tenant] = running.get(tenant, 0) + use.running
        self._limits.set_peer_running(running)
