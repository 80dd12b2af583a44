"""`MemoryStore`: responses kept in the memory of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from dynamo_core import Expected, PluginConfig, ResponseStore, ResponseStoreServices, StoreFull
from pydantic import Field

_MB = 1024 * 1024
#: Bytes that a record takes beside its value and its names.
_OVERHEAD = 256


class MemoryStoreConfig(PluginConfig):
    """The limits of the store."""

    max_mb: int = Field(default=256, ge=1, description="MB that all records may take together.")
    max_records: int = Field(default=100_000, ge=1, description="Records that are kept at the most.")


class _Record(NamedTuple):
    value: bytes
    size: int
    expires: float


class _Owned:
    """The records of one owner, the one that was used longest ago first, and the bytes that they take."""

    __slots__ = ("records", "size")

    def __init__(self) -> None:
        self.records: dict[str, _Record] = {}
        self.size = 0

    def add(self, key: str, record: _Record) -> None:
        """Add a record as the one used last."""
        self.records[key] = record
        self.size += record.size

    def remove(self, key: str) -> _Record | None:
        """Remove and return a record; None if there is none."""
        record = self.records.pop(key, None)
        if record is not None:
            self.size -= record.size
        return record


class MemoryStore(ResponseStore):
    """Keeps records in this process. The owner that holds the most makes room with those it used longest ago."""

    NAME = "memory"
    Config: ClassVar[type[PluginConfig]] = MemoryStoreConfig
    CROSS_PROCESS = False
    PERSISTENT = False

    config: MemoryStoreConfig

    def __init__(self, config: PluginConfig, services: ResponseStoreServices) -> None:
        super().__init__(config, services)
        self._owners: dict[str, _Owned] = {}
        self._size = 0
        self._count = 0

    async def put(self, owner: str, records: Mapping[str, bytes], ttl: float, expected: Expected = None) -> bool:
        """See `ResponseStore`."""
        if any(self._live(owner, key) != value for key, value in (expected or {}).items()):
            return False
        expires = asyncio.get_running_loop().time() + ttl
        made = {
            key: _Record(value, len(value) + len(owner) + len(key) + _OVERHEAD, expires)
            for key, value in records.items()
        }
        size = sum(record.size for record in made.values())
        if size > self.config.max_mb * _MB or len(made) > self.config.max_records:
            raise StoreFull(f"{size} bytes do not fit the response store: frontend.response_store.max_mb is its bound")
        for key in made:
            self._forget(owner, key)
        while self._count and (
            self._size + size > self.config.max_mb * _MB or self._count + len(made) > self.config.max_records
        ):
            # What the new records take counts: their owner makes room for them itself if it is the largest then.
            largest = max(self._owners, key=lambda one: self._owners[one].size + (size if one == owner else 0))
            self._forget(largest, next(iter(self._owners[largest].records)))
        if made:
            owned = self._owners.setdefault(owner, _Owned())
            for key, record in made.items():
                owned.add(key, record)
        self._size += size
        self._count += len(made)
        return True

    async def get(self, owner: str, keys: Sequence[str], ttl: float | None = None) -> list[bytes | None]:
        """See `ResponseStore`."""
        found = [self._live(owner, key) for key in keys]
        if ttl is not None:
            expires = asyncio.get_running_loop().time() + ttl
            for key, value in zip(keys, found, strict=True):
                if value is not None:
                    records = self._owners[owner].records
                    records[key] = records.pop(key)._replace(expires=expires)
        return found

    async def delete(self, owner: str, keys: Sequence[str]) -> None:
        """See `ResponseStore`."""
        for key in keys:
            self._forget(owner, key)

    async def aclose(self) -> None:
        """Forget everything."""
        self._owners.clear()
        self._size = self._count = 0

    def _live(self, owner: str, key: str) -> bytes | None:
        owned = self._owners.get(owner)
        record = None if owned is None else owned.records.get(key)
        if record is None:
            return None
        if record.expires <= asyncio.get_running_loop().time():
            self._forget(owner, key)
            return None
        return record.value

    def _forget(self, owner: str, key: str) -> None:
        owned = self._owners.get(owner)
        record = None if owned is None else owned.remove(key)
        if owned is None or record is None:
            return
        if not owned.records:
            del self._owners[owner]
        self._size -= record.size
        self._count -= 1
