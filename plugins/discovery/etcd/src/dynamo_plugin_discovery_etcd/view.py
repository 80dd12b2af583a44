"""`View`: one process's view of the store, and the events for its watches."""

from __future__ import annotations

from collections.abc import Iterable

from dynamo_core import WatchEvent, WatchKind
from dynamo_leases import NO_LEASE

from dynamo_plugin_discovery_etcd.wire import Change, Listing, Record


class View:
    """Combines listings and changes. Every method returns the events for watches; times are of a monotonic clock.

    After an outage, and when the store has been emptied, no lease counts as dead for one ttl: until then every living
    process has registered again. The last view stands meanwhile.
    """

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._cluster = 0
        #: What is in the store.
        self._records: dict[str, Record] = {}
        #: Records that are not in the store any more; watches learn so after the time of grace.
        self._kept: dict[str, bytes] = {}
        self._grace_until = float("-inf")
        self._away = False
        self._broken = False
        #: The newest change that is known.
        self.revision = 0
        #: Whether a listing has ever come.
        self.synced = False
        #: Whether the store is away, or was, and a living process may not have registered again yet.
        self.stale = False

    @property
    def count(self) -> int:
        """The number of records the store should hold."""
        return len(self._records)

    def failed(self) -> list[WatchEvent]:
        """Return the changes that follow when the store cannot be read."""
        self._away = True
        return self._mark_stale()

    def broken(self) -> None:
        """Record that changes come no more, until the next listing."""
        self._broken = True

    def listed(self, listing: Listing, asked_at: int, now: float) -> list[WatchEvent]:
        """Apply a listing that has been read in full.

        `asked_at` is the `revision` of before: a store never goes back by itself.
        """
        emptied = self.synced and (listing.cluster != self._cluster or listing.revision < asked_at)
        following = not (self._away or self._broken)
        if not emptied and following and listing.revision < self.revision:
            # Changes have overtaken it.
            return []
        events = self._mark_stale() if emptied and self._records else []
        if self.synced and (emptied or not following):
            self._grace_until = now + self._ttl
        shown = {key: record.value for key, record in self._records.items()} | self._kept
        self._cluster, self.revision = listing.cluster, listing.revision
        self._records = listing.records
        self._away, self._broken, self.synced = False, False, True
        missing = {key: value for key, value in shown.items() if key not in self._records}
        self._kept = missing if now < self._grace_until else {}
        if not self._kept:
            events += [WatchEvent(WatchKind.DELETE, key) for key in missing]
        oldest_first = sorted(self._records.items(), key=lambda item: item[1].revision)
        events += [
            WatchEvent(WatchKind.PUT, key, record.value)
            for key, record in oldest_first
            if shown.get(key) != record.value
        ]
        return events + self.tick(now)

    def changed(self, changes: Iterable[Change], now: float) -> list[WatchEvent]:
        """Apply changes that have come, the oldest first. What a listing had already is passed over."""
        events: list[WatchEvent] = []
        known = self.revision
        changes = [change for change in changes if change.revision > known]
        wipes = self._wipes(changes)
        if wipes:
            events += self._mark_stale()
            self._grace_until = max(self._grace_until, now + self._ttl)
        for change in changes:
            self.revision = max(self.revision, change.revision)
            before = self._records.pop(change.key, None)
            if change.record is not None:
                shown = before.value if before is not None else self._kept.pop(change.key, None)
                self._records[change.key] = change.record
                if shown != change.record.value:
                    events.append(WatchEvent(WatchKind.PUT, change.key, change.record.value))
            elif before is not None and before.lease != NO_LEASE and now < self._grace_until:
                # The lease may have expired while no process could renew it, or its owner puts the record back.
                self._kept[change.key] = before.value
            elif before is not None:
                events.append(WatchEvent(WatchKind.DELETE, change.key))
        return events + self.tick(now)

    def tick(self, now: float) -> list[WatchEvent]:
        """Time has passed."""
        events: list[WatchEvent] = []
        if self._away:
            return events
        if now >= self._grace_until:
            events += [WatchEvent(WatchKind.DELETE, key) for key in self._kept]
            self._kept = {}
        if self.stale and not self._kept:
            self.stale = False
            events.append(WatchEvent(WatchKind.FRESH))
        return events

    def _wipes(self, changes: Iterable[Change]) -> bool:
        """Return whether the store has been emptied: a lease that ends takes its own records only."""
        leases: dict[int, set[int]] = {}
        for change in changes:
            before = self._records.get(change.key)
            if change.record is None and before is not None and before.lease != NO_LEASE:
                leases.setdefault(change.revision, set()).add(before.lease)
        return any(len(ended) > 1 for ended in leases.values())

    def _mark_stale(self) -> list[WatchEvent]:
        if self.stale:
            return []
        self.stale = True
        return [WatchEvent(WatchKind.STALE)]
