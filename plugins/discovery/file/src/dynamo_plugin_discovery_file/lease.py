"""A lease in the folder: a file whose modification time is renewed, and the records that live with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_core import jitter
from dynamo_core.errors import CannotConnect
from dynamo_leases import HeartbeatLease, LeaseFailureTracker, check_record

from dynamo_plugin_discovery_file.clock import Clock
from dynamo_plugin_discovery_file.folder import FORMAT, LEASES, RECORDS, Folder, Place, Signature
from dynamo_plugin_discovery_file.record import (
    MAX_RECORD,
    Record,
    decode,
    encode,
    encode_lease,
    file_name,
    lease_name,
)

log = logging.getLogger(__name__)

#: After so many times its ttl without the folder, a lease is lost.
LOST_AFTER = 3
#: Seconds that closing may take; what is left behind then expires.
CLOSE_TIMEOUT = 5.0


@dataclass(slots=True)
class _Held:
    value: bytes
    #: The state of the file as this lease wrote it.
    state: Signature


class FileLease(HeartbeatLease):
    """Made by `FileDiscovery.lease`. The `HeartbeatThread` calls `beat`, the event loop the rest.

    A record belongs to the lease that put it last: a lease neither removes nor renews one that another has replaced.
    """

    def __init__(
        self,
        folder: Folder,
        lease_id: int,
        *,
        ttl: float,
        heartbeat: float,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__(lease_id, ttl)
        self._folder = folder
        self._heartbeat = heartbeat
        self._clock = clock
        self._on_change = on_change
        self._failures = LeaseFailureTracker(lease_id, LOST_AFTER * ttl)
        self._records: dict[str, _Held] = {}
        self._must_register = False

    async def put(self, key: str, value: bytes) -> None:
        check_record(key, value)
        await asyncio.to_thread(self._put, key, value)
        self._on_change()

    async def remove(self, key: str) -> None:
        await asyncio.to_thread(self._remove, key)
        self._on_change()

    async def aclose(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await asyncio.to_thread(self._close)
        except TimeoutError:
            log.warning("lease %016x did not close in time; its records expire", self._id)
        self._on_change()

    # In threads.

    def register(self) -> None:
        """Write the lease and all its records anew, and make the folder if it is missing.

        Raises:
            OSError: that was not possible.
        """
        with self._lock:
            self._register()
            self.due = self._clock.monotonic() + self._heartbeat

    def beat(self) -> None:
        """Renew the lease, mend records that are missing or damaged, and register again if the lease is gone."""
        now = self._clock.monotonic()
        with self._lock:
            if self.ended:
                return
            try:
                if not self._must_register:
                    self._renew()
                if self._must_register:
                    self._register()
            except FileNotFoundError as error:
                # All processes notice at about the same time; they come back spread over one heartbeat.
                self._failed(error, now, wait=0.0 if not self._must_register else self._heartbeat / 2)
                self._must_register = True
            except OSError as error:
                self._failed(error, now, wait=self._heartbeat / 2)
            else:
                self._failures.succeeded()
                self.due = now + self._heartbeat

    def _renew(self) -> None:
        with self._folder.open() as place:
            # A folder that has been made anew by others has lost more than it shows.
            place.require(FORMAT)
            # Without it the folder has been wiped, and no lease counts as dead.
            place.require(LEASES)
            try:
                place.touch(f"{LEASES}/{lease_name(self._id)}")
            except FileNotFoundError:
                log.warning(
                    "lease %016x is not in %s any more: another process took it for dead, as it had no heartbeat for "
                    "%g s; it registers again",
                    self._id,
                    self._folder.path,
                    self._ttl,
                )
                self._must_register = True
                return
            self._mend(place)

    def _put(self, key: str, value: bytes) -> None:
        with self._lock:
            if self._closed:
                raise ValueError("the lease is closed")
            if self._gone:
                raise CannotConnect(f"the lease is lost: discovery folder {self._folder.path} was gone for too long")
            try:
                try:
                    state = self._write(key, value)
                except FileNotFoundError:
                    self._register()
                    state = self._write(key, value)
            except OSError as error:
                raise cannot_write(self._folder, error) from error
            self._records[key] = _Held(value, state)

    def _write(self, key: str, value: bytes) -> Signature:
        with self._folder.open() as place:
            return place.write(_path(key), encode(Record(key, value, self._id)))

    def _remove(self, key: str) -> None:
        with self._lock:
            held = self._records.pop(key, None)
            if held is None:
                return
            try:
                with self._folder.open() as place:
                    self._take_away(place, key, held)
            except FileNotFoundError:
                pass
            except OSError as error:
                # Forgotten here, so it is not mended; but the lease goes on, and the record with it.
                raise cannot_write(self._folder, error) from error

    def _close(self) -> None:
        with self._lock:
            if self.ended:
                self._closed = True
                return
            self._closed = True
            records, self._records = self._records, {}
            try:
                with self._folder.open() as place:
                    for key, held in records.items():
                        self._take_away(place, key, held)
                    # Last: records without a lease belong to no process.
                    place.remove(f"{LEASES}/{lease_name(self._id)}")
            except FileNotFoundError:
                pass
            except OSError as error:
                log.warning(
                    "lease %016x could not be removed from %s and expires: %s", self._id, self._folder.path, error
                )

    def _register(self) -> None:
        self._folder.prepare()
        with self._folder.open() as place:
            # First: a record is seen only while its lease is there.
            place.write(f"{LEASES}/{lease_name(self._id)}", encode_lease(self._ttl))
            self._mend(place)
        self._must_register = False

    def _mend(self, place: Place) -> None:
        for key, held in list(self._records.items()):
            state = place.signature(_path(key))
            if state == held.state:
                continue
            owner, same = self._look(place, key, held) if state is not None else (self._id, False)
            if owner != self._id:
                log.info("record %r of lease %016x has been replaced by lease %016x", key, self._id, owner)
                del self._records[key]
            elif state is not None and same:
                held.state = state
            else:
                held.state = place.write(_path(key), encode(Record(key, held.value, self._id)))

    def _take_away(self, place: Place, key: str, held: _Held) -> None:
        state = place.signature(_path(key))
        if state is not None and (state == held.state or self._look(place, key, held)[0] == self._id):
            place.remove_if(_path(key), state)

    def _look(self, place: Place, key: str, held: _Held) -> tuple[int, bool]:
        """Return whose record is in the key's file now, and whether it is as it was put.

        This lease's if it is damaged.
        """
        try:
            record = decode(place.read(_path(key), MAX_RECORD)[1])
        except (OSError, ValueError):
            return self._id, False
        return record.lease, record == Record(key, held.value, self._id)

    def _failed(self, error: OSError, now: float, *, wait: float) -> None:
        if self._failures.failed(cannot_write(self._folder, error), now, counts=True):
            self._gone = True
            self._records.clear()
            self.mark_lost()
        self.due = now + wait + jitter(self._heartbeat - wait, 0, 1)


def cannot_write(folder: Folder, error: OSError) -> CannotConnect:
    """Return the error of a caller whose record could not be written."""
    return CannotConnect(f"discovery folder {folder.path} cannot be written: {error.strerror or error}", cause=error)


def _path(key: str) -> str:
    return f"{RECORDS}/{file_name(key)}"
