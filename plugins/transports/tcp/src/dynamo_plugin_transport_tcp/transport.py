"""`TcpTransport`: one listener and one connection per process called, for calls and events alike."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from dynamo_core import (
    Endpoint,
    EngineContext,
    EventPlane,
    Handler,
    MetricsScope,
    PluginConfig,
    Served,
    Sink,
    Source,
    TaskSet,
    Transport,
)
from dynamo_core.errors import CannotConnect, ConfigError, Disconnected
from dynamo_core.protocol import Instance

from dynamo_plugin_transport_tcp.acceptor import Acceptor, listen
from dynamo_plugin_transport_tcp.address import (
    Address,
    is_loopback,
    is_unspecified,
    join_host_port,
    own_address,
    split_host_port,
)
from dynamo_plugin_transport_tcp.calling import Peers
from dynamo_plugin_transport_tcp.config import TcpConfig
from dynamo_plugin_transport_tcp.connection_limiter import ConnectionLimiter, PendingConnection
from dynamo_plugin_transport_tcp.events import TcpEvents
from dynamo_plugin_transport_tcp.link import CLOSE_GRACE
from dynamo_plugin_transport_tcp.probes import ProbeKey
from dynamo_plugin_transport_tcp.security import calling_context, listening_context
from dynamo_plugin_transport_tcp.serving import ListenerLink, Registry, TcpServed

log = logging.getLogger(__name__)


class TcpTransport(Transport):
    """Calls between processes over TCP. The listener is opened by the first `serve` or publisher.

    Raises:
        ConfigError: a file of `tls` cannot be used.
    """

    NAME = "tcp"
    Config = TcpConfig

    def __init__(self, config: PluginConfig, metrics: MetricsScope) -> None:
        super().__init__(config, metrics)
        if not isinstance(config, TcpConfig):
            raise TypeError(f"TcpConfig is needed, not {type(config).__name__}")
        self._config = config
        connections = metrics.gauge("dynamo_tcp_connections", "Connections of the transport that are open.", ("side",))
        damaged = metrics.counter(
            "dynamo_tcp_damaged_frames_total",
            "Frames that did not arrive as they were sent; each ended its connection.",
            ("side",),
        )
        self._listening_tls = None if config.tls is None else listening_context(config.tls)
        calling_tls = None if config.tls is None else calling_context(config.tls)
        evicted = metrics.counter(
            "dynamo_tcp_silent_connections_closed_total",
            "Connections that were closed to make room, as they had said nothing yet.",
        )
        limiter = ConnectionLimiter(config.max_silent, evicted.labels())
        self._registry = Registry(config, connections.labels("listener"), damaged.labels("listener"), limiter)
        self._peers = Peers(config, calling_tls, connections.labels("caller"), damaged.labels("caller"))
        self._events = TcpEvents(self._registry, self._listen, self._peers, metrics)
        self._opening = asyncio.Lock()
        self._acceptor: Acceptor | None = None
        #: Connections that are being made of what was accepted.
        self._met = TaskSet()
        self._address: Address | None = None
        self._closed = False

    async def serve(self, instance_id: int, endpoint: Endpoint, handler: Handler) -> Served:
        """See `Transport.serve`.

        Raises:
            ConfigError: the address cannot be bound, or must be named with `advertise`.
            ValueError: this endpoint of this instance is served already.
        """
        address = await self._listen()
        key = (instance_id, endpoint.name)
        if key in self._registry.served:
            raise ValueError(f"endpoint {endpoint.name!r} of instance {instance_id:016x} is served already")
        served = self._registry.served[key] = TcpServed(self._registry, instance_id, endpoint, handler, address)
        return served

    async def call(
        self, instance: Instance, endpoint: Endpoint, request: Any, ctx: EngineContext, sink: Sink
    ) -> Source:
        address = instance.address.get(self.NAME)
        if address is None:
            raise CannotConnect(f"instance {instance.instance_id:016x} has no address for transport {self.NAME!r}")
        link = await self._peers.get(address, instance.lease_ttl)
        return await link.calls.open(instance.instance_id, endpoint, request, ctx, sink)

    def events(self) -> EventPlane:
        return self._events

    async def aclose(self) -> None:
        self._closed = True
        self._events.close()
        for served in list(self._registry.served.values()):
            await served.aclose()
        await self._peers.aclose()
        async with self._opening:
            acceptor, self._acceptor = self._acceptor, None
        if acceptor is not None:
            await acceptor.aclose()
        # A task that is cancelled before it has begun would forget its socket.
        await self._met.join(CLOSE_GRACE)
        await self._met.aclose()
        links = list(self._registry.links)
        for link in links:
            link.close(Disconnected("the serving process is stopping"))
        for link in links:
            await link.gone.wait()

    async def _listen(self) -> Address:
        async with self._opening:
            if self._closed:
                raise CannotConnect("the transport is closed")
            if self._address is None:
                self._acceptor, self._address = await self._open()
                log.info("listening for calls at %s", join_host_port(self._address.host, self._address.port))
            return self._address

    async def _open(self) -> tuple[Acceptor, Address]:
        config, loop = self._config, asyncio.get_running_loop()
        host, port = split_host_port(config.bind)
        try:
            # One address only: a name may stand for several, and with port 0 each would get another port.
            family, _, _, _, place = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
            sock = listen(family, place)
        except OSError as error:
            raise ConfigError(
                f"transport.bind: cannot listen on {config.bind!r}: {error.strerror or error}; choose another address "
                "or a free port",
                cause=error,
            ) from error
        bound_host, bound_port = sock.getsockname()[:2]
        if config.insecure and not is_loopback(bound_host):
            log.warning(
                "%s is open to everyone who reaches it (insecure: true)", join_host_port(bound_host, bound_port)
            )
        try:
            address = Address(*self._advertised(bound_host, bound_port), self._registry.nonce)
        except ConfigError:
            sock.close()
            raise
        acceptor = Acceptor(
            sock,
            ProbeKey(config.secret_bytes, self._registry.nonce),
            limiter=self._registry.limiter,
            timeout=config.connect_timeout,
            farewell=self._listening_tls is None,
            take=self._take,
        )
        await acceptor.start()
        return acceptor, address

    def _take(self, sock: socket.socket, pending: PendingConnection) -> None:
        """Take over a connection that carries no probe."""
        loop = asyncio.get_running_loop()
        task = self._met.spawn(self._meet(sock, pending), name="tcp-connection")
        pending.close = lambda: loop.call_soon_threadsafe(task.cancel)

    async def _meet(self, sock: socket.socket, pending: PendingConnection) -> None:
        link = ListenerLink(self._registry, pending)
        made = False
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: link,
                sock,
                ssl=self._listening_tls,
                ssl_handshake_timeout=None if self._listening_tls is None else self._config.connect_timeout,
            )
            made = True
        except OSError as error:
            log.debug("a connection was not made: %s", error)
        finally:
            if not made:
                # uvloop does not say that a connection is lost that was given up in the moment in which it was made.
                link.connection_lost(None)

    def _advertised(self, bound_host: str, bound_port: int) -> tuple[str, int]:
        if self._config.advertise is not None:
            host, port = split_host_port(self._config.advertise)
            return host, bound_port if port is None else port
        if not is_unspecified(bound_host):
            return bound_host, bound_port
        own = own_address()
        if own is None:
            raise ConfigError(
                f"transport.advertise: {self._config.bind!r} stands for all addresses and this machine's own was not "
                "found: name the one that callers reach"
            )
        return own, bound_port
