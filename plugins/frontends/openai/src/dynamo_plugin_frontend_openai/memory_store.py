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
    """How much is kept."""

    max_mb: int = Field(default=256, ge=1, description="MB that all records may take together.")
    max_records: int = Field(default=100_000, ge=1, description="Records that are kept at the most.")


class _Record(NamedTuple):
    value: bytes
    size: int
    expires: float


class MemoryStore(ResponseStore):
    """Keeps records in this process, and forgets those that were used longest ago when there is no more room."""

    NAME = "memory"
    Config: ClassVar[type[PluginConfig]] = MemoryStoreConfig
    CROSS_PROCESS = False
    PERSISTENT = False

    config: MemoryStoreConfig

    def __init__(self, config: PluginConfig, services: ResponseStoreServices) -> None:
        super().__init__(config, services)
        #: The one that was used longest ago comes first.
        self._records: dict[tuple[str, str], _Record] = {}
        self._size = 0

    async def put(self, owner: str, records: Mapping[str, bytes], ttl: float, expected: Expected = None) -> bool:
        """See `ResponseStore`."""
        if any(self._live(owner, key) != value for key, value in (expected or {}).items()):
            return False
        expires = asyncio.get_running_loop().time() + ttl
        made = {
            (owner, key): _Record(value, len(value) + len(owner) + len(key) + _OVERHEAD, expires)
            for key, value in records.items()
        }
        size = sum(record.size for record in made.values())
        if size > self.config.max_mb * _MB or len(made) > self.config.max_records:
            raise StoreFull(f"{size} bytes do not fit the response store: frontend.response_store.max_mb is its bound")
        for place in made:
            self._forget(place)
        while self._records and (
            self._size + size > self.config.max_mb * _MB or len(self._records) + len(made) > self.config.max_records
        ):
            self._forget(next(iter(self._records)))
        self._records |= made
        self._size += size
        return True

    async def get(self, owner: str, keys: Sequence[str], ttl: float | None = None) -> list[bytes | None]:
        """See `ResponseStore`."""
        found = [self._live(owner, key) for key in keys]
        if ttl is not None:
            expires = asyncio.get_running_loop().time() + ttl
            for key, value in zip(keys, found, strict=True):
                if value is not None:
                    record = self._records.pop((owner, key))
                    self._records[owner, key] = record._replace(expires=expires)
        return found

    async def delete(self, owner: str, keys: Sequence[str]) -> None:
        """See `ResponseStore`."""
        for key in keys:
            self._forget((owner, key))

    async def aclose(self) -> None:
        """Forgets everything."""
        self._records.clear()
        self._size = 0

    def _live(self, owner: str, key: str) -> bytes | None:
        record = self._records.get((owner, key))
        if record is None:
            return None
        if record.expires <= asyncio.get_running_loop().time():
            self._forget((owner, key))
            return None
        return record.value

    def _forget(self, place: tuple[str, str]) -> None:
        record = self._records.pop(place, None)
        if record is not None:
            self._size -= record.size
