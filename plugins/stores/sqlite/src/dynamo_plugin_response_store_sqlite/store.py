"""`SQLiteStore`: responses in one file, which all processes of a host share."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, TypeVar

from dynamo_core import Expected, PluginConfig, ResponseStore, ResponseStoreServices, StoreFull
from dynamo_core.errors import ConfigError, Unavailable
from pydantic import Field

T = TypeVar("T")

_MB = 1024 * 1024
#: Expired records that one write removes. More than it adds, so that they do not pile up.
_SWEEP = 64
#: Changed when the tables below do: a file of another version is refused.
_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
  namespace TEXT NOT NULL, owner TEXT NOT NULL, key TEXT NOT NULL,
  value BLOB NOT NULL, used REAL NOT NULL, expires REAL NOT NULL,
  PRIMARY KEY (namespace, owner, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS records_by_expiry ON records (expires);
CREATE INDEX IF NOT EXISTS records_by_use ON records (used);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM total);
CREATE TRIGGER IF NOT EXISTS record_added AFTER INSERT ON records
  BEGIN UPDATE total SET bytes = bytes + length(new.value); END;
CREATE TRIGGER IF NOT EXISTS record_changed AFTER UPDATE OF value ON records
  BEGIN UPDATE total SET bytes = bytes + length(new.value) - length(old.value); END;
CREATE TRIGGER IF NOT EXISTS record_removed AFTER DELETE ON records
  BEGIN UPDATE total SET bytes = bytes - length(old.value); END;
"""
_ONE = "namespace = ? AND owner = ? AND key = ?"


class SQLiteStoreConfig(PluginConfig):
    """Where the file is, and how much is kept in it."""

    path: Path = Field(description="The file; its folder must exist, on a disk of this host.")
    max_mb: int = Field(default=4096, ge=1, description="MB that the records may take together.")
    timeout: float = Field(default=2.0, gt=0, le=60, description="Seconds that a call waits for other processes.")


class SQLiteStore(ResponseStore):
    """Keeps records in a file. One thread asks it, so that the event loop never waits for a disk."""

    NAME = "sqlite"
    Config: ClassVar[type[PluginConfig]] = SQLiteStoreConfig

    config: SQLiteStoreConfig

    def __init__(self, config: PluginConfig, services: ResponseStoreServices) -> None:
        super().__init__(config, services)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="response-store")
        self._connection: sqlite3.Connection | None = None

    async def start(self) -> None:
        """Opens the file, and makes it if it is not there.

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
            await self._ask(lambda connection: None)

    async def put(self, owner: str, records: Mapping[str, bytes], ttl: float, expected: Expected = None) -> bool:
        """See `ResponseStore`."""
        size = sum(map(len, records.values()))
        if size > self.config.max_mb * _MB:
            raise StoreFull(f"{size} bytes do not fit the response store: frontend.response_store.max_mb is its bound")
        return await self._ask(lambda connection: self._put(connection, owner, records, ttl, expected or {}))

    async def get(self, owner: str, keys: Sequence[str], ttl: float | None = None) -> list[bytes | None]:
        """See `ResponseStore`."""
        return await self._ask(lambda connection: self._get(connection, owner, keys, ttl))

    async def delete(self, owner: str, keys: Sequence[str]) -> None:
        """See `ResponseStore`."""
        places = [(self.services.namespace, owner, key) for key in keys]

        def delete(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(f"DELETE FROM records WHERE {_ONE}", places)  # noqa: S608 - no foreign text

        await self._ask(delete)

    async def aclose(self) -> None:
        """Closes the file."""
        with contextlib.suppress(RuntimeError):
            await asyncio.wrap_future(self._thread.submit(self._close))
        self._thread.shutdown(wait=False)

    def _put(
        self,
        connection: sqlite3.Connection,
        owner: str,
        records: Mapping[str, bytes],
        ttl: float,
        expected: Mapping[str, bytes | None],
    ) -> bool:
        connection.execute("BEGIN IMMEDIATE")
        if any(self._value(connection, owner, key) != value for key, value in expected.items()):
            return False
        now = time.time()
        connection.executemany(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
            "SET value = excluded.value, used = excluded.used, expires = excluded.expires",
            [(self.services.namespace, owner, key, value, now, now + ttl) for key, value in records.items()],
        )
        _forget(connection, f"expires <= ? ORDER BY expires LIMIT {_SWEEP}", now)
        while connection.execute("SELECT bytes FROM total").fetchone()[0] > self.config.max_mb * _MB:
            # What was just written was used last, and fits.
            if not _forget(connection, "used < ? ORDER BY used LIMIT 1", now):
                break
        return True

    def _get(
        self, connection: sqlite3.Connection, owner: str, keys: Sequence[str], ttl: float | None
    ) -> list[bytes | None]:
        if ttl is not None:
            connection.execute("BEGIN IMMEDIATE")
        found = [self._value(connection, owner, key) for key in keys]
        if ttl is not None:
            now = time.time()
            connection.executemany(
                f"UPDATE records SET used = ?, expires = ? WHERE {_ONE} AND expires > ?",  # noqa: S608
                [(now, now + ttl, self.services.namespace, owner, key, now) for key in keys],
            )
        return found

    def _value(self, connection: sqlite3.Connection, owner: str, key: str) -> bytes | None:
        row = connection.execute(
            f"SELECT value FROM records WHERE {_ONE} AND expires > ?",  # noqa: S608
            (self.services.namespace, owner, key, time.time()),
        ).fetchone()
        return None if row is None else row[0]

    async def _ask(self, question: Callable[[sqlite3.Connection], T]) -> T:
        """What `question` finds in one transaction, in the thread."""
        try:
            future = self._thread.submit(self._transaction, question)
        except RuntimeError as error:
            raise Unavailable("the response store is closed", cause=error) from error
        return await asyncio.wrap_future(future)

    def _transaction(self, question: Callable[[sqlite3.Connection], T]) -> T:
        try:
            connection = self._connection = self._connection or self._open()
            with connection:
                return question(connection)
        except (sqlite3.Error, OSError) as error:
            self._close()
            raise Unavailable(f"the response store {self.config.path} cannot be used: {error}", cause=error) from error

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.config.path, timeout=self.config.timeout, isolation_level=None)
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

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _forget(connection: sqlite3.Connection, which: str, now: float) -> int:
    """Removes some records, the first of an order, and tells how many."""
    return connection.execute(
        "DELETE FROM records WHERE (namespace, owner, key) IN "  # noqa: S608
        f"(SELECT namespace, owner, key FROM records WHERE {which})",
        (now,),
    ).rowcount
