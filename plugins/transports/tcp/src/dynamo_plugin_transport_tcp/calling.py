"""The calling end: one connection per process called, shared by all calls, and the grip on each of them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from time import monotonic
from typing import Any

import msgspec
from dynamo_core.contracts.call import Endpoint, Sink, Source
from dynamo_core.contracts.context import EngineContext
from dynamo_core.contracts.metrics import CounterLike, GaugeLike
from dynamo_core.contracts.serving import STOP_GRACE
from dynamo_core.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoError,
    EngineShutdown,
    InvalidArgument,
    StreamIncomplete,
    from_wire,
)
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_core.tasks import TaskSet
from dynamo_core.wire.liveness import ASKED, Liveness, patience

from dynamo_plugin_transport_tcp.address import Address
from dynamo_plugin_transport_tcp.config import TcpConfig
from dynamo_plugin_transport_tcp.link import Link
from dynamo_plugin_transport_tcp.messages import (
    ACCEPTED_PROTOS,
    MAGIC,
    UNREADABLE,
    Accepted,
    Challenge,
    Ended,
    Events,
    Hello,
    Open,
    Pause,
    Proof,
    Ready,
    Refused,
    Resume,
    Rows,
    Stop,
    Subscribe,
    Taken,
    Unsubscribe,
    Unsubscribed,
    caller_decoder,
    encode,
    item_decoder,
    proto_mismatch,
)
from dynamo_plugin_transport_tcp.networks import AllowedNetworks
from dynamo_plugin_transport_tcp.probes import ProbeKey, probe
from dynamo_plugin_transport_tcp.security import CALLER, CHALLENGE_BYTES, LISTENER, proof, proven

log = logging.getLogger(__name__)

#: Seconds that closing a call waits for the handler to end: a little more than the handler is given.
CLOSE_BOUND = STOP_GRACE + 1.0

#: Seconds that the TLS part of a handshake may take: another deadline ends it sooner.
NO_LIMIT = 3600.0

#: Seconds from the arrival of rows to the end of their readers' turn, from which on the process counts as busy.
BUSY = 0.0004
#: Seconds that a busy process rests from rows at most before it asks for more; the first of a stream never wait.
LONGEST_REST = 0.004


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
        self._calls: dict[int, TcpCall] = {}
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
        self.abandons = False
        self.liveness = Liveness(config.heartbeat, config.callers_silence, self._loop.time())
        #: Whether only events are at stake, so that the worker is asked less often.
        self._slow = False
        #: Frames of rows of which the other end has not been told yet that they were taken.
        self._taken = 0
        self._began_taking = 0.0
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
        self.introduced(checksums=given.checksums)
        self.send(Proof(proof(secret, CALLER, self._address.nonce, *challenges), self.transcript))
        self.checking()

    def _on_ready(self, given: Ready) -> None:
        if self._expected and not proven(self._expected, given.proof):
            raise CannotConnect(f"{self.peer} did not prove that it knows the secret")
        self.agree(given.transcript)
        self.shaken()
        self.handlers = {
            Rows: self._on_rows,
            Accepted: self._on_accepted,
            Refused: self._on_refused,
            Ended: self._on_ended,
            Events: self._on_events,
            Unsubscribed: self._on_unsubscribed,
        }
        if not self.ready.done():
            self.ready.set_result(None)

    # Calls.

    async def call(self, instance_id: int, endpoint: Endpoint, request: Any, ctx: EngineContext, sink: Sink) -> TcpCall:
        """Opens a stream and returns once the handler has accepted.

        Raises:
            InvalidArgument: the request cannot travel.
            ConnectionTimeout: it was not accepted in time.
            DynamoError: the refusal, or the loss of the connection.
        """
        sid = self._last = self._last + 1
        try:
            body = encode(
                Open(
                    sid,
                    instance_id,
                    endpoint.name,
                    ctx.id,
                    ctx.attempt_id,
                    ctx.metadata,
                    msgspec.Raw(encode(request)),
                    ctx.gather,
                )
            )
        except Exception as error:  # whatever a caller put into a request that cannot travel
            raise InvalidArgument(f"the request for {endpoint.name!r} cannot be sent: {error}", cause=error) from error
        if len(body) > self.peer_limit:
            raise InvalidArgument(f"the request has {len(body)} bytes, more than the {self.peer_limit} of a frame")
        call = TcpCall(self, sid, endpoint)
        # A bare timer: `asyncio.timeout` would be four hundredths of a short request.
        call.timer = self._loop.call_later(self.config.accept_timeout, self._too_late, call)
        try:
            if not self.writable.is_set():
                await self._until_writable()
            if self.closing:
                raise CannotConnect(f"the connection with {self.peer} is closed")
            self._calls[sid] = call
            if self._slow:
                self._hurry()
            self.send_body(body)
            call.watch(ctx)
            verdict = await call.verdict
        except BaseException:
            call.abandon()
            raise
        finally:
            call.timer.cancel()
        if verdict is not None:
            call.abandon()
            raise verdict
        call.deliver_to(sink)
        return call

    async def _until_writable(self) -> None:
        try:
            async with asyncio.timeout(self.config.accept_timeout):
                await self.writable.wait()
        except TimeoutError as error:
            raise self._late(error) from error

    def _too_late(self, call: TcpCall) -> None:
        if self.liveness.busy:
            # The worker's engine holds its event loop, which will get to the call: that is not for a wire to judge.
            call.timer = self._loop.call_later(self.config.accept_timeout, self._too_late, call)
        elif not call.verdict.done():
            call.verdict.set_result(self._late())

    def _late(self, cause: BaseException | None = None) -> ConnectionTimeout:
        return ConnectionTimeout(
            f"{self.peer} did not accept the call within {self.config.accept_timeout} s", cause=cause
        )

    def forget(self, sid: int) -> bool:
        """Rows of this stream are dropped from now on; whether there still was one."""
        return self._calls.pop(sid, None) is not None

    def _on_accepted(self, accepted: Accepted) -> None:
        call = self._calls.get(accepted.sid)
        if call is not None:
            call.accepted()

    def _on_refused(self, refused: Refused) -> None:
        call = self._calls.pop(refused.sid, None)
        if call is not None:
            call.over(from_wire(refused.error))

    def _on_ended(self, ended: Ended) -> None:
        call = self._calls.pop(ended.sid, None)
        if call is not None:
            call.over(None if ended.error is None else from_wire(ended.error))

    def _on_rows(self, message: Rows) -> None:
        calls = self._calls
        for row in message.rows:
            call = calls.get(row.sid)
            if call is None:
                # Closed here while rows were under way.
                continue
            if row.number != call.expected:
                lost = f"row {row.number} of the stream came where row {call.expected} was due"
                self._break(call, StreamIncomplete(lost))
                continue
            call.expected += 1
            try:
                what = row.what
                if what is None:
                    call.data(call.decode(row.item))
                elif not isinstance(what, list):
                    call.event(what)
                elif call.compact:
                    call.data(LLMEngineOutput(what))
                else:
                    self._break(call, StreamIncomplete("token ids came in a stream of other items"))
            except UNREADABLE as error:
                self._break(call, StreamIncomplete(f"an item of the stream cannot be understood: {error}"))
            except Exception as error:
                log.exception("what was received could not be delivered")
                self._break(call, StreamIncomplete("an item could not be delivered", cause=error))
        if message.ask:
            if not self._taken:
                # After the readers' turn, which the rows have asked for: so the next rows find them free.
                self._began_taking = monotonic()
                self._loop.call_soon(self._rest)
            self._taken += 1

    def _rest(self) -> None:
        """Asks for more rows: at once if these took little time, else only when there was as much time for the rest.

        A process that is busy with rows gets fewer and larger ones.
        """
        took = monotonic() - self._began_taking
        if took < BUSY:
            self._tell_taken()
        else:
            self._loop.call_later(min(took, LONGEST_REST), self._tell_taken)

    def _tell_taken(self) -> None:
        taken, self._taken = self._taken, 0
        self.send(Taken(taken))

    def _break(self, call: TcpCall, error: DynamoError) -> None:
        call.abandon()
        call.over(error)

    # Events.

    def subscribe(self, subject: str, source: int, put: Callable[[int, bytes], None]) -> Subscription:
        """Asks for the events of one publisher.

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
        """Drops the events of a subscription from now on."""
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

    def judge(self) -> bool:
        config, liveness = self.config, self.liveness
        self._slow = not self._calls and bool(self._subscriptions)
        if self._slow:
            liveness.heartbeat, liveness.silence = config.callers_heartbeat, config.callers_silence
        else:
            liveness.heartbeat = config.heartbeat
            liveness.silence = patience(config.silence, self.lease_ttl, probes=self._probes)
        return bool(self._calls or self._subscriptions)

    def _hurry(self) -> None:
        """A call was opened while the worker was asked less often."""
        self.judge()
        self.liveness.begin(self._loop.time())
        self._set_ticker()

    def ticked(self, now: float) -> None:
        if self._calls or self._subscriptions:
            self._idle_since = now
        elif now - self._idle_since >= self.config.idle_timeout:
            self.close(Disconnected("the connection was idle"))

    def probe(self) -> None:
        if self._probes and self._probing is None and self._calls:
            self._probing = self._tasks.spawn(self._probe(), name=f"probe-{self.peer}")

    async def _probe(self) -> None:
        try:
            busy = await probe(*self._there, self.probe_key)
        finally:
            self._probing = None
        if busy and not self.closing and self.liveness.told_busy(self._loop.time()):
            log.warning(
                "the event loop of %s is busy, for %.1f s so far: %d calls wait", self.peer, busy, len(self._calls)
            )

    def over(self, error: DynamoError) -> None:
        # One of which TLS never became a connection was not counted.
        if self._counted:
            self._connections.dec()
        if not self.ready.done():
            self.ready.set_result(error)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.over(error)
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
        """Wants no more of them. Safe twice."""
        self._link.unsubscribe(self._sid)


class TcpCall(Source):
    """One call. Until the caller has its grip on it, what arrives is held back."""

    __slots__ = (
        "_context",
        "_error",
        "_forget_ctx",
        "_held",
        "_link",
        "_over",
        "_paused",
        "_sid",
        "_sink",
        "compact",
        "data",
        "decode",
        "event",
        "expected",
        "timer",
        "verdict",
    )

    def __init__(self, link: CallerLink, sid: int, endpoint: Endpoint) -> None:
        self._link = link
        self._sid = sid
        self._sink: Sink | None = None
        #: What is told of this call alone is told in its own context, so that log lines carry its ids.
        self._context = copy_context()
        self._held: list[tuple[bool, Any]] = []
        self._over = asyncio.Event()
        self._paused = False
        self._error: DynamoError | None = None
        self._forget_ctx: Callable[[], None] = _nothing
        #: When it is too late to be accepted.
        self.timer: asyncio.TimerHandle
        self.compact = endpoint.item_type is LLMEngineOutput
        self.decode = item_decoder(endpoint).decode
        #: The number of the next row; none may come before the call was accepted.
        self.expected = -1
        #: None once accepted, else why not.
        self.verdict: asyncio.Future[DynamoError | None] = asyncio.get_running_loop().create_future()
        self.data: Callable[[Any], None] = self._hold_data
        self.event: Callable[[Annotated[Any]], None] = self._hold_event

    # The link's side.

    def watch(self, ctx: EngineContext) -> None:
        """Stopping the context stops the call."""
        self._forget_ctx = ctx.on_stop(lambda: self._stop(kill=ctx.is_killed()))

    def accepted(self) -> None:
        """The handler took the call."""
        if not self.verdict.done():
            self.expected = 0
            self.verdict.set_result(None)

    def deliver_to(self, sink: Sink) -> None:
        """Gives `sink` what was held back, and everything that follows."""
        self._sink = sink
        self.data, self.event = sink.data, self._event
        held, self._held = self._held, []
        for is_event, item in held:
            if is_event:
                sink.event(item)
            else:
                sink.data(item)
        if self._over.is_set():
            self._tell()

    def over(self, error: DynamoError | None) -> None:
        """Nothing more will come."""
        if self._over.is_set():
            return
        self._forget_ctx()
        if not self.verdict.done():
            self.verdict.set_result(error or EngineShutdown("the call ended before it was accepted"))
        self._error = error
        self._over.set()
        self._tell()

    def _tell(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            self.data = self.event = _drop
            self._context.copy().run(sink.closed, self._error)

    def _event(self, item: Annotated[Any]) -> None:
        if self._sink is not None:
            # A copy, since one that is entered cannot be entered again, and a sink may do anything.
            self._context.copy().run(self._sink.event, item)

    def abandon(self) -> None:
        """Nobody listens any more: tells the other end, if it does not know, and drops what it still sends."""
        self._forget_ctx()
        if self._link.forget(self._sid):
            self._link.send(Stop(self._sid, True))

    def _hold_data(self, item: Any) -> None:
        self._held.append((False, item))

    def _hold_event(self, item: Annotated[Any]) -> None:
        self._held.append((True, item))

    # The caller's side.

    def stop(self) -> None:
        self._stop(kill=False)

    def pause(self) -> None:
        if not self._paused and not self._over.is_set():
            self._paused = True
            self._link.send(Pause(self._sid))

    def resume(self) -> None:
        if self._paused and not self._over.is_set():
            self._link.send(Resume(self._sid))
        self._paused = False

    async def aclose(self) -> None:
        sink, self._sink = self._sink, None
        self.data = self.event = _drop
        try:
            if not self._over.is_set():
                self.stop()
                async with asyncio.timeout(CLOSE_BOUND):
                    await self._over.wait()
        except TimeoutError:
            if not self._link.abandons:
                self._link.abandons = True
                log.warning("calls of %s do not end within %s s and are abandoned", self._link.peer, CLOSE_BOUND)
        finally:
            self.abandon()
            self.over(None)
            if sink is not None:
                sink.closed(None)

    def _stop(self, *, kill: bool) -> None:
        if not self._over.is_set():
            # The other end takes the wish to stop as the end of any pause.
            self._paused = False
            self._link.send(Stop(self._sid, kill))


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
        """The connection with the process at an address of a record. Callers that come together share one attempt.

        `lease_ttl` is the life of the worker's lease in seconds, None if the record does not say.

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
            limit = min(limit, patience(self._config.silence, lease_ttl, probes=True))
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
        """`limit` is the seconds that it may take, but for those in which the worker's event loop is busy."""
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
        """A connection with the first of the hosts that answers."""
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
        """Puts the deadline off as long as a thread of the worker says that its event loop is busy."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(self._config.heartbeat, limit / ASKED))
            for host in hosts:
                if await probe(host, port, key):
                    # It may have expired in this very moment.
                    with suppress(RuntimeError):
                        deadline.reschedule(loop.time() + limit)

    async def aclose(self) -> None:
        """Ends all calls and closes all connections."""
        self._closed = True
        await self._tasks.aclose()
        links = list(self._links.values())
        self._links.clear()
        for link in links:
            link.close(Disconnected("the calling process is stopping"))
        for link in links:
            await link.gone.wait()


def _drop(_: Any) -> None:
    return None


def _nothing() -> None:
    return None
