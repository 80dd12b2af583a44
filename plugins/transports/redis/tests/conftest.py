"""Parts of the tests: a real server on loopback, both event loops, and how a wire to the server cuts frames."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import redis
import uvloop
from dynamo_plugin_transport_redis.broker import MAX_FRAGMENT
from dynamo_plugin_transport_redis.transport import RedisTransport
from dynamo_testing.brokered_kit import BrokerBench, BrokerServer, server_binary
from dynamo_testing.faults import Frame
from dynamo_wire.brokered import BrokeredTransport


class RedisServer(BrokerServer):
    """A redis-server without a disk."""

    def __init__(self, folder: Path, *settings: str, tls: bool = False) -> None:
        super().__init__(folder)
        self._scheme = "rediss" if tls else "redis"
        ports = ("--port", "0", "--tls-port", str(self.port)) if tls else ("--port", str(self.port))
        self._arguments = [*ports, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
        self._arguments += settings

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        return [server_binary("redis-server", "valkey-server"), *self._arguments]

    def answers(self) -> bool:
        socket.create_connection(("127.0.0.1", self.port), 1).close()
        return True

    def ask(self, *words: str) -> Any:
        """Return what the server answers, over a connection of its own."""
        with redis.Redis(port=self.port) as client:
            return client.execute_command(*words)

    def published(self) -> int:
        stats = self.ask("INFO", "commandstats")
        return int(stats.get("cmdstat_publish", {"calls": 0})["calls"])

    def channels(self) -> list[bytes]:
        """Return the channels with subscribers."""
        channels: list[bytes] = self.ask("PUBSUB", "CHANNELS")
        return channels

    def connections(self) -> int:
        # Without the one that asks.
        return int(self.ask("INFO", "clients")["connected_clients"]) - 1


class RedisFraming:
    """Cuts what a client and a server say to each other: the body is the payload of a message, if it is one."""

    def splitter(self) -> _RedisSplitter:
        return _RedisSplitter()


class _RedisSplitter:
    _message = re.compile(rb"\*3\r\n\$7\r\n(?:PUBLISH|message)\r\n\$\d+\r\n[^\r]*\r\n\$(\d+)\r\n")

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._held += data
        while self._held:
            found = self._message.match(self._held)
            head = found.end() if found is not None else 0
            whole = head + int(found[1]) + 2 if found is not None else _value(self._held, 0)
            if not whole or len(self._held) < whole:
                return
            yield Frame(self._held[: head or whole], self._held[head or whole : whole])
            self._held = self._held[whole:]

    def rest(self) -> bytes:
        return self._held


def _value(held: bytes, start: int) -> int:
    """Return where the value that begins at `start` ends; 0 if it is not whole."""
    end = held.find(b"\r\n", start) + 2
    if end < 2:
        return 0
    kind, number = held[start : start + 1], held[start + 1 : end - 2]
    if kind == b"$":
        whole = end + max(0, int(number) + 2)
        return whole if whole <= len(held) else 0
    if kind == b"*":
        for _ in range(int(number)):
            end = _value(held, end)
            if not end:
                return 0
    return end


class RedisBench(BrokerBench):
    """Makes servers, transports and wires."""

    TRANSPORT: ClassVar[type[BrokeredTransport]] = RedisTransport
    # Two pairs that carry calls, and that of the thread that answers probes.
    CONNECTIONS: ClassVar[int] = 6
    PART: ClassVar[int] = MAX_FRAGMENT
    SEPARATOR: ClassVar[str] = ":"
    # The connection that subscribes is made after the one that publishes.
    RECEIVING_CONNECTION: ClassVar[int | None] = 1

    def make_server(self, folder: Path, *settings: str, **options: Any) -> BrokerServer:
        return RedisServer(folder, *settings, **options)

    def reaches(self, port: int) -> dict[str, Any]:
        return {"url": f"redis://127.0.0.1:{port}"}

    def framing(self) -> RedisFraming:
        return RedisFraming()

    def fragment(self, body: bytes) -> bytes:
        _, _, fragment = body.removesuffix(b"\r\n").split(b" ", 2)
        return fragment


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Yield the server that most tests share, each with a prefix of its own."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def bench(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[RedisBench]:
    async with RedisBench(redis_server, tmp_path) as bench:
        yield bench


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every asynchronous test on both loops: their transports differ."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
