"""`BrokeredTransport`: one connection with a broker, for calls and events alike."""

from __future__ import annotations

from typing import Any

from dynamo_core import Endpoint, EngineContext, EventPlane, Handler, MetricsScope, Served, Sink, Source, Transport
from dynamo_core.errors import CannotConnect
from dynamo_core.protocol import Instance
from dynamo_telemetry import Metrics

from dynamo_wire.brokered.addresses import Addresses
from dynamo_wire.brokered.broker import Broker
from dynamo_wire.brokered.calling import Peers
from dynamo_wire.brokered.events import BrokeredEvents
from dynamo_wire.brokered.responder import Responder
from dynamo_wire.brokered.serving import Acceptor, BrokeredServed, Registry
from dynamo_wire.brokered.settings import BrokeredConfig


class BrokeredTransport(Transport):
    """Calls between processes over a broker. A plugin names itself, and brings its settings and its broker."""

    def __init__(self, config: BrokeredConfig, metrics: MetricsScope, broker: Broker, addresses: Addresses) -> None:
        super().__init__(config, metrics)
        self._broker = broker
        self._registry = Registry(self.NAME, config, broker, addresses)
        self._peers = Peers(config, broker, addresses)
        self._events = BrokeredEvents(config.event_backlog, broker, addresses, metrics)
        broker.on_lost += [self._registry.lost, self._peers.lost]
        broker.on_writable.append(self._events.writable)
        self._closed = False
        self._responder: Responder | None = None

    async def start(self) -> None:
        """See `Transport.start`.

        Raises:
            ConfigError: the server refuses the login, or does not offer what the settings ask for.
            CannotConnect: no server was reached in time.
        """
        await self._broker.start(self.wait_for)
        await self._peers.start()

    async def serve(self, instance_id: int, endpoint: Endpoint, handler: Handler) -> Served:
        """See `Transport.serve`.

        Raises:
            CannotConnect: the transport is closed.
            ValueError: this endpoint of this instance is served already.
        """
        if self._closed:
            raise CannotConnect("the transport is closed")
        acceptor = self._registry.acceptors.get(instance_id)
        if acceptor is not None and endpoint.name in acceptor.served:
            raise ValueError(f"endpoint {endpoint.name!r} of instance {instance_id:016x} is served already")
        if acceptor is None:
            acceptor = self._registry.acceptors[instance_id] = Acceptor(self._registry, instance_id)
        served = acceptor.served[endpoint.name] = BrokeredServed(acceptor, endpoint, handler)
        try:
            await acceptor.open()
            await self._answer_probes(acceptor)
        except BaseException:
            await served.aclose()
            raise
        return served

    async def call(
        self, instance: Instance, endpoint: Endpoint, request: Any, ctx: EngineContext, sink: Sink
    ) -> Source:
        """See `Transport.call`.

        Raises:
            Unavailable: the broker is gone, and did not come back within `unavailable_wait`.
        """
        address = instance.address.get(self.NAME)
        if address is None:
            raise CannotConnect(f"instance {instance.instance_id:016x} has no address for transport {self.NAME!r}")
        return await self._peers.call(address, instance, endpoint, request, ctx, sink)

    def events(self) -> EventPlane:
        return self._events

    async def aclose(self) -> None:
        self._closed = True
        self._events.close()
        for acceptor in list(self._registry.acceptors.values()):
            for served in list(acceptor.served.values()):
                await served.aclose()
            acceptor.close()
        self._peers.close()
        await self._broker.aclose()
        if self._responder is not None:
            await self._responder.aclose()

    async def _answer_probes(self, acceptor: Acceptor) -> None:
        if self._responder is None:
            # Its metrics would be taken for those of the connection that carries calls.
            broker = self._broker.another(Metrics())
            if broker is None:
                return
            self._responder = Responder(broker, self._registry.addresses)
            self._registry.probes = True
        await self._responder.answer_for(acceptor.address)
