"""`View`: one process's view of the store, and the changes from one look to the next."""

from __future__ import annotations

from dynamo_core import WatchEvent, WatchKind

from dynamo_plugin_discovery_redis.reader import Held, Reading


class View:
    """Combines readings. Every method returns the events for watches; times are of a monotonic clock.

    After an outage, and when the store has been emptied or may have forgotten something, a lease that is missing counts
    as dead once its own ttl has passed: until then a living process has registered again. Its records stand meanwhile.
    """

    def __init__(self, ttl: float) -> None:
        """`ttl` is that of this process's own leases, in seconds."""
        self._ttl = ttl
        self._epoch = b""
        self._leases: dict[int, Held] = {}
        #: Leases that are missing, and are kept until their time of grace is over.
        self._kept: set[int] = set()
        #: When the store may have forgotten something for the last time.
        self._doubted = float("-inf")
        #: Key to value, of the newest record of each key.
        self.records: dict[str, bytes] = {}
        self._synced = False
        #: Whether the store is away, or was, and a lease may not have come back yet.
        self.stale = False

    def is_synced(self) -> bool:
        """Return whether a reading has ever come."""
        return self._synced

    def failed(self) -> list[WatchEvent]:
        """Return the changes that follow when the store cannot be read."""
        if self.stale:
            return []
        self.stale = True
        return [WatchEvent(WatchKind.STALE)]

    def read(self, reading: Reading, now: float) -> list[WatchEvent]:
        """Return the changes after a read of the store: removed first, then put, oldest first."""
        emptied = self._synced and reading.epoch != self._epoch
        if emptied or (self._synced and reading.anew):
            self._doubted = now
        self._epoch, self._synced = reading.epoch, True
        before = self._kept
        missing = self._leases.keys() - reading.there
        self._kept = {lease for lease in missing if now < self._doubted + self._life(lease)}
        self._leases |= reading.changed
        for lease in missing - self._kept:
            del self._leases[lease]
        events: list[WatchEvent] = []
        if emptied and self._kept and not self.stale:
            self.stale = True
            events.append(WatchEvent(WatchKind.STALE))
        if reading.changed or missing or before:
            events += self._differences()
        if self.stale and not self._kept:
            self.stale = False
            events.append(WatchEvent(WatchKind.FRESH))
        return events

    def _life(self, lease: int) -> float:
        # A value that outlives its writer has no ttl: a process may put it again as late as other records.
        return self._leases[lease].ttl or self._ttl

    def _differences(self) -> list[WatchEvent]:
        # A key belongs to the lease that put it last; a record that may be gone already comes second.
        newest: dict[str, tuple[bool, int, bytes]] = {}
        for lease, held in self._leases.items():
            for key, (revision, value) in held.records.items():
                record = (lease not in self._kept, revision, value)
                if key not in newest or newest[key] < record:
                    newest[key] = record
        view = {key: value for key, (_, _, value) in sorted(newest.items(), key=lambda item: item[1])}
        events = [WatchEvent(WatchKind.DELETE, key) for key in self.records if key not in view]
        events += [WatchEvent(WatchKind.PUT, key, view[key]) for key in view if self.records.get(key) != view[key]]
        self.records = view
        return events
