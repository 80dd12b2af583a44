"""Parts of the tests: a real server on loopback, transports that are closed again, both loops, a wire with faults."""

from __future__ import annotations

import asyncio
import http.client
import json
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
import uvloop
from dynamo_core.errors import DynamoError
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.telemetry.metrics import Metrics
from dynamo_plugin_transport_nats.config import NatsConfig
from dynamo_plugin_transport_nats.transport import NatsTransport
from dynamo_testing.faults import FaultProxy, Frame, Passing, Raw
from dynamo_testing.ports import free_port

WAIT = 10.0


class NatsServer:
    """A nats-server of its own, which can be killed and started again, empty, on the same port."""

    def __init__(self, folder: Path, settings: str = "") -> None:
        self.port, self.monitor = free_port(), free_port()
        self._config = folder / "nats.conf"
        self._config.write_text(f'host: "127.0.0.1"\nport: {self.port}\nhttp: "127.0.0.1:{self.monitor}"\n{settings}\n')
        self._log = folder / "nats.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([_binary(), "-c", str(self._config)], stdout=log, stderr=log)
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                    if connection.recv(4) == b"INFO":
                        return
            except OSError:
                time.sleep(0.01)
        pytest.fail(f"nats-server did not start:\n{self._log.read_text()}")

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(WAIT)

    def freeze(self) -> None:
        """It answers nobody any more; only `kill` ends that."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            os.waitpid(self._process.pid, os.WUNTRACED)

    def seen(self, what: str = "varz") -> Any:
        """What the server tells of itself."""
        connection = http.client.HTTPConnection("127.0.0.1", self.monitor, timeout=WAIT)
        try:
            connection.request("GET", f"/{what}")
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


def _binary() -> str:
    found = shutil.which("nats-server", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/bin")
    if found is None and os.environ.get("CI"):
        pytest.fail(
            "nats-server is not installed, and these tests must run here; on Debian: apt-get install nats-server"
        )
    if found is None:
        pytest.skip(
            "nats-server is not installed: NOTHING OF THIS PLUGIN IS TESTED; on Debian: apt-get install nats-server"
        )
    return found


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """The server that most tests share, each with a prefix of its own."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., NatsServer]]:
    """Starts servers with settings of their own, or to be killed."""
    made: list[NatsServer] = []

    def make(settings: str = "") -> NatsServer:
        folder = tmp_path / f"nats{len(made)}"
        folder.mkdir()
        server = NatsServer(folder, settings)
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

    async def begun(self) -> None:
        await self.until(lambda: self.items or self.ends)

    async def end(self) -> DynamoError | None:
        await self.until(lambda: self.ends)
        return self.ends[0]


@pytest.fixture
def recorder() -> type[Recorder]:
    """Makes sinks."""
    return Recorder


@pytest.fixture
def prefix() -> str:
    """What the subjects of this test begin with."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
async def make_transport(request: pytest.FixtureRequest, prefix: str) -> AsyncIterator[Callable[..., Any]]:
    """Makes transports that are connected with the shared server, and closed at the end, the newest first."""
    made: list[NatsTransport] = []

    async def make(metrics: Metrics | None = None, **options: Any) -> NatsTransport:
        if "servers" not in options:
            options["servers"] = [request.getfixturevalue("nats_server").url]
        options = {"prefix": prefix, "heartbeat": 0.2, "reconnect_wait": 0.2} | options
        transport = NatsTransport(NatsConfig.model_validate(options), metrics or Metrics())
        made.append(transport)
        await transport.start()
        return transport

    yield make
    async with asyncio.timeout(WAIT):
        for transport in reversed(made):
            await transport.aclose()


class NatsFraming:
    """Cuts what a client and a server say to each other: the head is a line, the body a payload if one follows."""

    def splitter(self) -> _NatsSplitter:
        return _NatsSplitter()


class _NatsSplitter:
    _payload = re.compile(rb"(?:H?MSG|H?PUB) .*?(\d+)\r\n", re.I)

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._held += data
        while (end := self._held.find(b"\r\n") + 2) > 1:
            line = self._held[:end]
            found = self._payload.fullmatch(line)
            whole = end + int(found[1]) + 2 if found is not None else end
            if len(self._held) < whole:
                return
            yield Frame(line, self._held[end:whole])
            self._held = self._held[whole:]

    def rest(self) -> bytes:
        return self._held


@pytest.fixture
async def make_wire(nats_server: NatsServer) -> AsyncIterator[Callable[..., Any]]:
    """Makes wires to the shared server that can fail."""
    made: list[FaultProxy] = []

    async def make(tap: Callable[[Passing], None] | None = None, *, raw: bool = False) -> FaultProxy:
        wire = FaultProxy("127.0.0.1", nats_server.port, framing=Raw() if raw else NatsFraming(), tap=tap)
        await wire.start()
        made.append(wire)
        return wire

    yield make
    for wire in made:
        await wire.aclose()


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every asynchronous test runs on both loops: their transports differ."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
