"""The response store contract: keep responses and conversations between requests.

A store knows neither responses nor conversations: it keeps bytes under keys, for one owner at a time, for a while.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.contracts.plugin import Plugin
from dynamo_core.errors import Unavailable
from dynamo_core.resources import AsyncResource

#: What keys must hold for a write to happen, None for no record; no condition if it is None itself.
Expected: TypeAlias = Mapping[str, bytes | None] | None


class StoreFull(Unavailable):
    """The records do not fit the bounds of the store, however much of the old it forgets."""


@dataclass(frozen=True, slots=True)
class ResponseStoreServices:
    """The services that a response store is constructed with."""

    metrics: MetricsScope
    #: Processes of one namespace may share their records; those of two never do.
    namespace: str = "dynamo"


class ResponseStore(Plugin, AsyncResource):
    """Records by owner and key. An owner never sees a record of another one, whatever its key.

    A server that is away is an `Unavailable` or `CannotConnect` of each call, raised within the store's own timeout;
    `start` does not wait for it. A call that is cancelled may have been carried out or not. Owners and keys are texts
    of at most 512 characters; times are in seconds. A store that is bounded makes room by forgetting records of the
    owner that holds the most bytes, beginning with the record that was written or renewed longest ago.
    """

    #: Whether other processes see the same records.
    CROSS_PROCESS: ClassVar[bool] = True
    #: Whether records outlive the process.
    PERSISTENT: ClassVar[bool] = True

    def __init__(self, config: PluginConfig, services: ResponseStoreServices) -> None:
        self.config = config
        self.services = services

    async def start(self) -> None:
        """Open what the calls share. Called once before anything else. What waiting cannot mend is a `ConfigError`."""

    @abstractmethod
    async def put(self, owner: str, records: Mapping[str, bytes], ttl: float, expected: Expected = None) -> bool:
        """Write all of these records, or none, each for `ttl` seconds from now; they are durable when it returns.

        With `expected`, nothing is written, and False returned, unless each of its keys holds exactly that; None stands
        for no record. No other writer comes between the look and the write.

        Raises:
            StoreFull: the records do not fit.
            Unavailable, CannotConnect: the store cannot be used now.
        """

    @abstractmethod
    async def get(self, owner: str, keys: Sequence[str], ttl: float | None = None) -> list[bytes | None]:
        """Return the records of these keys in their order; None for one that is not there.

        With `ttl` those found live that long from now.

        Raises:
            Unavailable, CannotConnect: the store cannot be used now.
        """

    @abstractmethod
    async def delete(self, owner: str, keys: Sequence[str]) -> None:
        """Remove records; one that is not there is fine.

        Raises:
            Unavailable, CannotConnect: the store cannot be used now.
        """

    async def aclose(self) -> None:
        """Close what `start` opened. Safe twice, and without `start`."""
