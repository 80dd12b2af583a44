"""The serving end: an acceptor per worker, a link per caller, and handlers run as calls."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from typing import Any

import msgspec
from dynamo_core import DynamoError, Endpoint, Handler, Served, TaskSet
from dynamo_core.errors import CannotConnect, Disconnected, EngineShutdown, InvalidArgument, WorkerOverloaded, to_wire

from dynamo_wire.brokered.addresses import RUN_BYTES, Addresses, is_link
from dynamo_wire.brokered.broker import Broker, Listening
from dynamo_wire.brokered.peer_link import Link
from dynamo_wire.brokered.settings import BrokeredConfig
from dynamo_wire.brokered.wire_format import (
    UNKNOWN_FRAGMENT,
    UNKNOWN_LINK,
    Hello,
    LinkError,
    Welcome,
    read_fragment,
    worker_decoder,
)
from dynamo_wire.messages import (
    ACCEPTED_PROTOS,
    UNREADABLE,
    Ack,
    Open,
    Pause,
    Refused,
    Resume,
    Stop,
    proto_mismatch,
)
from dynamo_wire.server_streams import ServerStreams

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Registry:
    """The endpoints that this process offers."""

    #: The transport's name, under which its addresses are published.
    transport: str
    config: BrokeredConfig
    broker: Broker
    addresses: Addresses
    #: Tells this run of this process from every other that had the same instance id.
    run: bytes = field(default_factory=lambda: secrets.token_bytes(RUN_BYTES))
    acceptors: dict[int, Acceptor] = field(default_factory=dict)
    #: Whether a thread of this process answers probes.
    probes: bool = False

    def lost(self, error: DynamoError) -> None:
        """Lose all callers: the connection with the broker has broken."""
        for acceptor in self.acceptors.values():
            acceptor.finish(error)


class Acceptor:
    """The entry of one instance's calls, with their links, for as long as the process runs."""

    def __init__(self, registry: Registry, instance_id: int) -> None:
        self.registry = registry
        self.instance_id = instance_id
        self.address = registry.addresses.worker(instance_id, registry.run)
        self.served: dict[str, BrokeredServed] = {}
        self.links: dict[str, WorkerLink] = {}
        self._listening: Listening | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        """Accept callers; the server knows when this returns. Safe twice."""
        async with self._opening:
            if self._listening is None:
                self._listening = await self.registry.broker.listen(self.address, self, linked=True)

    def receive(self, link: str, data: bytes, reply: str) -> None:
        """Receive a message of a caller; see `Listener`."""
        known = self.links.get(link)
        if known is None and is_link(link):
            known = self._met(link, data)
        if known is not None:
            known.receive(data, reply)

    def absent(self, link: str) -> None:
        """Handle the absence of a caller; see `Listener`."""
        known = self.links.get(link)
        if known is not None:
            known.absent()

    def _met(self, name: str, data: bytes) -> WorkerLink | None:
        """Open a link for its first fragment. The sender of any other fragment is told that the link is not known."""
        try:
            number = read_fragment(data).number
        except LinkError as error:
            log.warning("a message that is no fragment is dropped: %s", error)
            return None
        if number == UNKNOWN_LINK:
            return None
        if number != 0:
            self.registry.broker.publish(self.registry.addresses.caller(name), UNKNOWN_FRAGMENT, link=name)
            return None
        link = WorkerLink(self, name)
        if len(self.links) >= self.registry.config.max_callers:
            link.close(WorkerOverloaded(f"{len(self.links)} processes call this worker, no more are let in"))
            return None
        self.links[name] = link
        return link

    def finish(self, error: DynamoError) -> None:
        """End all links; their callers are not told."""
        for link in list(self.links.values()):
            link.finish(error)

    def close(self) -> None:
        """Accept no more callers, and end all links."""
        if self._listening is not None:
            self.registry.broker.ignore(self._listening)
        for link in list(self.links.values()):
            link.close(EngineShutdown("the worker is stopping"))


class BrokeredServed(Served):
    """An endpoint of one worker, with the calls that run on it."""

    def __init__(self, acceptor: Acceptor, endpoint: Endpoint, handler: Handler) -> None:
        self._acceptor = acceptor
        self.endpoint = endpoint
        self.handler = handler
        self.decode = msgspec.msgpack.Decoder(endpoint.request_type).decode
        self.calls = TaskSet()
        self.draining = False

    @property
    def address(self) -> dict[str, str]:
        return {self._acceptor.registry.transport: self._acceptor.address}

    async def drain(self, timeout: float) -> bool:
        self.draining = True
        return await self.calls.join(timeout)

    async def aclose(self) -> None:
        self.draining = True
        # The acceptor stays, and tells callers that are late.
        if self._acceptor.served.get(self.endpoint.name) is self:
            del self._acceptor.served[self.endpoint.name]
        await self.calls.aclose()


class WorkerLink(Link):
    """The serving end of one link."""

    def __init__(self, acceptor: Acceptor, name: str) -> None:
        registry = acceptor.registry
        there = registry.addresses.caller(name)
        super().__init__(
            registry.broker, registry.config, name, there=there, here=acceptor.address, decoder=worker_decoder
        )
        self._acceptor = acceptor
        self._streams = ServerStreams(self)
        self.handlers = {Hello: self._on_hello}

    def update_liveness(self) -> bool:
        return bool(self._streams)

    def unused(self, seconds: float) -> None:
        # Callers forget first, and say so, unless they are gone.
        if seconds >= 2 * self.config.idle_timeout:
            self.close(Disconnected("the link was idle"))

    def _on_hello(self, hello: Hello) -> None:
        if hello.proto not in ACCEPTED_PROTOS:
            raise CannotConnect(proto_mismatch(hello.proto))
        self.peer_limit = min(hello.max_message, self.config.max_message)
        streams = self._streams
        self.handlers = {
            Open: self._on_open,
            Stop: streams.on_stop,
            Pause: streams.on_pause,
            Resume: streams.on_resume,
            Ack: streams.on_ack,
        }
        proto = min(hello.proto, ACCEPTED_PROTOS[0])
        self.send(Welcome(proto, self.config.max_message, self._acceptor.registry.probes))

    def _on_open(self, opening: Open) -> None:
        if opening.sid in self._streams:
            raise LinkError(f"stream {opening.sid} is open already")
        try:
            served, request = self._accept(opening)
        except DynamoError as error:
            self.send(Refused(opening.sid, to_wire(error)))
            return
        self._streams.open(opening, served.endpoint, served.handler, request, served.calls)

    def _accept(self, opening: Open) -> tuple[BrokeredServed, Any]:
        acceptor = self._acceptor
        served = acceptor.served.get(opening.endpoint)
        if served is None or opening.instance_id != acceptor.instance_id:
            raise CannotConnect(f"instance {opening.instance_id:016x} does not serve {opening.endpoint!r} here")
        if served.draining:
            raise EngineShutdown(f"endpoint {opening.endpoint!r} is being stopped")
        if len(self._streams) >= self.config.max_streams:
            raise WorkerOverloaded(f"{len(self._streams)} calls of this process run here, no more are accepted")
        try:
            return served, served.decode(opening.request)
        except UNREADABLE as error:
            raise InvalidArgument(f"the request for {opening.endpoint!r} cannot be understood: {error}") from None

    def collect(self, out: list[bytes]) -> None:
        self._streams.collect(out, self.limit)

    def over(self, error: DynamoError) -> None:
        self._acceptor.links.pop(self.name, None)
        self._streams.lost()
