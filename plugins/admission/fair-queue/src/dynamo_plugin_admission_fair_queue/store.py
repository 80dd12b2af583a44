"""The store of the reports of frontends, in Redis or Valkey. The only module that needs the library.

::

    <prefix>:limits:frontends      a sorted set: frontend, and when it last reported, in microseconds of the server
    <prefix>:limits:frontend:<id>  its report, until it expires

Both expire when no frontend reports any more. A frontend writes its report first, then the time: a reader that sees the
time sees at least that report.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Any

from dynamo_redis import ReusedConnection
from redis.asyncio.connection import Connection
from redis.exceptions import ResponseError

from dynamo_plugin_admission_fair_queue.shared_config import SharedConfig
from dynamo_plugin_admission_fair_queue.sharing import Store
from dynamo_plugin_admission_fair_queue.usage_codec import LARGEST, PeerSnapshot

#: Where the settings stand.
SECTION = "admission.shared"
#: The most frontends that are read, those that reported last.
_MOST = 256
#: Digits of a frontend's name.
_DIGITS = 16

_Command = tuple[bytes | str | int, ...]


class RedisStore(Store):
    """The store over one connection. For one task at a time; deadlines are the caller's.

    Raises:
        ConfigError: a file of `tls` cannot be used.
    """

    def __init__(self, config: SharedConfig) -> None:
        self._connection = _Connection(config, SECTION, database=config.database, connect_timeout=config.deadline)
        self._name = secrets.token_hex(_DIGITS // 2)
        self._ttl = max(1, round(config.ttl * 1000))
        self._index = f"{config.prefix}:limits:frontends"
        self._keys = f"{config.prefix}:limits:frontend:"

    async def exchange(self, report: bytes | None, known: Mapping[str, int]) -> PeerSnapshot:
        asked: list[_Command] = [("TIME",), ("ZRANGE", self._index, -_MOST, -1, "WITHSCORES")]
        if report is not None:
            asked.append(self._value(report))
        time, listed, *_ = await self._connection.ask(asked)
        now = _microseconds(time)
        pairs = zip(listed[::2], listed[1::2], strict=True)
        stamps = {name: stamp for name, stamp in map(_stamped, pairs) if len(name) == _DIGITS and name != self._name}
        news = [name for name, stamp in stamps.items() if known.get(name) != stamp]
        noted = [] if report is None else self._note(now)
        # One byte more than it may have shows that it is too long.
        asked = [*noted, *(("GETRANGE", self._keys + name, 0, LARGEST) for name in news)]
        answers = (await self._connection.ask(asked))[len(noted) :] if asked else []
        return PeerSnapshot(now, stamps, dict(zip(news, answers, strict=True)))

    async def publish(self, report: bytes) -> None:
        time, _ = await self._connection.ask([("TIME",), self._value(report)])
        await self._connection.ask(self._note(_microseconds(time)))

    async def aclose(self) -> None:
        await self._connection.aclose()

    def _value(self, report: bytes) -> _Command:
        return "SET", self._keys + self._name, report, "PX", self._ttl

    def _note(self, now: int) -> list[_Command]:
        """Write the time of the report, and forget the frontends whose reports have expired."""
        return [
            ("ZADD", self._index, now, self._name),
            ("ZREMRANGEBYSCORE", self._index, "-inf", now - self._ttl * 1000),
            ("PEXPIRE", self._index, self._ttl),
        ]


class _Connection(ReusedConnection):
    """Reads what another program has put under the key of a frontend as a report that is empty."""

    async def read_answer(self, connection: Connection) -> Any:
        try:
            return await super().read_answer(connection)
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            return b""


def _stamped(pair: tuple[bytes, bytes]) -> tuple[str, int]:
    """Return a frontend, and when it last reported: 0 for a stamp that is no time, which no frontend has written."""
    name, stamp = pair[0].decode("ascii", "replace"), float(pair[1])
    return name, int(stamp) if math.isfinite(stamp) else 0


def _microseconds(time: list[bytes]) -> int:
    seconds, rest = time
    return int(seconds) * 1_000_000 + int(rest)
