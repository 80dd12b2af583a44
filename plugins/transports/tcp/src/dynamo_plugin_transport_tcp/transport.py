"""`TcpTransport`: one listener and one connection per process called, for calls and events alike."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from typing import Any

from dynamo_core.contracts.call import Endpoint, Handler, Sink, Source
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.context import EngineContext
from dynamo_core.contracts.events import EventPlane
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.contracts.transport import Served, Transport
from dynamo_core.errors import CannotConnect, ConfigError, Disconnected
from dynamo_core.protocol.records import Instance

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
from dynamo_plugin_transport_tcp.events import TcpEvents
from dynamo_plugin_transport_tcp.link import CLOSE_GRACE
from dynamo_plugin_transport_tcp.security import calling_context, listening_context
from dynamo_plugin_transport_tcp.serving import ListenerLink, Registry, TcpServed

log = logging.getLogger(__name__)

#: Connections that may wait to be accepted by the listener.
ACCEPT_QUEUE = 512


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
        connections = metrics.gauge("dynamo_tcp_connections", "Open connections of the TCP transport.", ("side",))
        self._listening_tls = None if config.tls is None else listening_context(config.tls)
        calling_tls = None if config.tls is None else calling_context(config.tls)
        self._registry = Registry(config, connections.labels("listener"))
        self._peers = Peers(config, calling_tls, connections.labels("caller"))
        self._events = TcpEvents(self._registry, self._listen, self._peers, metrics)
        self._opening = asyncio.Lock()
        self._server: asyncio.Server | None = None
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
            raise ValueError(f"endpoint {endpoint.name!r} of instance {instance_id:x} is served already")
        served = self._registry.served[key] = TcpServed(self._registry, instance_id, endpoint, handler, address)
        return served

    async def call(
        self, instance: Instance, endpoint: Endpoint, request: Any, ctx: EngineContext, sink: Sink
    ) -> Source:
        address = instance.address.get(self.NAME)
        if address is None:
            raise CannotConnect(f"instance {instance.instance_id:x} has no address for transport {self.NAME!r}")
        link = await self._peers.get(address)
        return await link.call(instance.instance_id, endpoint, request, ctx, sink)

    def events(self) -> EventPlane:
        return self._events

    async def aclose(self) -> None:
        self._closed = True
        self._events.close()
        for served in list(self._registry.served.values()):
            await served.aclose()
        await self._peers.aclose()
        async with self._opening:
            server, self._server = self._server, None
        if server is not None:
            server.close()
        links = list(self._registry.links)
        for link in links:
            link.close(Disconnected("the serving process is stopping"))
        for link in links:
            await link.gone.wait()
        if server is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_GRACE):
                    await server.wait_closed()

    async def _listen(self) -> Address:
        async with self._opening:
            if self._closed:
                raise CannotConnect("the transport is closed")
            if self._address is None:
                self._server, self._address = await self._open()
                log.info("listening for calls at %s", join_host_port(self._address.host, self._address.port))
            return self._address

    async def _open(self) -> tuple[asyncio.Server, Address]:
        config, loop = self._config, asyncio.get_running_loop()
        host, port = split_host_port(config.bind)
        try:
            # One address only: a name may stand for several, and with port 0 each would get another port.
            found = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0][4]
            server = await loop.create_server(
                lambda: ListenerLink(self._registry),
                str(found[0]),
                port,
                ssl=self._listening_tls,
                ssl_handshake_timeout=config.connect_timeout if self._listening_tls is not None else None,
                backlog=ACCEPT_QUEUE,
            )
        except OSError as error:
            raise ConfigError(
                f"transport.bind: cannot listen on {config.bind!r}: {error.strerror or error}; choose another address "
                "or a free port",
                cause=error,
            ) from error
        bound_host, bound_port = server.sockets[0].getsockname()[:2]
        if config.insecure and not is_loopback(bound_host):
            log.warning(
                "%s is open to everyone who reaches it (insecure: true)", join_host_port(bound_host, bound_port)
            )
        try:
            return server, Address(*self._advertised(bound_host, bound_port), self._registry.nonce)
        except ConfigError:
            server.close()
            raise

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
