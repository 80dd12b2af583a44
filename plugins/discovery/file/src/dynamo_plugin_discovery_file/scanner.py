"""The scanner of the folder: live records, and their changes since the last look."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from operator import itemgetter

from dynamo_core import WatchEvent, WatchKind
from dynamo_core.protocol import UnreadableWarner
from dynamo_leases import NO_LEASE

from dynamo_plugin_discovery_file.clock import Clock
from dynamo_plugin_discovery_file.folder import FORMAT, LEASES, RECORDS, Folder, Place, Signature
from dynamo_plugin_discovery_file.record import (
    MAX_RECORD,
    Record,
    decode,
    decode_lease,
    file_name,
    lease_name,
)

log = logging.getLogger(__name__)

#: Seconds after a change in which a further change may leave a directory's time as it is: it counts in ticks.
SETTLE = 0.05
#: A difference between the two clocks that moved by more than this, in seconds, is a jump of the host's clock.
JUMP = 0.25


@dataclass(slots=True)
class _File:
    """A file among the records; `record` is None if it cannot be read. `inode` is from the directory."""

    inode: int
    state: Signature
    record: Record | None


@dataclass(slots=True)
class _LeaseState:
    state: Signature | None
    ttl: float
    #: The last sign of life, and when this state of the file was first seen; both on the clock that only counts.
    seen: float
    noticed: float
    alive: bool
    #: When to look next.
    due: float


class Scanner:
    """One process's view of the folder. `poll` reads what may have changed and returns the differences.

    A lease lives while its heartbeat changes: it is dead once nothing has changed for its ttl, counted on the clock
    that only counts. File times only refine when the last change was; a jump of the host's clock starts the counting
    anew, and so does a pause of this process, which says nothing about the others.

    Only what has changed is looked at: by names and inodes while changes come, and thoroughly, by the state of every
    file, three times in a ttl.

    Not safe for two threads at once.
    """

    def __init__(self, folder: Folder, *, ttl: float, clock: Clock) -> None:
        self._folder = folder
        self._ttl = ttl
        self._clock = clock
        self._files: dict[str, _File] = {}
        self._leases: dict[int, _LeaseState] = {}
        #: The names of the files of each lease.
        self._held: dict[int, set[str]] = {}
        #: What has to be compared with the view: keys of files that changed, or whose lease came to life or died.
        self._suspects: set[str] = set()
        self._view: dict[str, bytes] = {}
        self._format: Signature | None = None
        self._directory: Signature | None = None
        self._settled_at = 0.0
        self._settled = False
        self._next_full = 0.0
        self._next_lease = 0.0
        self._last_poll: float | None = None
        self._clock_difference = 0.0
        self._anew_at = float("-inf")
        self._missing_reason = ""
        self._left_out = UnreadableWarner(log, "record")
        #: Records that are gone since the folder came back are kept until then; None while all is well.
        self._hold_until: float | None = None
        #: Whether the folder has been read at least once.
        self.synced = False
        #: Whether the folder is missing, or was, and not all leases can have come back yet.
        self.stale = False

    def poll(self) -> list[WatchEvent]:
        """Return the differences since the last call, including `STALE` and `FRESH`.

        Removed first, then put, oldest first.
        """
        now, wall = self._clock.monotonic(), self._clock.wall()
        self._watch_the_clocks(now, wall)
        try:
            with self._folder.open() as place:
                events = self._note_another_folder(place)
                if self.stale and self._hold_until is None:
                    self._came_back(now)
                if self._scan(place, now) or now >= self._next_lease:
                    self._look_at_leases(place, now, wall)
        except OSError as error:
            return self._unreachable(error)
        self.synced = True
        self._missing_reason = ""
        if self.stale:
            events += self._differences(now)
        elif self._suspects:
            events += self._changes()
        return events

    def _watch_the_clocks(self, now: float, wall: int) -> None:
        difference = wall / 1e9 - now
        last, self._last_poll = self._last_poll, now
        jumped = abs(difference - self._clock_difference) > JUMP
        self._clock_difference = difference
        if last is not None and (jumped or now - last > self._ttl / 2):
            self._count_anew(now)

    def _count_anew(self, now: float) -> None:
        # All are looked at now: a heartbeat of before must not be taken for a new one later.
        self._next_lease = self._anew_at = now
        for lease in self._leases.values():
            lease.noticed = lease.due = now
            if lease.alive:
                lease.seen = now

    def _note_another_folder(self, place: Place) -> list[WatchEvent]:
        """Notice that the folder has been removed and made anew between two looks."""
        known, self._format = self._format, place.require(FORMAT)
        if known is None or known == self._format:
            return []
        self._directory, self._next_full = None, 0.0
        if self.stale:
            return []
        log.warning("discovery folder %s has been made anew", self._folder.path)
        self.stale = True
        return [WatchEvent(WatchKind.STALE)]

    def _unreachable(self, error: OSError) -> list[WatchEvent]:
        reason = str(error)
        if reason != self._missing_reason:
            log.warning("discovery folder %s cannot be read; the last view is kept: %s", self._folder.path, error)
            self._missing_reason = reason
        # What is there when it comes back has to be read whatever its time says.
        self._directory, self._next_full = None, 0.0
        self._hold_until = None
        if self.stale:
            return []
        self.stale = True
        return [WatchEvent(WatchKind.STALE)]

    def _came_back(self, now: float) -> None:
        # No process could renew a lease meanwhile, so silence up to now says nothing.
        self._count_anew(now)
        self._hold_until = now + max([self._ttl, *(lease.ttl for lease in self._leases.values())])

    # Files.

    def _scan(self, place: Place, now: float) -> bool:
        """Read the files that changed, if there may be any; whether there were."""
        directory = place.require(RECORDS)
        ticking = time.monotonic()
        if directory != self._directory:
            self._directory, self._settled, self._settled_at = directory, False, ticking + SETTLE
        elif self._settled and now < self._next_full:
            return False
        # Decided before reading: a change during the reading must be found by the next one.
        self._settled = ticking >= self._settled_at
        thorough = now >= self._next_full
        if thorough:
            self._next_full = now + self._ttl / 3
        known, files = self._files, dict[str, _File]()
        changed = False
        try:
            for name, inode, state in place.listing(RECORDS, thorough=thorough):
                before = file = known.get(name)
                if file is None or file.inode != inode or (thorough and file.state != state):
                    file = self._read(place, name, inode)
                    self._note(name, before, file)
                    changed = True
                known.pop(name, None)
                if file is not None:
                    files[name] = file
        except OSError:
            # What was not reached stays as it was known.
            self._files = known | files
            raise
        self._files = files
        for name, file in known.items():
            self._note(name, file, None)
        return changed or bool(known)

    def _read(self, place: Place, name: str, inode: int) -> _File | None:
        path = f"{RECORDS}/{name}"
        try:
            state, data = place.read(path, MAX_RECORD)
            record = decode(data)
            if file_name(record.key) != name:
                raise ValueError(f"it holds the record {record.key!r}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._left_out.warn(str(self._folder.path / RECORDS / name), error)
            signature = place.signature(path)
            return None if signature is None else _File(inode, signature, None)
        self._left_out.readable(str(self._folder.path / RECORDS / name))
        return _File(inode, state, record)

    def _note(self, name: str, before: _File | None, after: _File | None) -> None:
        """Note a file that has changed, come or gone."""
        for file in (before, after):
            if file is None or file.record is None:
                continue
            self._suspects.add(file.record.key)
            if file.record.lease == NO_LEASE:
                continue
            held = self._held.setdefault(file.record.lease, set())
            if file is after:
                held.add(name)
            else:
                held.discard(name)
            if not held:
                del self._held[file.record.lease]

    # Leases.

    def _look_at_leases(self, place: Place, now: float, wall: int) -> None:
        """Look at the leases that are due or new."""
        for number in self._leases.keys() - self._held.keys():
            del self._leases[number]
        for number, names in self._held.items():
            lease = self._leases.get(number)
            if lease is not None and now < lease.due:
                continue
            before = lease is not None and lease.alive
            lease = self._leases[number] = self._look(place, number, lease, now, wall)
            if lease.alive is not before:
                self._suspects.update(self._keys(names))
            if not lease.alive and now - lease.noticed > lease.ttl:
                self._clear_away(place, number, lease, names)
        self._next_lease = min((lease.due for lease in self._leases.values()), default=float("inf"))

    def _keys(self, names: Collection[str]) -> list[str]:
        files = [self._files[name] for name in names]
        return [file.record.key for file in files if file.record is not None]

    def _look(self, place: Place, number: int, lease: _LeaseState | None, now: float, wall: int) -> _LeaseState:
        path = f"{LEASES}/{lease_name(number)}"
        state = place.signature(path)
        if lease is None or state != lease.state:
            ttl = lease.ttl if lease is not None else self._ttl
            if state is not None and (lease is None or lease.state is None or lease.state.inode != state.inode):
                ttl = self._read_ttl(place, path)
            age = (wall - state.modified) / 1e9 if state is not None else float("inf")
            # A lease that is seen for the first time is judged by its age alone; one that has just changed lives.
            alive = state is not None and (lease is not None or age <= ttl)
            # Right after a jump of the clock an age means nothing.
            silent = 0.0 if lease is not None and self._anew_at == now else min(max(age, 0.0), ttl)
            lease = _LeaseState(state, ttl, seen=now - silent, noticed=now, alive=alive, due=now)
        elif lease.alive and now - lease.seen >= lease.ttl:
            lease.alive = False
        # The dead are looked at again: they may come back, and are cleared away in the end.
        lease.due = max(lease.seen + lease.ttl, now + lease.ttl / 10) if lease.alive else now + lease.ttl / 3
        return lease

    def _read_ttl(self, place: Place, path: str) -> float:
        try:
            return decode_lease(place.read(path, 256)[1])
        except (OSError, ValueError):
            return self._ttl

    def _clear_away(self, place: Place, number: int, lease: _LeaseState, names: Collection[str]) -> None:
        """Remove what a dead lease has left. Others do the same at the same time."""
        try:
            for name in names:
                place.remove_if(f"{RECORDS}/{name}", self._files[name].state)
            if lease.state is not None:
                place.remove_if(f"{LEASES}/{lease_name(number)}", lease.state)
        except OSError as error:
            log.debug("what lease %016x has left cannot be removed yet: %s", number, error)

    # The view.

    def _changes(self) -> list[WatchEvent]:
        """Return the differences among the keys that may have some."""
        suspects, self._suspects = self._suspects, set()
        gone: list[WatchEvent] = []
        put: list[tuple[int, WatchEvent]] = []
        for key in suspects:
            file = self._files.get(file_name(key))
            if file is None or file.record is None or not self._lives(file.record.lease):
                if self._view.pop(key, None) is not None:
                    gone.append(WatchEvent(WatchKind.DELETE, key))
            elif self._view.get(key) != file.record.value:
                self._view[key] = file.record.value
                put.append((file.state.modified, WatchEvent(WatchKind.PUT, key, file.record.value)))
        put.sort(key=itemgetter(0))
        return [*gone, *(event for _, event in put)]

    def _differences(self, now: float) -> list[WatchEvent]:
        """Return the changes like `_changes`, for all files: after a loss of the folder, missing ones may be kept."""
        self._suspects.clear()
        there = [file for file in self._files.values() if file.record is not None and self._lives(file.record.lease)]
        there.sort(key=lambda file: file.state.modified)
        view = {file.record.key: file.record.value for file in there if file.record is not None}
        gone = [key for key in self._view if key not in view]
        events: list[WatchEvent] = []
        if self._hold_until is not None and gone and now < self._hold_until:
            # Their leases may not have come back yet.
            view |= {key: self._view[key] for key in gone}
        else:
            events += [WatchEvent(WatchKind.DELETE, key) for key in gone]
        events += [WatchEvent(WatchKind.PUT, key, view[key]) for key in view if self._view.get(key) != view[key]]
        if self.stale and (not gone or self._hold_until is None or now >= self._hold_until):
            self.stale, self._hold_until = False, None
            log.info("discovery folder %s is back", self._folder.path)
            events.append(WatchEvent(WatchKind.FRESH))
        self._view = view
        return events

    def _lives(self, number: int) -> bool:
        lease = self._leases.get(number)
        return number == NO_LEASE or (lease is not None and lease.alive)
