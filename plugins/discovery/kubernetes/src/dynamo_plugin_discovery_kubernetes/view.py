"""`View`: one process's view of the leases and records, and the events for its watches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dynamo_core import WatchEvent, WatchKind
from dynamo_leases import NO_LEASE

from dynamo_plugin_discovery_kubernetes.objects import LeaseFact, RecordFact

#: How far the clocks of two hosts may differ, in seconds.
SKEW = 10.0
#: The part of its ttl after which a silent lease is asked for: a watch that has died is silent too.
DOUBT = 2 / 3
#: So many ttls after its process died, what a lease has left is cleared away.
CLEAR_AFTER = 10.0


@dataclass(slots=True)
class _Life:
    fact: LeaseFact
    #: When it was last seen to change, on the clock that only counts.
    seen: float
    alive: bool
    #: Gone from the store, and kept for the time of grace.
    missing: bool = False


@dataclass(slots=True)
class _Held:
    fact: RecordFact
    missing: bool = False


class View:
    """Combines listings and changes. Every method returns the events for watches.

    A lease lives while its `renewTime` changes, counted on the clock of this process; only a lease that is seen for the
    first time is judged by its time, with allowance for clocks that differ. `now` only counts, `wall` is the time of
    day; both in seconds.

    After an outage, and when the store has been emptied or set back, no lease counts as dead for one ttl: until then
    every living process has registered again. The last view stands meanwhile.
    """

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._lives: dict[int, _Life] = {}
        self._records: dict[str, _Held] = {}
        #: The names of the records of each key and of each lease.
        self._by_key: dict[str, set[str]] = {}
        self._by_lease: dict[int, set[str]] = {}
        self._shown: dict[str, bytes] = {}
        #: Keys that have to be compared with what is shown.
        self._suspects: set[str] = set()
        self._grace_until = float("-inf")
        self._away = False
        self._leases_read_at = float("-inf")
        #: The newest versions that are known, of the leases and of the records.
        self.lease_version = 0
        self.record_version = 0
        #: Whether everything has ever been read.
        self.synced = False
        #: Whether the store is away, or was, and a living process may not have registered again yet.
        self.stale = False

    def failed(self) -> list[WatchEvent]:
        """Return the changes that follow when the store cannot be read."""
        self._away = True
        return self._mark_stale()

    def listed(
        self,
        leases: tuple[int, Iterable[LeaseFact]],
        records: tuple[int, Iterable[RecordFact]],
        asked_at: tuple[int, int],
        now: float,
        wall: float,
    ) -> list[WatchEvent]:
        """Apply a listing that has been read in full.

        `asked_at` are the versions of before: a store never goes back by itself.
        """
        emptied = self.synced and (leases[0] < asked_at[0] or records[0] < asked_at[1])
        events = self._mark_stale() if emptied and self._records else []
        if self.synced and (emptied or self._away):
            self._grace_until = now + max([self._ttl, *(life.fact.ttl for life in self._lives.values())])
            for life in self._lives.values():
                # No process could renew a lease meanwhile, so silence up to now says nothing.
                life.seen = now
        self._away, self.synced = False, True
        if emptied or records[0] >= self.record_version:
            self._take_records(*records, now)
        if emptied:
            self.lease_version = 0
        return events + self.leases_listed(*leases, now, wall)

    def leases_listed(self, version: int, leases: Iterable[LeaseFact], now: float, wall: float) -> list[WatchEvent]:
        """Apply a listing of the leases; pass it over if changes have overtaken it."""
        self._leases_read_at = now
        if version >= self.lease_version:
            self.lease_version = version
            missing = set(self._lives)
            for fact in leases:
                missing.discard(fact.number)
                self._renew(fact, now, wall)
            for number in missing:
                self._lease_gone(number, now)
        return self.tick(now)

    def lease_changed(self, version: int, number: int, fact: LeaseFact | None, now: float, wall: float) -> None:
        """Note a change of a lease, None if it is gone. `settle` tells what follows from it."""
        if version <= self.lease_version:
            return
        self.lease_version = version
        if fact is None:
            self._lease_gone(number, now)
        else:
            self._renew(fact, now, wall)

    def record_changed(self, version: int, name: str, fact: RecordFact | None, now: float) -> None:
        """Note a change of a record, None if it is gone. `settle` tells what follows from it."""
        if version <= self.record_version:
            return
        self.record_version = version
        if fact is None:
            self._record_gone(name, now)
        else:
            self._put(fact)

    def behind(self, leases: Iterable[LeaseFact]) -> bool:
        """Return whether one of the leases has been renewed without this view knowing it."""
        return any(
            fact.version > self.lease_version
            for fact in leases
            if (life := self._lives.get(fact.number)) is None or life.fact.renewed != fact.renewed
        )

    def doubts(self, now: float) -> bool:
        """Return whether a lease has been silent for so long that it should be asked for."""
        return any(
            life.alive and not life.missing and self._doubtful(life, now) and not self._asked_since(life)
            for life in self._lives.values()
        )

    def left_behind(self, now: float) -> list[LeaseFact]:
        """Return leases whose process died long ago."""
        return [
            life.fact
            for life in self._lives.values()
            if not (life.alive or life.missing) and now - life.seen > CLEAR_AFTER * life.fact.ttl
        ]

    def tick(self, now: float) -> list[WatchEvent]:
        """Time has passed."""
        if self._away:
            return []
        if now >= self._grace_until:
            self._end_grace()
        for life in self._lives.values():
            silent = now - life.seen >= life.fact.ttl
            if life.alive and not life.missing and silent and self._asked_since(life):
                life.alive = False
                self._suspect(life.fact.number)
        return self.settle()

    def settle(self) -> list[WatchEvent]:
        """Return what follows from the changes that were told."""
        events = self._settle()
        if not self._away and self.stale and not self._anything_missing():
            self.stale = False
            events.append(WatchEvent(WatchKind.FRESH))
        return events

    # Leases.

    def _renew(self, fact: LeaseFact, now: float, wall: float) -> None:
        life = self._lives.get(fact.number)
        if life is None:
            self._lives[fact.number] = _Life(fact, now, wall - fact.renewed_at <= fact.ttl + SKEW)
            self._suspect(fact.number)
            return
        if life.missing or (not life.alive and life.fact.renewed != fact.renewed):
            self._suspect(fact.number)
        if life.fact.renewed != fact.renewed:
            life.alive, life.seen = True, now
        life.fact, life.missing = fact, False

    def _lease_gone(self, number: int, now: float) -> None:
        life = self._lives.get(number)
        if life is None:
            return
        if now < self._grace_until:
            life.missing = True
        else:
            del self._lives[number]
        self._suspect(number)

    def _doubtful(self, life: _Life, now: float) -> bool:
        return now - life.seen >= DOUBT * life.fact.ttl

    def _asked_since(self, life: _Life) -> bool:
        return self._leases_read_at >= life.seen + DOUBT * life.fact.ttl

    def _suspect(self, lease: int) -> None:
        self._suspects.update(self._records[name].fact.key for name in self._by_lease.get(lease, ()))

    # Records.

    def _take_records(self, version: int, records: Iterable[RecordFact], now: float) -> None:
        self.record_version = version
        missing = set(self._records)
        for fact in records:
            missing.discard(fact.name)
            self._put(fact)
        for name in missing:
            self._record_gone(name, now)

    def _put(self, fact: RecordFact) -> None:
        before = self._records.get(fact.name)
        if before is not None and before.fact.key != fact.key:
            self._forget(fact.name)
        self._records[fact.name] = _Held(fact)
        self._by_key.setdefault(fact.key, set()).add(fact.name)
        self._by_lease.setdefault(fact.lease, set()).add(fact.name)
        self._suspects.add(fact.key)

    def _record_gone(self, name: str, now: float) -> None:
        held = self._records.get(name)
        if held is None:
            return
        self._suspects.add(held.fact.key)
        if held.fact.lease != NO_LEASE and now < self._grace_until:
            held.missing = True
        else:
            self._forget(name)

    def _forget(self, name: str) -> None:
        fact = self._records.pop(name).fact
        self._suspects.add(fact.key)
        for names in (self._by_key[fact.key], self._by_lease[fact.lease]):
            names.discard(name)
        if not self._by_key[fact.key]:
            del self._by_key[fact.key]
        if not self._by_lease[fact.lease]:
            del self._by_lease[fact.lease]

    # What is shown.

    def _settle(self) -> list[WatchEvent]:
        suspects, self._suspects = self._suspects, set()
        gone: list[WatchEvent] = []
        put: list[tuple[int, WatchEvent]] = []
        for key in suspects:
            held = max(filter(self._shows, self._held(key)), key=self._rank, default=None)
            if held is None:
                if self._shown.pop(key, None) is not None:
                    gone.append(WatchEvent(WatchKind.DELETE, key))
            elif self._shown.get(key) != held.fact.value:
                self._shown[key] = held.fact.value
                put.append((held.fact.version, WatchEvent(WatchKind.PUT, key, held.fact.value)))
        put.sort(key=lambda item: item[0])
        return [*gone, *(event for _, event in put)]

    def _held(self, key: str) -> list[_Held]:
        return [self._records[name] for name in self._by_key.get(key, ())]

    def _shows(self, held: _Held) -> bool:
        life = self._lives.get(held.fact.lease)
        return held.fact.lease == NO_LEASE or (life is not None and life.alive)

    def _rank(self, held: _Held) -> tuple[bool, int]:
        # A key belongs to the lease that put it last; a record that may be gone already comes second.
        life = self._lives.get(held.fact.lease)
        return not (held.missing or (life is not None and life.missing)), held.fact.version

    def _anything_missing(self) -> bool:
        return any(life.missing for life in self._lives.values()) or any(
            held.missing for held in self._records.values()
        )

    def _end_grace(self) -> None:
        if self._grace_until == float("-inf"):
            return
        self._grace_until = float("-inf")
        for number in [number for number, life in self._lives.items() if life.missing]:
            self._suspect(number)
            del self._lives[number]
        for name in [name for name, held in self._records.items() if held.missing]:
            self._forget(name)

    def _mark_stale(self) -> list[WatchEvent]:
        if self.stale:
            return []
        self.stale = True
        return [WatchEvent(WatchKind.STALE)]
