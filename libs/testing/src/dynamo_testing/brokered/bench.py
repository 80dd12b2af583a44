"""The bench of the broker checks: servers in processes of their own, transports and faulty wires."""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.contracts.transports.transport import Transport
from dynamo_telemetry.metrics import Metrics
from dynamo_wire import ROWS_TAG
from dynamo_wire.brokered import BrokeredTransport

from dynamo_testing.faults import FaultProxy, Framing, Passing, Raw
from dynamo_testing.servers.ports import free_port
from dynamo_testing.servers.server_process import ServerProcess

#: Seconds that anything may take before a check fails.
WAIT = 10.0


class BrokerServer(ServerProcess):
    """The server of a broker. Started again, it is empty."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "server.log")
        self.port = free_port()

    @abstractmethod
    def published(self) -> int:
        """Return how many messages were sent to it."""

    @abstractmethod
    def connections(self) -> int:
        """Return how many clients are connected."""


class BrokerBench(ABC):
    """Makes servers, transports and wires, and closes them. An author subclasses it once per broker."""

    #: The transport under test.
    TRANSPORT: ClassVar[type[BrokeredTransport]]
    #: Connections that a worker and its caller have with the server, with those that answer probes.
    CONNECTIONS: ClassVar[int]
    #: The largest message in bytes that `small_server` or the transport lets pass in one part.
    PART: ClassVar[int]
    #: What separates the words of an address.
    SEPARATOR: ClassVar[str]
    #: Over which of its connections a transport receives, in the order in which they are made; None for all.
    RECEIVING_CONNECTION: ClassVar[int | None] = None

    def __init__(self, shared: BrokerServer, folder: Path) -> None:
        """`shared` is the server of transports for which no other is named; `folder` is for those of this test."""
        self.shared = shared
        self.prefix = f"test-{secrets.token_hex(6)}"
        self._folder = folder
        self._servers: list[BrokerServer] = []
        self._transports: list[Any] = []
        self._wires: list[FaultProxy] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        async with asyncio.timeout(WAIT):
            for transport in reversed(self._transports):
                await transport.aclose()
        for wire in self._wires:
            await wire.aclose()
        for server in self._servers:
            server.kill()

    @abstractmethod
    def make_server(self, folder: Path, *settings: str, **options: Any) -> BrokerServer:
        """Return a server that is not started yet."""

    @abstractmethod
    def reaches(self, port: int) -> dict[str, Any]:
        """Return the settings of a transport for a server at a port of this machine, as JSON has them."""

    @abstractmethod
    def framing(self) -> Framing:
        """Cut what a client and the server say into frames whose body is the payload of a message."""

    def fragment(self, body: bytes) -> bytes:
        """Return the fragment in the body of a frame. Raise ValueError where there is none."""
        return body

    def small_server(self) -> BrokerServer:
        """Return a started server that takes messages of `PART` bytes, if a server can be told."""
        return self.server()

    def server(self, *settings: str, **options: Any) -> BrokerServer:
        """Return a started server of this test's own."""
        folder = self._folder / f"server{len(self._servers)}"
        folder.mkdir()
        made = self.make_server(folder, *settings, **options)
        self._servers.append(made)
        made.start()
        return made

    async def transport(
        self, there: BrokerServer | FaultProxy | None = None, metrics: MetricsScope | None = None, /, **options: Any
    ) -> Any:
        """Return a started transport that reaches the shared server, another one, or a wire."""
        reached = self.reaches((there or self.shared).port)
        options = reached | {"prefix": self.prefix, "heartbeat": 0.2, "reconnect_wait": 0.2} | options
        made = self._make(options, metrics or Metrics())
        self._transports.append(made)
        await made.start()
        return made

    def _make(self, options: dict[str, Any], metrics: MetricsScope) -> Any:
        kind: type[Transport] = self.TRANSPORT
        return kind(kind.Config.model_validate(options), metrics)

    async def pair(self, there: BrokerServer | None = None, /, **options: Any) -> tuple[Any, Any]:
        """Return a serving and a calling transport."""
        return await self.transport(there, **options), await self.transport(there, **options)

    async def wire(self, tap: Callable[[Passing], None] | None = None, *, raw: bool = False) -> FaultProxy:
        """Return a wire to the shared server that can fail."""
        made = FaultProxy("127.0.0.1", self.shared.port, framing=Raw() if raw else self.framing(), tap=tap)
        await made.start()
        self._wires.append(made)
        return made

    async def behind(self, **options: Any) -> tuple[FaultProxy, Any]:
        """Return a wire, and a transport that reaches the shared server through it."""
        wire = await self.wire()
        return wire, await self.transport(wire, **options)

    def messages(self, body: bytes) -> list[Any]:
        """Return the messages in the body of a frame; none in what is not a whole fragment."""
        try:
            _, more, bundle, *_ = msgspec.msgpack.decode(self.fragment(body))
            found: list[Any] = [] if more else msgspec.msgpack.decode(bundle)
        except (msgspec.MsgspecError, ValueError, TypeError):
            return []
        return found

    def says(self, tag: object) -> Callable[[bytes], bool]:
        """Return whether the body of a frame holds a message with this tag."""
        return lambda body: any(message[0] == tag for message in self.messages(body))

    def carries_rows(self, body: bytes) -> bool:
        """Return whether the body of a frame holds rows."""
        return self.says(ROWS_TAG)(body)


def unplug(wire: FaultProxy) -> None:
    """Cut the wire, so that nothing behind it reaches the server, as if the machine were off."""
    wire.target = ("127.0.0.1", 1)
    wire.cut()
