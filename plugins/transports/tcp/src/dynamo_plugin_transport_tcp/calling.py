"""The calling end: one connection per process called, shared by all calls and subscriptions."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context

from dynamo_core import CounterLike, DynamoError, GaugeLike, TaskSet
from dynamo_core.errors import CannotConnect, ConnectionTimeout, Disconnected
from dynamo_wire import (
    ACCEPTED_PROTOS,
    ASKED,
    Accepted,
    Calls,
    Ended,
    Liveness,
    Refused,
    Rows,
    proto_mismatch,
    silence_limit,
)

from dynamo_plugin_transport_tcp.address import Address
from dynamo_plugin_transport_tcp.config import TcpConfig
from dynamo_plugin_transport_tcp.link import Link
from dynamo_plugin_transport_tcp.messages import (
    MAGIC,
    Challenge,
    Events,
    Hello,
    Proof,
    Ready,
    Subscribe,
    Unsubscribe,
    Unsubscribed,
    caller_decoder,
)
from dynamo_plugin_transport_tcp.outbound_allowlist import AllowedNetworks
from dynamo_plugin_transport_tcp.probes import ProbeKey, probe
from dynamo_plugin_transport_tcp.security import CALLER, CHALLENGE_BYTES, LISTENER, proof, proven

log = logging.getLogger(__name__)

#: Seconds that the TLS part of a handshake may take: another deadline ends it sooner.
NO_LIMIT = 3600.0


class CallerLink(Link):
    """The calling end of one connection. `ready` tells whether the handshake went well, or the error."""

    def __init__(
        self, config: TcpConfig, address: Address, connections: GaugeLike, damaged: CounterLike, tasks: TaskSet
    ) -> None:
        """`tasks` keeps what goes on beside the connection; `damaged` counts frames that are not what was sent."""
        super().__init__(config, caller_decoder, damaged)
        self.ready: asyncio.Future[DynamoError | None] = self._loop.create_future()
        self._address = address
        self._connections = connections
        self._counted = False
        self._challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self._expected = b""
        self.calls = Calls(self, config.accept_timeout)
        self._subscriptions: dict[int, Subscription] = {}
        self._last = 0
        self._idle_since = self._loop.time()
        self._tasks = tasks
        #: Whether a thread of the other process answers probes, and the probe under way.
        self._probes = False
        self._there = address.host, address.port
        self.probe_key = ProbeKey(config.secret_bytes, address.nonce)
        self._probing: asyncio.Task[None] | None = None
        #: Seconds that the worker's lease lives, as its record says.
        self.lease_ttl: float | None = None
        #: Whether a call was given up that did not end, which is warned of once.
        self.warned_of_abandoned = False
        self.liveness = Liveness(config.heartbeat, config.callers_silence, self._loop.time())
        #: Whether only events are at stake, so that the worker is asked less often.
        self._slow = False
        self.handlers = {Challenge: self._on_challenge}

    # The handshake.

    def opened(self) -> None:
        self._connections.inc()
        self._counted = True
        config = self.config
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        if isinstance(name, tuple):
            # Where the connection leads, so that probes go the same way.
            self._there = name[0], name[1]
        proto, nonce = ACCEPTED_PROTOS[0], self._address.nonce
        self.send(Hello(MAGIC, proto, nonce, self._challenge, config.max_frame, config.checksums))

    def _on_challenge(self, given: Challenge) -> None:
        if given.proto not in ACCEPTED_PROTOS:
            raise CannotConnect(proto_mismatch(given.proto))
        secret = self.config.secret_bytes
        if given.secret and secret is None:
            raise CannotConnect(f"{self.peer} asks for a secret: set `secret` of the transport")
        challenges = self._challenge, given.challenge
        self._expected = proof(secret, LISTENER, self._address.nonce, *challenges)
        self.peer_limit = given.max_frame
        self._probes = given.probes
        self.handlers = {Ready: self._on_ready}
        self.negotiated(checksums=given.checksums)
        self.send(Proof(proof(secret, CALLER, self._address.nonce, *challenges), self.transcript))
        self.handshake_sent()

    def _on_ready(self, given: Ready) -> None:
        if self._expected and not proven(self._expected, given.proof):
            raise CannotConnect(f"{self.peer} did not prove that it knows the secret")
        self.verify_transcript(given.transcript)
        self.handshake_received()
        self.handlers = {
            Rows: self.calls.on_rows,
            Accepted: self.calls.on_accepted,
            Refused: self.calls.on_refused,
            Ended: self.calls.on_ended,
            Events: self._on_events,
            Unsubscribed: self._on_unsubscribed,
        }
        if not self.ready.done():
            self.ready.set_result(None)

    # What calls need of a link.

    @property
    def busy(self) -> bool:
        """Whether the worker's event loop does not run now, and its process does."""
        return self.liveness.busy

    @property
    def limit(self) -> int:
        """The largest message that the other end takes, in bytes."""
        return self.peer_limit

    def send_call(self, message: bytes) -> None:
        """Send an encoded `Open` with the next write."""
        if self._slow:
            self._shorten_heartbeat()
        self.send_body(message)

    # Events.

    def subscribe(self, subject: str, source: int, put: Callable[[int, bytes], None]) -> Subscription:
        """Ask for the events of one publisher.

        Raises:
            CannotConnect: the connection is closed.
        """
        if self.closing:
            raise CannotConnect(f"the connection with {self.peer} is closed")
        sid = self._last = self._last + 1
        subscription = self._subscriptions[sid] = Subscription(self, sid, put)
        self.send(Subscribe(sid, subject, source))
        return subscription

    def unsubscribe(self, sid: int) -> None:
        """Drop the events of a subscription from now on."""
        if self._subscriptions.pop(sid, None) is not None:
            self.send(Unsubscribe(sid))

    def _on_events(self, message: Events) -> None:
        subscriptions = self._subscriptions
        for sid, number, payload in message.events:
            subscription = subscriptions.get(sid)
            if subscription is not None:
                subscription.put(number, payload)

    def _on_unsubscribed(self, message: Unsubscribed) -> None:
        subscription = self._subscriptions.pop(message.sid, None)
        if subscription is not None:
            subscription.over.set()

    # Both.

    def update_liveness(self) -> bool:
        config, liveness = self.config, self.liveness
        self._slow = not self.calls and bool(self._subscriptions)
        if self._slow:
            liveness.heartbeat, liveness.silence = config.callers_heartbeat, config.callers_silence
        else:
            liveness.heartbeat = config.heartbeat
            liveness.silence = silence_limit(config.silence, self.lease_ttl, probes=self._probes)
        return bool(self.calls or self._subscriptions)

    def _shorten_heartbeat(self) -> None:
        """Shorten the heartbeat for a call opened while the worker was asked less often."""
        self.update_liveness()
        self.liveness.begin(self._loop.time())
        self._set_ticker()

    def ticked(self, now: float) -> None:
        if self.calls or self._subscriptions:
            self._idle_since = now
        elif now - self._idle_since >= self.config.idle_timeout:
            self.close(Disconnected("the connection was idle"))

    def probe(self) -> None:
        if self._probes and self._probing is None and self.calls:
            self._probing = self._tasks.spawn(self._probe(), name=f"probe-{self.peer}")

    async def _probe(self) -> None:
        try:
            busy = await probe(*self._there, self.probe_key)
        finally:
            self._probing = None
        if busy and not self.closing and self.liveness.report_busy(self._loop.time()):
            log.warning(
                "the event loop of %s is busy, for %.1f s so far: %d calls wait", self.peer, busy, len(self.calls)
            )

    def over(self, error: DynamoError) -> None:
        # One of which TLS never became a connection was not counted.
        if self._counted:
            self._connections.dec()
        if not self.ready.done():
            self.ready.set_result(error)
        self.calls.lost(error)
        subscriptions, self._subscriptions = self._subscriptions, {}
        for subscription in subscriptions.values():
            subscription.over.set()


class Subscription:
    """The events of one publisher; `over` is set when no more will come."""

    __slots__ = ("_link", "_sid", "over", "put")

    def __init__(self, link: CallerLink, sid: int, put: Callable[[int, bytes], None]) -> None:
        self._link = link
        self._sid = sid
        self.put = put
        self.over = asyncio.Event()

    def close(self) -> None:
        """Want no more of them. Safe twice."""
        self._link.unsubscribe(self._sid)


class Peers:
    """Connections to other processes, one per address, made when first needed."""

    def __init__(
        self, config: TcpConfig, tls: ssl.SSLContext | None, connections: GaugeLike, damaged: CounterLike
    ) -> None:
        self._config = config
        self._damaged = damaged
        self._tls = tls
        self._networks = AllowedNetworks(config.allowed_networks)
        self._connections = connections
        self._links: dict[str, CallerLink] = {}
        self._attempts: dict[str, asyncio.Task[CallerLink | DynamoError]] = {}
        self._tasks = TaskSet()
        self._closed = False

    async def get(self, text: str, lease_ttl: float | None = None) -> CallerLink:
        """Return the connection with the process at an address of a record.

        Callers that come together share one attempt. `lease_ttl` is the life of the worker's lease in seconds, None if
        the record does not say.

        Raises:
            CannotConnect: it is not there, or not the one that is meant, or does not trust us.
            ConnectionTimeout: it did not answer in time.
        """
        link = self._links.get(text)
        if link is not None and not link.closing:
            if lease_ttl is not None:
                link.lease_ttl = lease_ttl
            return link
        if self._closed:
            raise CannotConnect("the transport is closed")
        attempt = self._attempts.get(text)
        if attempt is None:
            # A task of its own: the first caller may give up while others still wait. Its context is no caller's, since
            # all that is received runs in it.
            attempt = self._attempts[text] = self._tasks.spawn(
                self._connect(text, lease_ttl), name=f"connect-{text}", context=Context()
            )
        try:
            result = await asyncio.shield(attempt)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if attempt.cancelled() and task is not None and not task.cancelling():
                raise CannotConnect("the transport is closed") from None
            raise
        if isinstance(result, DynamoError):
            # A new one for each caller: one object raised in many places would collect their tracebacks.
            raise type(result)(result.message) from result.__cause__
        return result

    async def _connect(self, text: str, lease_ttl: float | None) -> CallerLink | DynamoError:
        made: list[CallerLink] = []
        limit = self._config.connect_timeout
        if lease_ttl is not None:
            limit = min(limit, silence_limit(self._config.silence, lease_ttl, probes=True))
        try:
            return await self._open(text, limit, lease_ttl, made)
        except TimeoutError as error:
            return ConnectionTimeout(f"no connection with {text} within {limit:g} s", cause=error)
        except DynamoError as error:
            return CannotConnect(f"{text}: {error}", cause=error)
        except (OSError, ValueError) as error:
            return CannotConnect(f"{text} cannot be reached: {error}", cause=error)
        finally:
            del self._attempts[text]
            for link in made:
                if self._links.get(text) is not link:
                    link.abort(CannotConnect("the connection was given up"))

    async def _open(self, text: str, limit: float, lease_ttl: float | None, made: list[CallerLink]) -> CallerLink:
        """Open within `limit` seconds, but for those in which the worker's event loop is busy."""
        address = Address.parse(text)

        def make() -> CallerLink:
            link = CallerLink(self._config, address, self._connections, self._damaged, self._tasks)
            link.lease_ttl = lease_ttl
            made.append(link)
            return link

        server_name: str | None = None
        if self._tls is not None and self._config.tls is not None:
            server_name = self._config.tls.server_name or address.host
        async with asyncio.timeout(limit) as deadline:
            hosts = await self._networks.resolve(address.host, address.port)
            key = ProbeKey(self._config.secret_bytes, address.nonce)
            waiting = self._tasks.spawn(
                self._wait_for_busy(hosts, address.port, key, deadline, limit), name=f"probe-{text}"
            )
            try:
                link = await self._connected(hosts, address.port, make, server_name)
                problem = await link.ready
            finally:
                waiting.cancel()
        if problem is not None:
            raise problem
        self._links = {key: known for key, known in self._links.items() if not known.closing}
        self._links[text] = link
        return link

    async def _connected(
        self, hosts: list[str], port: int, make: Callable[[], CallerLink], server_name: str | None
    ) -> CallerLink:
        """Return a connection with the first of the hosts that answers."""
        for host in hosts[:-1]:
            with suppress(OSError):
                return await self._connect_to(host, port, make, server_name)
        return await self._connect_to(hosts[-1], port, make, server_name)

    async def _connect_to(
        self, host: str, port: int, make: Callable[[], CallerLink], server_name: str | None
    ) -> CallerLink:
        _, link = await asyncio.get_running_loop().create_connection(
            make,
            host,
            port,
            ssl=self._tls,
            server_hostname=server_name,
            ssl_handshake_timeout=None if self._tls is None else NO_LIMIT,
        )
        return link

    async def _wait_for_busy(
        self, hosts: list[str], port: int, key: ProbeKey, deadline: asyncio.Timeout, limit: float
    ) -> None:
        """Put the deadline off as long as a thread of the worker says that its event loop is busy."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(self._config.heartbeat, limit / ASKED))
            for host in hosts:
                if await probe(host, port, key):
                    # It may have expired in this very moment.
                    with suppress(RuntimeError):
                        deadline.reschedule(loop.time() + limit)

    async def aclose(self) -> None:
        """End all calls and close all connections."""
        self._closed = True
        await self._tasks.aclose()
        links = list(self._links.values())
        self._links.clear()
        for link in links:
            link.close(Disconnected("the calling process is stopping"))
        for link in links:
            await link.gone.wait()
