"""Discovery: the directory of live processes. Records live under leases and vanish with them."""

from __future__ import annotations

import asyncio
import enum
from abc import abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from dynamo_core.contracts.plugin import ConnectingPlugin
from dynamo_core.resources import AsyncResource

#: The largest value that may be put, in bytes.
MAX_VALUE = 64 * 1024


class WatchKind(enum.Enum):
    """The kinds of events of a watch."""

    PUT = "put"
    DELETE = "delete"
    #: The snapshot is complete; changes follow. Sent once, also after an empty snapshot.
    SYNCED = "synced"
    #: The store cannot be reached; the view so far stays as it was.
    STALE = "stale"
    #: The store is back and the view is current again.
    FRESH = "fresh"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One event of a watch; key and value are set for `PUT`, the key for `DELETE`."""

    kind: WatchKind
    key: str = ""
    value: bytes = b""


class Lease(AsyncResource):
    """The registration of one process in discovery. It is kept alive in the background until closed."""

    @property
    @abstractmethod
    def id(self) -> int:
        """Unique among all live leases; serves as instance id and worker id. Below 2**63."""

    @property
    @abstractmethod
    def lost(self) -> asyncio.Event:
        """Set when the store has dropped the lease and it could not be registered again."""

    @property
    def ttl(self) -> float | None:
        """Seconds after which the store drops the lease of a dead process; None if it does not say.

        A worker publishes it; callers allow a worker to be silent for that long.
        """
        return None

    @abstractmethod
    async def put(self, key: str, value: bytes) -> None:
        """Write a record that lives as long as the lease, or a new value of one.

        Watches tell a new value as one more `PUT`, without a `DELETE` before it.

        Raises:
            ValueError: the value is larger than `MAX_VALUE`.
        """

    @abstractmethod
    async def remove(self, key: str) -> None:
        """Remove a record of this lease, if there is one."""

    @abstractmethod
    async def aclose(self) -> None:
        """Remove all records and end the lease. Safe twice."""


class Discovery(ConnectingPlugin):
    """A directory of live processes, and a few small shared values."""

    @abstractmethod
    async def lease(self, ttl: float | None = None) -> Lease:
        """Return a new lease; `ttl` in seconds, None for the plugin's own default."""

    @abstractmethod
    def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
        """Return a snapshot of all records whose key starts with `prefix`, then every change.

        Write it as an async generator; closing it ends the watch.
        """

    @abstractmethod
    async def put_value(self, key: str, value: bytes | None) -> None:
        """Write a small value that outlives its writer; None removes it. Seen by watches like any record."""

    @abstractmethod
    async def aclose(self) -> None:
        """End all watches and leases of this object. Safe twice, and without `start`."""
