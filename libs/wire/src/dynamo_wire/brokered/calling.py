"""The calling end: one link per worker called, shared by all calls."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

from dynamo_core import DynamoError, Endpoint, EngineContext, Sink, Source, jitter
from dynamo_core.errors import CannotConnect, Disconnected
from dynamo_core.protocol import Instance

from dynamo_wire.brokered.addresses import RUN_BYTES, Addresses, is_link
from dynamo_wire.brokered.broker import Broker, Listening
from dynamo_wire.brokered.peer_link import Link
from dynamo_wire.brokered.settings import BrokeredConfig
from dynamo_wire.brokered.wire_format import (
    PROBE_FRAGMENT,
    UNKNOWN_FRAGMENT,
    UNKNOWN_LINK,
    Hello,
    LinkError,
    Welcome,
    caller_decoder,
    read_fragment,
)
from dynamo_wire.calls import Calls
from dynamo_wire.liveness import silence_limit
from dynamo_wire.messages import ACCEPTED_PROTOS, Accepted, Ended, Refused, Rows, proto_mismatch

log = logging.getLogger(__name__)

#: Seconds between two attempts to reach a worker that may still be on its way back to the broker, varied by half.
SETTLE_PAUSE = 0.1


class CallerLink(Link):
    """The calling end of one link."""

    def __init__(self, peers: Peers, address: str, name: str) -> None:
        here = peers.addresses.caller(name)
        super().__init__(peers.broker, peers.config, name, there=address, here=here, decoder=caller_decoder)
        #: Whether the worker does not know this link, so that a new one may do.
        self.forgotten = False
        #: Seconds that the worker's lease lives, as its record says.
        self.lease_ttl: float | None = None
        self.warned_of_abandoned = False
        #: Whether a thread of the worker's process answers probes; None until it has said so.
        self._probes: bool | None = None
        self.calls = Calls(self, self.config.accept_timeout)
        self._peers = peers
        self.handlers = {Welcome: self._on_welcome}
        self.send(Hello(ACCEPTED_PROTOS[0], self.config.max_message))

    def update_liveness(self) -> bool:
        # A record of the version before, whose workers answer none, does not say how long the lease lives.
        probes = self.lease_ttl is not None if self._probes is None else self._probes
        self.liveness.silence = silence_limit(self.config.silence, self.lease_ttl, probes=probes)
        return bool(self.calls)

    @property
    def busy(self) -> bool:
        """Whether the worker's event loop does not run now, and its process does."""
        return self.liveness.busy

    def probe(self) -> None:
        # Without a reply: a process that does not listen there may listen at the link all the same.
        self.broker.publish(self._peers.addresses.probes(self.peer), PROBE_FRAGMENT, link=self.name)

    def report_busy(self, seconds: float) -> None:
        if self.liveness.report_busy(self._loop.time()):
            log.warning(
                "the event loop of %s is busy, for %.1f s so far: %d calls wait", self.peer, seconds, len(self.calls)
            )

    def unused(self, seconds: float) -> None:
        if seconds >= self.config.idle_timeout:
            self.close(Disconnected("the link was idle"))

    def unknown(self) -> None:
        self.forgotten = True
        self.finish(CannotConnect(f"{self.peer} has forgotten this process"))

    def send_call(self, message: bytes) -> None:
        """Send an encoded call with the next fragment."""
        self.ask(message)

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.proto not in ACCEPTED_PROTOS:
            raise CannotConnect(proto_mismatch(welcome.proto))
        self.peer_limit = min(welcome.max_message, self.config.max_message)
        self._probes = welcome.probes
        self.handlers = {
            Rows: self.calls.on_rows,
            Accepted: self.calls.on_accepted,
            Refused: self.calls.on_refused,
            Ended: self.calls.on_ended,
        }

    def over(self, error: DynamoError) -> None:
        self._peers.forget(self)
        self.calls.lost(error)


class Peers:
    """The links of this process, one per worker, made when first needed. Workers answer at one address for all."""

    def __init__(self, config: BrokeredConfig, broker: Broker, addresses: Addresses) -> None:
        self.config = config
        self.broker = broker
        self.addresses = addresses
        self._run = secrets.token_hex(RUN_BYTES)
        self._links: dict[str, CallerLink] = {}
        self._by_name: dict[str, CallerLink] = {}
        self._count = 0
        self._listening: Listening | None = None
        self._closed = False

    async def start(self) -> None:
        """Listen for answers."""
        self._listening = await self.broker.listen(self.addresses.caller(self._run), self, linked=True)

    async def call(
        self, address: str, instance: Instance, endpoint: Endpoint, request: Any, ctx: EngineContext, sink: Sink
    ) -> Source:
        """Call a worker at an address of its record; see `dynamo_core.contracts.transports.transport.Transport.call`.

        Raises:
            Unavailable: the broker is gone, and did not come back in time.
            CannotConnect: the address is malformed, or has no listener.
        """
        if not self.addresses.is_worker(address):
            raise CannotConnect(f"{address[:100]!r} is not an address of this system: `prefix` differs?")
        renewed = False
        while True:
            await self.broker.ready()
            link = self._get(address)
            link.lease_ttl = instance.lease_ttl
            try:
                return await link.calls.open(instance.instance_id, endpoint, request, ctx, sink)
            except CannotConnect:
                if link.forgotten and not renewed:
                    # It had lost its connection, or given us up. It has not got the call.
                    renewed = True
                elif link.closed and self.broker.settling and not self._closed:
                    # The broker was gone for all, and this worker may only be a little later than we are.
                    await asyncio.sleep(jitter(SETTLE_PAUSE))
                else:
                    raise

    def _get(self, address: str) -> CallerLink:
        if self._closed:
            raise CannotConnect("the transport is closed")
        link = self._links.get(address)
        if link is None:
            self._count += 1
            link = CallerLink(self, address, f"{self._run}.{self._count}")
            self._links[address] = self._by_name[link.name] = link
        return link

    def forget(self, link: CallerLink) -> None:
        """Forget a link that is over."""
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        self._by_name.pop(link.name, None)

    def receive(self, link: str, data: bytes, reply: str) -> None:
        """Receive a message of a worker; see `Listener`."""
        known = self._by_name.get(link)
        if known is not None:
            known.receive(data, reply)
        elif is_link(link):
            self._unknown(link, data, reply)

    def absent(self, link: str) -> None:
        """Handle the absence of a worker; see `Listener`."""
        known = self._by_name.get(link)
        if known is not None:
            known.absent()

    def _unknown(self, link: str, data: bytes, reply: str) -> None:
        """Tell a worker that the link it asks about is over here."""
        try:
            asked = read_fragment(data).number != UNKNOWN_LINK
        except LinkError:
            return
        if asked and self.addresses.is_worker(reply):
            self.broker.publish(reply, UNKNOWN_FRAGMENT, link=link)

    def lost(self, error: DynamoError) -> None:
        """Lose all links: the connection with the broker has broken."""
        for link in list(self._links.values()):
            link.finish(error)

    def close(self) -> None:
        """End all calls, and tell the workers."""
        self._closed = True
        for link in list(self._links.values()):
            link.close(Disconnected("the calling process is stopping"))
        if self._listening is not None:
            self.broker.ignore(self._listening)
