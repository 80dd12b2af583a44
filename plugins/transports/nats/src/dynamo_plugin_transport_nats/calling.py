"""The calling end: one link per worker called, shared by all calls, and the grip on each of them."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from dynamo_core.contracts.call import Endpoint, Sink, Source
from dynamo_core.contracts.context import EngineContext
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
from dynamo_core.protocol.records import Instance
from nats.aio.msg import Msg

from dynamo_plugin_transport_nats.broker import Broker, Subscription
from dynamo_plugin_transport_nats.config import NatsConfig
from dynamo_plugin_transport_nats.link import Link, nobody_there
from dynamo_plugin_transport_nats.messages import (
    ACCEPTED_PROTOS,
    PIECE_OVERHEAD,
    UNKNOWN_LINK,
    UNKNOWN_PIECE,
    UNREADABLE,
    Accepted,
    Ended,
    Hello,
    LinkError,
    Open,
    Pause,
    Refused,
    Resume,
    Rows,
    Stop,
    Taken,
    Welcome,
    caller_decoder,
    encode,
    item_decoder,
    proto_mismatch,
    read_piece,
)
from dynamo_plugin_transport_nats.subjects import NONCE_BYTES, Subjects

log = logging.getLogger(__name__)

#: Seconds that closing a call waits for the handler to end: a little more than the handler is given.
CLOSE_BOUND = STOP_GRACE + 1.0

#: Seconds between two attempts to reach a worker that may still be on its way back to the servers, varied by half.
SETTLE_PAUSE = 0.1


class CallerLink(Link):
    """The calling end of one link."""

    def __init__(self, peers: Peers, address: str, name: str) -> None:
        here = peers.subjects.caller(name)
        super().__init__(peers.broker, peers.config, f"{address}.{name}", here, caller_decoder)
        self.name = name
        self.peer_address = address
        #: Whether the worker does not know this link, so that a new one may do.
        self.forgotten = False
        self._peers = peers
        self._calls: dict[int, NatsCall] = {}
        self._last = 0
        #: Portions of rows of which the other end has not been told yet that they were taken.
        self._taken = 0
        self.handlers = {Welcome: self._on_welcome}
        self.send(Hello(ACCEPTED_PROTOS[0], self.config.max_message))

    @property
    def used(self) -> bool:
        return bool(self._calls)

    def unused(self, seconds: float) -> None:
        if seconds >= self.config.idle_timeout:
            self.close(Disconnected("the link was idle"))

    def unknown(self) -> None:
        self.forgotten = True
        self.finish(CannotConnect(f"{self.peer_address} has forgotten this process"))

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.proto not in ACCEPTED_PROTOS:
            raise CannotConnect(proto_mismatch(welcome.proto))
        self.peer_limit = min(welcome.max_message, self.config.max_message)
        self.handlers = {
            Rows: self._on_rows,
            Accepted: self._on_accepted,
            Refused: self._on_refused,
            Ended: self._on_ended,
        }

    # Calls.

    async def call(
        self, instance_id: int, endpoint: Endpoint, request: Any, ctx: EngineContext, sink: Sink
    ) -> NatsCall:
        """Opens a stream and returns once the handler has accepted.

        Raises:
            InvalidArgument: the request cannot travel.
            ConnectionTimeout: it was not accepted in time.
            DynamoError: the refusal, or the loss of the link.
        """
        sid = self._last = self._last + 1
        try:
            message = encode(
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
        limit = self.peer_limit - PIECE_OVERHEAD
        if len(message) > limit:
            raise InvalidArgument(f"the request has {len(message)} bytes, more than the {limit} that may be sent")
        call = NatsCall(self, sid, endpoint)
        # A bare timer: `asyncio.timeout` would be a part of a short request that can be measured.
        timer = asyncio.get_running_loop().call_later(self.config.accept_timeout, self._too_late, call)
        try:
            if self.broker.blocked:
                await self._until_writable()
            if self.closed:
                raise CannotConnect(f"the link with {self.peer_address} is over")
            self._calls[sid] = call
            self.ask(message)
            call.watch(ctx)
            verdict = await call.verdict
        except BaseException:
            call.abandon()
            raise
        finally:
            timer.cancel()
        if verdict is not None:
            call.abandon()
            raise verdict
        call.deliver_to(sink)
        return call

    async def _until_writable(self) -> None:
        try:
            async with asyncio.timeout(self.config.accept_timeout):
                await self.broker.writable.wait()
        except TimeoutError as error:
            raise self._late(error) from error

    def _too_late(self, call: NatsCall) -> None:
        if not call.verdict.done():
            call.verdict.set_result(self._late())

    def _late(self, cause: BaseException | None = None) -> ConnectionTimeout:
        return ConnectionTimeout(
            f"{self.peer_address} did not accept the call within {self.config.accept_timeout} s", cause=cause
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
                self._loop.call_soon(self._tell_taken)
            self._taken += 1

    def _tell_taken(self) -> None:
        taken, self._taken = self._taken, 0
        self.send(Taken(taken))

    def _break(self, call: NatsCall, error: DynamoError) -> None:
        call.abandon()
        call.over(error)

    def over(self, error: DynamoError) -> None:
        self._peers.forget(self)
        calls, self._calls = self._calls, {}
        lost = Disconnected(error.message, cause=error) if isinstance(error, CannotConnect) else error
        for call in calls.values():
            # Nothing was begun by a call that was not accepted, if the worker has not even got it.
            call.over(lost if call.begun else error)


class NatsCall(Source):
    """One call. Until the caller has its grip on it, what arrives is held back."""

    __slots__ = (
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
        "verdict",
    )

    def __init__(self, link: CallerLink, sid: int, endpoint: Endpoint) -> None:
        self._link = link
        self._sid = sid
        self._sink: Sink | None = None
        self._held: list[tuple[bool, Any]] = []
        self._over = asyncio.Event()
        self._paused = False
        self._error: DynamoError | None = None
        self._forget_ctx: Callable[[], None] = _nothing
        self.compact = endpoint.item_type is LLMEngineOutput
        self.decode = item_decoder(endpoint).decode
        #: The number of the next row; none may come before the call was accepted.
        self.expected = -1
        #: None once accepted, else why not.
        self.verdict: asyncio.Future[DynamoError | None] = asyncio.get_running_loop().create_future()
        self.data: Callable[[Any], None] = self._hold_data
        self.event: Callable[[Annotated[Any]], None] = self._hold_event

    # The link's side.

    @property
    def begun(self) -> bool:
        """Whether the worker has accepted it."""
        return self.expected >= 0

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
        self.data, self.event = sink.data, sink.event
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
            sink.closed(self._error)

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
            log.warning("a call of %s did not end within %s s and is abandoned", self._link.peer_address, CLOSE_BOUND)
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
    """The links of this process, one per worker, made when first needed. Workers answer on one subject for all."""

    def __init__(self, config: NatsConfig, broker: Broker, subjects: Subjects) -> None:
        self.config = config
        self.broker = broker
        self.subjects = subjects
        self._nonce = secrets.token_hex(NONCE_BYTES)
        self._links: dict[str, CallerLink] = {}
        self._by_name: dict[str, CallerLink] = {}
        self._count = 0
        self._subscription: Subscription | None = None
        self._closed = False

    async def start(self) -> None:
        """Listens for answers."""
        self._subscription = await self.broker.subscribe(self.subjects.caller(f"{self._nonce}.*"), self._receive)

    async def call(
        self, address: str, instance: Instance, endpoint: Endpoint, request: Any, ctx: EngineContext, sink: Sink
    ) -> Source:
        """Calls a worker at an address of its record; see `dynamo_core.contracts.transport.Transport.call`.

        Raises:
            Unavailable: the servers are gone, and did not come back in time.
            CannotConnect: the address is none, or nobody listens there.
        """
        if not self.subjects.is_worker(address):
            raise CannotConnect(f"{address[:100]!r} is not an address of this system: `prefix` differs?")
        renewed = False
        while True:
            await self.broker.ready()
            link = self._get(address)
            try:
                return await link.call(instance.instance_id, endpoint, request, ctx, sink)
            except CannotConnect:
                if link.forgotten and not renewed:
                    # It had lost its connection, or given us up. It has not got the call.
                    renewed = True
                elif link.closed and self.broker.settling and not self._closed:
                    # The servers were gone for all, and this worker may only be a little later than we are.
                    await asyncio.sleep(SETTLE_PAUSE * random.uniform(0.5, 1.5))  # noqa: S311 - not a secret
                else:
                    raise

    def _get(self, address: str) -> CallerLink:
        if self._closed:
            raise CannotConnect("the transport is closed")
        link = self._links.get(address)
        if link is None:
            self._count += 1
            link = CallerLink(self, address, f"{self._nonce}.{self._count}")
            self._links[address] = self._by_name[link.name] = link
        return link

    def forget(self, link: CallerLink) -> None:
        """A link is over."""
        if self._links.get(link.peer_address) is link:
            del self._links[link.peer_address]
        self._by_name.pop(link.name, None)

    def _receive(self, message: Msg) -> None:
        name = self.subjects.link(message.subject)
        link = None if name is None else self._by_name.get(name)
        if link is not None:
            link.receive(message)
        elif name is not None and not nobody_there(message):
            self._unknown(name, message)

    def _unknown(self, name: str, message: Msg) -> None:
        """A worker asks about a link that is over here: it is told so."""
        address, _, _ = message.reply.rpartition(f".{name}")
        try:
            known = read_piece(message.data).number != UNKNOWN_LINK
        except LinkError:
            return
        if known and self.subjects.is_worker(address):
            self.broker.publish(message.reply, UNKNOWN_PIECE)

    def lost(self, error: DynamoError) -> None:
        """The connection with the servers has broken, and with it all links."""
        for link in list(self._links.values()):
            link.finish(error)

    def close(self) -> None:
        """Ends all calls, and tells the workers."""
        self._closed = True
        for link in list(self._links.values()):
            link.close(Disconnected("the calling process is stopping"))
        if self._subscription is not None:
            self.broker.unsubscribe(self._subscription)


def _drop(_: Any) -> None:
    return None


def _nothing() -> None:
    return None
