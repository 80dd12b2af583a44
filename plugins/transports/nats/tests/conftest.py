"""Parts of the tests: a real server on loopback, both event loops, and how a wire to the server cuts frames."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import uvloop
from dynamo_plugin_transport_nats.transport import NatsTransport
from dynamo_testing.brokered_kit import BrokerBench, BrokerServer, server_binary
from dynamo_testing.faults import Frame
from dynamo_testing.servers.ports import free_port
from dynamo_wire.brokered import BrokeredTransport

WAIT = 10.0

#: The largest message that a small server takes.
SMALL = 4096


class NatsServer(BrokerServer):
    """A nats-server."""

    def __init__(self, folder: Path, settings: str = "") -> None:
        super().__init__(folder)
        self.monitor = free_port()
        self._config = folder / "nats.conf"
        self._config.write_text(f'host: "127.0.0.1"\nport: {self.port}\nhttp: "127.0.0.1:{self.monitor}"\n{settings}\n')

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        return [server_binary("nats-server", folders=":/usr/sbin:/usr/local/bin"), "-c", str(self._config)]

    def answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
            return connection.recv(4) == b"INFO"

    def published(self) -> int:
        return int(self._seen()["in_msgs"])

    def connections(self) -> int:
        return int(self._seen()["connections"])

    def _seen(self) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.monitor, timeout=WAIT)
        try:
            connection.request("GET", "/varz")
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


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


class NatsBench(BrokerBench):
    """Makes servers, transports and wires."""

    TRANSPORT: ClassVar[type[BrokeredTransport]] = NatsTransport
    # Two that carry calls, and that of the thread that answers probes.
    CONNECTIONS: ClassVar[int] = 3
    PART: ClassVar[int] = SMALL
    SEPARATOR: ClassVar[str] = "."

    def make_server(self, folder: Path, *settings: str, **options: Any) -> BrokerServer:
        return NatsServer(folder, *settings)

    def small_server(self) -> BrokerServer:
        return self.server(f"max_payload: {SMALL}")

    def reaches(self, port: int) -> dict[str, Any]:
        return {"servers": [f"nats://127.0.0.1:{port}"]}

    def framing(self) -> NatsFraming:
        return NatsFraming()

    def fragment(self, body: bytes) -> bytes:
        return body.removesuffix(b"\r\n")


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Yield the server that most tests share, each with a prefix of its own."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def bench(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[NatsBench]:
    async with NatsBench(nats_server, tmp_path) as bench:
        yield bench


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every asynchronous test on both loops: their transports differ."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
