"""Parts of the tests: a real server on loopback, transports that are closed again, both loops, a wire with faults."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import uvloop
from dynamo_core.errors import DynamoError
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.telemetry.metrics import Metrics
from dynamo_plugin_transport_redis.config import RedisConfig
from dynamo_plugin_transport_redis.transport import RedisTransport
from dynamo_testing.faults import FaultProxy, Frame, Passing, Raw
from dynamo_testing.ports import free_port

WAIT = 10.0


class RedisServer:
    """A redis-server of its own, without a disk, which can be killed and started again, empty, on the same port."""

    def __init__(self, folder: Path, *settings: str, tls: bool = False) -> None:
        self.port = free_port()
        self._scheme = "rediss" if tls else "redis"
        ports = ("--port", "0", "--tls-port", str(self.port)) if tls else ("--port", str(self.port))
        self._command = [*ports, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
        self._command += settings
        self._log = folder / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([_binary(), *self._command], stdout=log, stderr=log)
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.01)
            else:
                return
        pytest.fail(f"redis-server did not start:\n{self._log.read_text()}")

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(WAIT)

    def stop(self) -> None:
        """It is there and does not answer, until `resume`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, *words: str) -> Any:
        """What the server answers; over a connection of its own."""
        with redis.Redis(port=self.port) as client:
            return client.execute_command(*words)

    def published(self) -> int:
        """How many messages were sent to it."""
        stats = self.ask("INFO", "commandstats")
        return int(stats.get("cmdstat_publish", {"calls": 0})["calls"])

    def listened_to(self) -> list[bytes]:
        """The channels to which somebody listens."""
        channels: list[bytes] = self.ask("PUBSUB", "CHANNELS")
        return channels

    def connections(self) -> int:
        """How many there are, without the one that asks."""
        return int(self.ask("INFO", "clients")["connected_clients"]) - 1

    def memory(self) -> int:
        """Bytes that it holds."""
        return int(self.ask("INFO", "memory")["used_memory"])


def _binary() -> str:
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None and os.environ.get("CI"):
        pytest.fail(
            "redis-server is not installed, and these tests must run here; on Debian: apt-get install redis-server"
        )
    if found is None:
        pytest.skip(
            "redis-server is not installed: NOTHING OF THIS PLUGIN IS TESTED; on Debian: apt-get install redis-server"
        )
    return found


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The server that most tests share, each with a prefix of its own."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts servers with settings of their own, or to be killed."""
    made: list[RedisServer] = []

    def make(*settings: str, tls: bool = False) -> RedisServer:
        folder = tmp_path / f"redis{len(made)}"
        folder.mkdir()
        server = RedisServer(folder, *settings, tls=tls)
        made.append(server)
        server.start()
        return server

    yield make
    for server in made:
        server.kill()


class Recorder:
    """A sink that writes down what it is given."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.events: list[Annotated[Any]] = []
        self.ends: list[DynamoError | None] = []
        self._news = asyncio.Event()

    def data(self, item: Any) -> None:
        self.items.append(item)
        self._news.set()

    def event(self, item: Annotated[Any]) -> None:
        self.events.append(item)
        self._news.set()

    def closed(self, error: DynamoError | None) -> None:
        self.ends.append(error)
        self._news.set()

    @property
    def complete(self) -> bool:
        return any(event.is_complete_final() for event in self.events)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def end(self) -> DynamoError | None:
        await self.until(lambda: self.ends)
        return self.ends[0]


@pytest.fixture
def recorder() -> type[Recorder]:
    """Makes sinks."""
    return Recorder


@pytest.fixture
def prefix() -> str:
    """What the channels of this test begin with."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
async def make_transport(request: pytest.FixtureRequest, prefix: str) -> AsyncIterator[Callable[..., Any]]:
    """Makes transports that are connected with the shared server, and closed at the end, the newest first."""
    made: list[RedisTransport] = []

    async def make(metrics: Metrics | None = None, **options: Any) -> RedisTransport:
        if "url" not in options:
            options["url"] = request.getfixturevalue("redis_server").url
        options = {"prefix": prefix, "heartbeat": 0.2, "reconnect_wait": 0.2} | options
        transport = RedisTransport(RedisConfig.model_validate(options), metrics or Metrics())
        made.append(transport)
        await transport.start()
        return transport

    yield make
    async with asyncio.timeout(WAIT):
        for transport in reversed(made):
            await transport.aclose()


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
    """Where the value that begins at `start` ends; 0 if it is not whole."""
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


@pytest.fixture
async def make_wire(redis_server: RedisServer) -> AsyncIterator[Callable[..., Any]]:
    """Makes wires to the shared server that can fail."""
    made: list[FaultProxy] = []

    async def make(tap: Callable[[Passing], None] | None = None, *, raw: bool = False) -> FaultProxy:
        wire = FaultProxy("127.0.0.1", redis_server.port, framing=Raw() if raw else RedisFraming(), tap=tap)
        await wire.start()
        made.append(wire)
        return wire

    yield make
    for wire in made:
        await wire.aclose()


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every asynchronous test runs on both loops: their transports differ."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
