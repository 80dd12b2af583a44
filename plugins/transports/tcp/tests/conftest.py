"""Parts of the tests: transports that are closed again, both event loops, a sink that remembers, and a faulty wire."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import uvloop
from dynamo_core import TaskSet
from dynamo_plugin_transport_tcp.address import Address
from dynamo_plugin_transport_tcp.config import TcpConfig
from dynamo_plugin_transport_tcp.frames import FrameSplitter, checked_frame, frame
from dynamo_plugin_transport_tcp.messages import Challenge, Proof, Ready
from dynamo_plugin_transport_tcp.transport import TcpTransport
from dynamo_telemetry import Metrics
from dynamo_testing.transport.harness import Recorder
from dynamo_wire import ROWS_TAG

WAIT = 10.0

CHALLENGE, PROOF, READY = (kind.__struct_config__.tag for kind in (Challenge, Proof, Ready))


class End(asyncio.Protocol):
    """One end of a wire. What arrives goes on to the other end, as fast as that takes it."""

    def __init__(self, wire: Wire, other: End | None = None) -> None:
        self._wire = wire
        self._splitter = FrameSplitter(2**32 - 1)
        self._frame = frame
        self.other = other
        #: What came before the other end was connected.
        self.early: list[bytes] = []
        self.transport: asyncio.Transport | None = None
        #: Whether frames have checksums, once the handshake is over.
        self.agreed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._wire.ends.append(self)
        if self.other is None:
            self._wire.extend(self)
        else:
            self.other.other = self
            self.transport.writelines(self.other.early)

    def data_received(self, data: bytes) -> None:
        carried: list[bytes] = []
        for body in self._splitter.feed(data):
            message = msgspec.msgpack.decode(body)
            if message[0] in self._wire.hold:
                self._wire.held.append((self, bytes(body)))
            else:
                carried += self._spoilt(bytes(body))
            if message[0] == CHALLENGE and message[6]:
                self.agreed = True
            if message[0] in (PROOF, READY) and (self.agreed or (self.other is not None and self.other.agreed)):
                # The last one without a checksum in its direction.
                self._splitter.check()
                self._frame = checked_frame
        self._send(carried)

    def carry(self, body: bytes) -> None:
        """Send a frame on that was held back."""
        self._send(self._spoilt(body))

    def _spoilt(self, body: bytes) -> list[bytes]:
        spoilt = self._wire.spoil(body)
        return [] if spoilt is None else [self._frame(spoilt)]

    def _send(self, carried: list[bytes]) -> None:
        if self.other is None:
            self.early += carried
        elif self.other.transport is not None and carried:
            self.other.transport.write(b"".join(carried))

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wire.ends.remove(self)
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class Wire:
    """Carries frames between callers and one listener, and can be made to do it badly."""

    def __init__(self) -> None:
        #: Where frames are carried to; set before the first of them.
        self.target: Address | None = None
        self.ends: list[End] = []
        #: Whether one row from the listener is to be lost, or doubled; taken back when it has been.
        self.lose_a_row = False
        self.double_a_row = False
        #: The tags of frames that are held back until they are released.
        self.hold: set[int] = set()
        self.held: list[tuple[End, bytes]] = []
        #: Whether everything is lost, both ways, though the connections stay.
        self.dead = False
        #: The tags of all frames that were carried, and how many rows each frame of rows had.
        self.tags: list[int] = []
        self.rows: list[int] = []
        self.news = asyncio.Event()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks = TaskSet()

    async def start(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(lambda: End(self), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> Address:
        """Where callers reach the target through this wire."""
        assert self.target is not None
        return Address("127.0.0.1", self.port, self.target.nonce)

    def extend(self, end: End) -> None:
        self._tasks.spawn(self._extend(end), name="wire")

    async def _extend(self, end: End) -> None:
        assert self.target is not None
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: End(self, end), self.target.host, self.target.port
            )
        except OSError:
            assert end.transport is not None
            end.transport.abort()

    def spoil(self, body: bytes) -> bytes | None:
        """Return what is carried of a frame."""
        if self.dead:
            return None
        message = msgspec.msgpack.decode(body)
        if message[0] == ROWS_TAG:
            self.rows.append(len(message[1]))
            if self.lose_a_row:
                del message[1][0]
            elif self.double_a_row:
                message[1].append(message[1][-1])
            self.lose_a_row = self.double_a_row = False
        self.tags.append(message[0])
        self.news.set()
        return msgspec.msgpack.encode(message)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT):
            while not condition():
                self.news.clear()
                await self.news.wait()

    def release(self) -> None:
        """Carry what was held back."""
        self.hold.clear()
        held, self.held = self.held, []
        for end, body in held:
            end.carry(body)

    def cut(self) -> None:
        """Break every connection, as if a cable were pulled."""
        for end in self.ends:
            if end.transport is not None:
                end.transport.abort()

    async def aclose(self) -> None:
        await self._tasks.aclose()
        self.cut()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()


class Authority:
    """Makes certificates with the openssl command."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca = folder / "ca.crt"
        self._run("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=ca",
                  "-keyout", folder / "ca.key", "-out", self.ca, "-days", "2")  # fmt: skip

    def _run(self, *arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    def issue(self, name: str) -> dict[str, str]:
        key, request, cert, extra = (self._folder / f"{name}.{end}" for end in ("key", "csr", "crt", "ext"))
        extra.write_text(f"subjectAltName=DNS:{name},IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        self._run("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
                  "-keyout", key, "-out", request)  # fmt: skip
        self._run("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._folder / "ca.key", "-out", cert,
                  "-days", "2", "-extfile", extra, "-CAcreateserial")  # fmt: skip
        return {"cert": str(cert), "key": str(key), "ca": str(self.ca)}


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not installed")
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def strange(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Authority:
    return Authority(tmp_path_factory.mktemp("strange"))


@pytest.fixture
def encrypted(authority: Authority) -> dict[str, Any]:
    """Return settings with which both ends show certificates."""
    return {"tls": authority.issue("worker") | {"client_ca": str(authority.ca)}}


@pytest.fixture
def recorder() -> type[Recorder]:
    """Make sinks."""
    return Recorder


@pytest.fixture
async def make_transport() -> AsyncIterator[Callable[..., TcpTransport]]:
    """Make transports that are closed at the end, the newest first."""
    made: list[TcpTransport] = []

    def make(metrics: Metrics | None = None, **options: Any) -> TcpTransport:
        transport = TcpTransport(TcpConfig(**options), metrics or Metrics())
        made.append(transport)
        return transport

    yield make
    async with asyncio.timeout(WAIT):
        for transport in reversed(made):
            await transport.aclose()


@pytest.fixture
async def make_wire() -> AsyncIterator[Callable[[], Any]]:
    """Make wires that are closed at the end."""
    made: list[Wire] = []

    async def make() -> Wire:
        wire = Wire()
        await wire.start()
        made.append(wire)
        return wire

    yield make
    for wire in made:
        await wire.aclose()


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every asynchronous test on both loops: their transports differ."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
