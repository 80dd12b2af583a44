"""The reader's side of the store: changes since the last look, and notifications of changes."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from dynamo_core.protocol import UnreadableWarner
from dynamo_redis import client_options, explain
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from dynamo_plugin_discovery_redis.config import RedisConfig
from dynamo_plugin_discovery_redis.scripts import READ, Names

log = logging.getLogger(__name__)

#: Seconds of the longest life of a lease.
MAX_TTL = 3600.0
#: Asks for everything.
EVERYTHING = -1


@dataclass(frozen=True, slots=True)
class Held:
    """The content of a lease: its ttl in seconds, and its keys with revision and value."""

    ttl: float
    records: dict[str, tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the store."""

    epoch: bytes
    #: Whether the connection is new: the server may have been started anew and have forgotten something.
    anew: bool
    #: All leases that live.
    there: set[int]
    #: Those of them that may have changed.
    changed: dict[int, Held]


class Reader:
    """Reads for one task; `changes` may run in another."""

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._names = Names(config.prefix, config.database)
        how = client_options(config, "discovery", database=config.database, timeout=config.timeout)
        how["retry"] = Retry(NoBackoff(), 0)
        self._client = Redis(**how, redis_connect_func=self._connected)
        self._announcements = Redis(**how)
        self._connections = 0
        self._ended = False
        self._epoch = b""
        self._revision = EVERYTHING
        self._left_out = UnreadableWarner(log, "record")

    async def read(self) -> Reading:
        """Return what has changed since the last call that succeeded.

        Raises:
            CannotConnect: the server cannot be asked.
        """
        connections, known = self._connections, self._revision
        # Until it has succeeded, nothing is known.
        self._revision = EVERYTHING
        try:
            reading, revision = await self._read(known)
            anew = connections != self._connections
            if anew and known != EVERYTHING:
                # The connection has been made in between: what is known may be of another life of the server.
                reading, revision = await self._read(EVERYTHING)
        except BaseException as error:
            # What is asked next must not get the answer to this.
            await self._client.connection_pool.disconnect()
            if isinstance(error, RedisError | OSError):
                raise explain(self._config, error) from error
            raise
        self._epoch, self._revision = reading.epoch, revision
        return Reading(reading.epoch, anew, reading.there, reading.changed)

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yield word of each change, and one at the beginning. Some may be missed.

        Raises:
            CannotConnect: the connection could not be made, or broke.
        """
        announcements = self._announcements.pubsub()
        try:
            await announcements.subscribe(self._names.channel)
            while not self._ended:
                # The confirmation counts: what happened before it has not been announced.
                if await announcements.get_message(timeout=self._config.ttl) is not None:
                    yield
        except (RedisError, OSError) as error:
            raise explain(self._config, error) from error
        finally:
            await announcements.aclose()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Let `changes` end soon. Cancelling is not enough: the library may swallow it while it sends."""
        self._ended = True

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()
        await self._announcements.aclose()

    async def _connected(self, connection: AbstractConnection) -> None:
        self._connections += 1
        await connection.on_connect()

    async def _read(self, known: int) -> tuple[Reading, int]:
        names = self._names
        head = (names.channel, names.leases, self._epoch, str(known), secrets.token_hex(8))
        answer = await self._client.eval(READ, len(names.shared), *names.shared, *head)
        epoch, revision, there, changed = answer
        held = {number: self._held(fields) for lease, fields in changed if (number := _number(lease)) is not None}
        return Reading(
            epoch, False, {number for lease in there if (number := _number(lease)) is not None}, held
        ), revision

    def _held(self, fields: list[bytes]) -> Held:
        """Return what a lease holds; records that no discovery can have written are left out."""
        ttl, records = 0.0, {}
        for key, value in zip(fields[::2], fields[1::2], strict=True):
            try:
                if key:
                    revision, _, content = value.partition(b":")
                    records[key.decode()] = (int(revision), content)
                else:
                    ttl = min(max(0, int(value)) / 1000, MAX_TTL)
            except ValueError as error:
                self._left_out.warn(key.decode(errors="replace"), error)
        return Held(ttl, records)


def _number(lease: bytes) -> int | None:
    """Return the id of a lease; None for a name that is none."""
    try:
        return int(lease, 16)
    except ValueError:
        return None
