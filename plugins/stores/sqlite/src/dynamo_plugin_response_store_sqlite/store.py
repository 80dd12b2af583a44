"""`SQLiteStore`: responses in one file, which all processes of a host share."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from dynamo_core import Expected, PluginConfig, ResponseStore, ResponseStoreServices, StoreFull, TaskSet
from dynamo_core.errors import ConfigError, Unavailable
from pydantic import Field

from dynamo_plugin_response_store_sqlite.connection_threads import Lane

T = TypeVar("T")

log = logging.getLogger(__name__)

_MB = 1024 * 1024
#: Threads that look records up. One thread writes, as SQLite has one writer at a time.
_READERS = 4
#: Bytes that a record counts beside its value: its names and its places in the indexes.
_OVERHEAD = 256
#: Records and bytes that one sweep removes, after which other writes have their turn.
_SWEEP, _SWEEP_BYTES = 64, 4 * _MB
#: A record with fewer seconds to live is renewed before its look-up returns; others are renewed afterwards.
_URGENT = 60.0
#: Records of an owner that may wait to be renewed.
_RENEWALS = 4096
#: Seconds that the end waits for sweeps and renewals.
_END = 5.0
#: Changed when the tables below do: a file of another version is refused.
_VERSION = 2
#: Values have a table of their own. In that of the names, a search would read the whole value of each record that it
#: compares with, and a renewal would write it.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
  id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, owner TEXT NOT NULL, key TEXT NOT NULL,
  size INTEGER NOT NULL, used REAL NOT NULL, expires REAL NOT NULL,
  UNIQUE (namespace, owner, key)
);
CREATE TABLE IF NOT EXISTS contents (id INTEGER PRIMARY KEY, value BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS records_by_expiry ON records (expires);
CREATE INDEX IF NOT EXISTS records_by_use ON records (namespace, owner, used);
CREATE TABLE IF NOT EXISTS owners (
  namespace TEXT NOT NULL, owner TEXT NOT NULL, bytes INTEGER NOT NULL,
  PRIMARY KEY (namespace, owner)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS owners_by_bytes ON owners (bytes);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM total);
CREATE TRIGGER IF NOT EXISTS record_added AFTER INSERT ON records BEGIN
  UPDATE total SET bytes = bytes + new.size;
  INSERT OR IGNORE INTO owners VALUES (new.namespace, new.owner, 0);
  UPDATE owners SET bytes = bytes + new.size WHERE namespace = new.namespace AND owner = new.owner;
END;
CREATE TRIGGER IF NOT EXISTS record_removed AFTER DELETE ON records BEGIN
  UPDATE total SET bytes = bytes - old.size;
  UPDATE owners SET bytes = bytes - old.size WHERE namespace = old.namespace AND owner = old.owner;
  DELETE FROM owners WHERE namespace = old.namespace AND owner = old.owner AND bytes = 0;
  DELETE FROM contents WHERE id = old.id;
END;
"""
_ONE = "namespace = ? AND owner = ? AND key = ?"


class SQLiteStoreConfig(PluginConfig):
    """The file's place, and the limits of the store."""

    path: Path = Field(description="The file; its folder must exist, on a disk of this host.")
    max_mb: int = Field(default=4096, ge=1, description="MB that the records may take together.")
    timeout: float = Field(default=2.0, gt=0, le=60, description="Seconds that a call waits for other processes.")


class SQLiteStore(ResponseStore):
    """A store of records in a file. Threads ask it, so that the event loop never waits for a disk.

    Look-ups have connections of their own: SQLite lets them read while another connection writes.
    """

    NAME = "sqlite"
    Config: ClassVar[type[PluginConfig]] = SQLiteStoreConfig

    config: SQLiteStoreConfig

    def __init__(self, config: PluginConfig, services: ResponseStoreServices) -> None:
        super().__init__(config, services)
        self._readers = Lane(_READERS, self._open)
        self._writer = Lane(1, self._open)
        self._tasks = TaskSet()
        self._sweeping = False
        #: The records of each owner to be renewed: until when, by key.
        self._renewals: dict[str, dict[str, float]] = {}
        #: Owners for which a task is about to renew.
        self._renewing: set[str] = set()

    async def start(self) -> None:
        """Open the file, and make it if it is not there.

        Raises:
            ConfigError: its folder is not there, or it is no file of this store.
        """
        if not self.config.path.parent.is_dir():
            raise ConfigError(
                f"frontend.response_store.path: {self.config.path.parent} is not a folder: make it, or name a file "
                "elsewhere"
            )
        with contextlib.suppress(Unavailable):
            # One that is locked, or on a disk that is full, is opened by a later call.
            await self._ask(self._writer, "", lambda connection: None)

    async def put(self, owner: str, records: Mapping[str, bytes], ttl: float, expected: Expected = None) -> bool:
        """See `ResponseStore`."""
        size = sum(len(value) + _OVERHEAD for value in records.values())
        if size > self.config.max_mb * _MB:
            raise StoreFull(f"{size} bytes do not fit the response store: frontend.response_store.max_mb is its bound")
        put = await self._write(owner, lambda connection: self._put(connection, owner, records, ttl, expected or {}))
        if put and not self._sweeping:
            self._sweeping = True
            self._tasks.spawn(self._sweep(), name="sweep-response-store")
        return put

    async def get(self, owner: str, keys: Sequence[str], ttl: float | None = None) -> list[bytes | None]:
        """See `ResponseStore`."""
        found = await self._ask(self._readers, owner, lambda connection: self._get(connection, owner, keys))
        if ttl is not None:
            await self._renew(owner, {key: each[1] for key, each in zip(keys, found, strict=True) if each}, ttl)
        return [each and each[0] for each in found]

    async def delete(self, owner: str, keys: Sequence[str]) -> None:
        """See `ResponseStore`."""
        await self._write(owner, lambda connection: self._delete(connection, owner, keys))

    async def aclose(self) -> None:
        """Close the file."""
        await self._tasks.join(_END)
        await self._tasks.aclose()
        await self._writer.aclose()
        await self._readers.aclose()

    # In the event loop.

    async def _renew(self, owner: str, expiries: Mapping[str, float], ttl: float) -> None:
        """Renew records that were found with these times of expiry; those that are to live on are renewed soon."""
        if not expiries:
            return
        now = time.time()
        renewals = self._renewals.setdefault(owner, {})
        renewals.update(dict.fromkeys(expiries, now + ttl))
        if min(ttl, *(expires - now for expires in expiries.values())) < _URGENT or len(renewals) > _RENEWALS:
            await self._write(owner, lambda connection: None)
        elif owner not in self._renewing:
            self._renewing.add(owner)
            self._tasks.spawn(self._renew_soon(owner), name="renew-responses")

    async def _renew_soon(self, owner: str) -> None:
        self._renewing.discard(owner)
        try:
            await self._write(owner, lambda connection: None)
        except Unavailable as error:
            log.warning("responses that were read are renewed with the next call only: %s", error)

    async def _sweep(self) -> None:
        """Remove expired records in steps. Each waits for its turn like the call of an owner."""
        try:
            while await self._ask(self._writer, "", _remove_expired):
                continue
        except Unavailable as error:
            log.warning("expired responses stay until the next write: %s", error)
        finally:
            self._sweeping = False

    async def _write(self, owner: str, question: Callable[[sqlite3.Connection], T]) -> T:
        """Return the answer to `question` in a transaction that writes, and begins with the owner's renewals."""
        renewals = self._renewals.pop(owner, {})

        def write(connection: sqlite3.Connection) -> T:
            connection.execute("BEGIN IMMEDIATE")
            used, namespace = time.time(), self.services.namespace
            connection.executemany(
                f"UPDATE records SET used = ?, expires = ? WHERE {_ONE}",  # noqa: S608 - no foreign text
                [(used, until, namespace, owner, key) for key, until in renewals.items()],
            )
            return question(connection)

        try:
            return await self._ask(self._writer, owner, write)
        except BaseException:
            self._renewals[owner] = renewals | self._renewals.get(owner, {})
            raise

    async def _ask(self, lane: Lane, owner: str, question: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return await lane.run(owner, question)
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(f"the response store {self.config.path} cannot be used: {error}", cause=error) from error

    # In a thread, within a transaction.

    def _put(
        self,
        connection: sqlite3.Connection,
        owner: str,
        records: Mapping[str, bytes],
        ttl: float,
        expected: Mapping[str, bytes | None],
    ) -> bool:
        held = self._get(connection, owner, list(expected))
        if [each and each[0] for each in held] != list(expected.values()):
            return False
        now = time.time()
        self._delete(connection, owner, records)
        for key, value in records.items():
            row = (self.services.namespace, owner, key, len(value) + _OVERHEAD, now, now + ttl)
            added = connection.execute(
                "INSERT INTO records (namespace, owner, key, size, used, expires) VALUES (?, ?, ?, ?, ?, ?)", row
            )
            connection.execute("INSERT INTO contents VALUES (?, ?)", (added.lastrowid, value))
        while connection.execute("SELECT bytes FROM total").fetchone()[0] > self.config.max_mb * _MB:
            # What was just written was used last, and fits.
            if not _make_room(connection, now):
                break
        return True

    def _get(self, connection: sqlite3.Connection, owner: str, keys: Sequence[str]) -> list[tuple[bytes, float] | None]:
        """Return the values of keys, each with the time at which it expires."""
        now = time.time()
        return [
            connection.execute(
                "SELECT value, expires FROM records JOIN contents USING (id) "  # noqa: S608
                f"WHERE {_ONE} AND expires > ?",
                (self.services.namespace, owner, key, now),
            ).fetchone()
            for key in keys
        ]

    def _delete(self, connection: sqlite3.Connection, owner: str, keys: Iterable[str]) -> None:
        places = [(self.services.namespace, owner, key) for key in keys]
        connection.executemany(f"DELETE FROM records WHERE {_ONE}", places)  # noqa: S608

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.config.path, timeout=self.config.timeout, isolation_level=None, check_same_thread=False
        )
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise ConfigError(
                    f"frontend.response_store.path: {self.config.path} is a file of version {version} of another "
                    f"program or release; this one knows {_VERSION}: name another file"
                )
            connection.execute("PRAGMA journal_mode = WAL")
            # Durable when a write returns: WAL alone would lose the last ones with the power.
            connection.execute("PRAGMA synchronous = FULL")
            if version == 0:
                connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
        except BaseException:
            connection.close()
            raise
        return connection


def _remove_expired(connection: sqlite3.Connection) -> bool:
    """Remove some expired records. Return whether there were any."""
    connection.execute("BEGIN IMMEDIATE")
    total, ids = 0, []
    for number, size in connection.execute(
        "SELECT id, size FROM records WHERE expires <= ? ORDER BY expires LIMIT ?", (time.time(), _SWEEP)
    ):
        ids.append((number,))
        total += size
        if total > _SWEEP_BYTES:
            break
    connection.executemany("DELETE FROM records WHERE id = ?", ids)
    return bool(ids)


def _make_room(connection: sqlite3.Connection, now: float) -> bool:
    """Remove the record that was used longest ago of the owner that holds the most. Return whether there was one."""
    for place in connection.execute("SELECT namespace, owner FROM owners ORDER BY bytes DESC"):
        row = connection.execute(
            "SELECT id FROM records WHERE namespace = ? AND owner = ? AND used < ? ORDER BY used LIMIT 1", (*place, now)
        ).fetchone()
        if row is not None:
            connection.execute("DELETE FROM records WHERE id = ?", row)
            return True
    return False
