"""The writer's side of the store: leases and records, each change one atomic step. Blocks; for threads."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

import redis
from dynamo_redis import client_options, explain
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.retry import Retry

from dynamo_plugin_discovery_redis import scripts
from dynamo_plugin_discovery_redis.config import RedisConfig
from dynamo_plugin_discovery_redis.scripts import NO_LEASE, Names, lease_name


class Store:
    """Every method raises `CannotConnect` if the server cannot be asked.

    Safe for several threads at once. Times are in seconds.
    """

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._names = Names(config.prefix, config.database)
        # Again at once, once: a connection of before a restart of the server is found out by using it. All that is
        # asked may be asked twice.
        retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
        options = client_options(config, "discovery", database=config.database, timeout=config.timeout)
        self._client = redis.Redis(**options, retry=retry)

    @property
    def config(self) -> RedisConfig:
        """The address of the store."""
        return self._config

    def register(self, lease: int, ttl: float, records: Mapping[str, bytes]) -> None:
        """Make a lease, or replace one, with these records, the oldest first."""
        flat: list[bytes | str] = []
        for key, value in records.items():
            flat += (key, value)
        self._ask(scripts.REGISTER, lease, [str(_milliseconds(ttl)), *flat])

    def put(self, lease: int, key: str, value: bytes) -> bool:
        """Write a record; False if there is no such lease."""
        return self._ask(scripts.PUT, lease, [key, value]) != 0

    def remove(self, lease: int, key: str) -> None:
        """Remove a record; one that is not there is fine."""
        self._ask(scripts.REMOVE, lease, [key])

    def beat(self, lease: int, ttl: float, records: int) -> bool:
        """Renew a lease; False if it is gone, or does not hold that many records."""
        return self._ask(scripts.BEAT, lease, [str(_milliseconds(ttl)), str(records)]) != 0

    def close_lease(self, lease: int, ttl: float) -> None:
        """Remove all records of a lease, which then expires."""
        self._ask(scripts.CLOSE, lease, [str(_milliseconds(ttl))])

    def put_value(self, key: str, value: bytes | None) -> None:
        """Write a value that outlives its writer; None removes it."""
        if value is None:
            self.remove(NO_LEASE, key)
        else:
            self.put(NO_LEASE, key, value)

    def probe(self) -> None:
        """Do each of the above once, with a lease that is gone at once."""
        lease, ttl = secrets.randbelow(2**63 - 1) + 1, 0.001
        # Should the rest fail, the lease ends as that of a process that died; one that ends early does no harm.
        self.register(lease, self._config.ttl, {"-": b""})
        self.put(lease, "-", b"")
        self.remove(lease, "-")
        self.beat(lease, ttl, 0)
        self.close_lease(lease, ttl)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(self, script: str, lease: int, arguments: Iterable[bytes | str]) -> int:
        keys = self._names.keys(lease)
        head = (self._names.channel, lease_name(lease))
        try:
            answer = self._client.eval(script, len(keys), *keys, *head, *arguments)
        except (RedisError, OSError) as error:
            raise explain(self._config, error) from error
        assert isinstance(answer, int)  # noqa: S101 - what the scripts end with
        return answer


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
