"""`RedisStore`: responses in a Redis or Valkey server, which any number of frontends share."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

from dynamo_core import Expected, PluginConfig, ResponseStore, ResponseStoreServices
from dynamo_core.errors import CannotConnect
from dynamo_redis import RedisSettings, client_options, config_error, explain
from pydantic import Field
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

SECTION = "frontend.response_store"

#: KEYS: the mark of this call, the records to write, then the expected ones. ARGV: life in milliseconds, that of the
#: mark, the number of records, their values, then for each expected one '=' and its value, or '-' for none. A call that
#: is sent again, as its answer was lost, finds its mark and has succeeded.
_PUT = """
local count = tonumber(ARGV[3])
if #KEYS > count + 1 then
  if redis.call('EXISTS', KEYS[1]) == 1 then return 1 end
  for i = count + 2, #KEYS do
    local held = redis.call('GET', KEYS[i])
    if (held and '=' .. held or '-') ~= ARGV[2 + i] then return 0 end
  end
  redis.call('SET', KEYS[1], '', 'PX', ARGV[2])
end
for i = 2, count + 1 do
  redis.call('SET', KEYS[i], ARGV[2 + i], 'PX', ARGV[1])
end
return 1
"""


class RedisStoreConfig(RedisSettings):
    """The server's address, and its timeouts."""

    database: int = Field(default=0, ge=0, description="The number of the database.")
    prefix: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="What every key begins with; null means the namespace. Frontends with the same share responses.",
    )
    timeout: float = Field(
        default=2.0, gt=0, le=60, description="Seconds that connecting, or one answer of the server, may take."
    )
    connections: int = Field(default=16, ge=1, le=1024, description="Connections of a process to the server.")


class RedisStore(ResponseStore):
    """Keeps each record under a key of its own, which expires. The server bounds its memory itself."""

    NAME = "redis"
    Config: ClassVar[type[PluginConfig]] = RedisStoreConfig

    config: RedisStoreConfig

    def __init__(self, config: PluginConfig, services: ResponseStoreServices) -> None:
        super().__init__(config, services)
        self._client: Redis | None = None
        self._turns = asyncio.Semaphore(self.config.connections)
        self._prefix = self.config.prefix or services.namespace

    async def start(self) -> None:
        """Look for the server once. One that is away is used when it is back.

        Raises:
            ConfigError: the server is there and refuses the login, or a setting of the address is wrong.
        """
        config = self.config
        options = client_options(config, SECTION, database=config.database, timeout=config.timeout)
        # Again at once, once: a connection of before a restart of the server is found out by using it.
        retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
        self._client = Redis(**options, retry=retry)
        try:
            await self._ask(self._client.ping)
        except CannotConnect as failure:
            wrong = config_error(failure, SECTION)
            if wrong is not None:
                raise wrong from failure

    async def put(self, owner: str, records: Mapping[str, bytes], ttl: float, expected: Expected = None) -> bool:
        """See `ResponseStore`."""
        conditions = expected or {}
        keys = [self._key(owner, key) for key in (f"put:{secrets.token_hex(8)}", *records, *conditions)]
        wanted = [b"-" if value is None else b"=" + value for value in conditions.values()]
        arguments = [
            _milliseconds(ttl),
            _milliseconds(4 * self.config.timeout),
            len(records),
            *records.values(),
            *wanted,
        ]
        client = self._open()
        answer = await self._ask(lambda: client.eval(_PUT, len(keys), *keys, *cast("list[Any]", arguments)))
        return bool(answer)

    async def get(self, owner: str, keys: Sequence[str], ttl: float | None = None) -> list[bytes | None]:
        """See `ResponseStore`."""
        if not keys:
            return []
        names = [self._key(owner, key) for key in keys]
        pipe = self._open().pipeline(transaction=False)
        pipe.mget(names)
        if ttl is not None:
            for name in names:
                pipe.pexpire(name, _milliseconds(ttl))
        answers = await self._ask(pipe.execute)
        found: list[bytes | None] = answers[0]
        return found

    async def delete(self, owner: str, keys: Sequence[str]) -> None:
        """See `ResponseStore`."""
        if keys:
            client = self._open()
            await self._ask(lambda: client.delete(*[self._key(owner, key) for key in keys]))

    async def aclose(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()

    def _open(self) -> Redis:
        if self._client is None:
            raise CannotConnect("the response store is closed")
        return self._client

    async def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            async with asyncio.timeout(2 * self.config.timeout), self._turns:
                return await question()
        except TimeoutError as error:
            raise CannotConnect(
                f"Redis at {self.config.host}:{self.config.port} does not answer within {2 * self.config.timeout:g} s",
                cause=error,
            ) from error
        except (RedisError, OSError) as error:
            raise explain(self.config, error) from error

    def _key(self, owner: str, key: str) -> str:
        # The owner in braces: all keys of one are on one server of a cluster. Its hash: it may hold anything.
        return f"{self._prefix}:responses:{{{hashlib.sha256(owner.encode()).hexdigest()[:32]}}}:{key}"


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
