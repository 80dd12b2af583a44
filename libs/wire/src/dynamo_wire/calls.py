"""The calling end of a link's calls: opens them, delivers what arrives, and stops them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import copy_context
from time import monotonic
from typing import Any, Protocol

import msgspec
from dynamo_core import STOP_GRACE, DynamoError, Endpoint, EngineContext, LLMEngineOutput, Sink, Source
from dynamo_core.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    EngineShutdown,
    InvalidArgument,
    StreamIncomplete,
    from_wire,
)
from dynamo_core.protocol import Annotated

from dynamo_wire.messages import (
    UNREADABLE,
    Accepted,
    Ack,
    Ended,
    Open,
    Pause,
    Refused,
    Resume,
    Rows,
    Stop,
    encode,
    item_decoder,
)

log = logging.getLogger(__name__)

#: Seconds that closing a call waits for its handler to end: a little more than the handler has.
CLOSE_BOUND = STOP_GRACE + 1.0

#: A process is busy if reading a frame of rows takes this many seconds.
BUSY = 0.0004
#: The most seconds by which a busy process delays its `Ack`.
MAX_REST = 0.004


class CallingLink(Protocol):
    """The link as the calls need it."""

    #: The other end, for error messages.
    peer: str
    #: Whether the warning about abandoned calls was logged; it is logged once per link.
    warned_of_abandoned: bool

    @property
    def closed(self) -> bool:
        """Whether nothing more will be sent."""

    @property
    def busy(self) -> bool:
        """Whether the worker's event loop does not run now, and its process does."""

    @property
    def blocked(self) -> bool:
        """Whether the write buffer is full, so that calls have to wait."""

    @property
    def writable(self) -> asyncio.Event:
        """Set while it is not blocked."""

    @property
    def limit(self) -> int:
        """The largest message that may be sent, in bytes."""

    def send(self, message: Any) -> None:
        """Send a message at the end of this turn of the loop."""

    def send_call(self, message: bytes) -> None:
        """Send an encoded `Open` at the end of this turn of the loop."""


class Calls:
    """All calls made over one link."""

    def __init__(self, link: CallingLink, accept_timeout: float) -> None:
        self.link = link
        self._accept_timeout = accept_timeout
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, Call] = {}
        self._last = 0
        #: Frames of rows that were read and not acknowledged yet.
        self._unacked = 0
        self._read_since = 0.0

    def __len__(self) -> int:
        return len(self._calls)

    async def open(self, instance_id: int, endpoint: Endpoint, request: Any, ctx: EngineContext, sink: Sink) -> Call:
        """Open a stream and return once the handler has accepted.

        Raises:
            InvalidArgument: the request cannot travel.
            ConnectionTimeout: it was not accepted in time.
            DynamoError: the refusal, or the loss of the link.
        """
        link = self.link
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
                    ctx.coalesce,
                )
            )
        except Exception as error:  # a caller may put anything into a request
            raise InvalidArgument(f"the request for {endpoint.name!r} cannot be sent: {error}", cause=error) from error
        if len(message) > link.limit:
            raise InvalidArgument(f"the request has {len(message)} bytes, more than the {link.limit} that may be sent")
        call = Call(self, sid, endpoint)
        # A bare timer: `asyncio.timeout` costs a measurable part of a short request.
        call.timer = self._loop.call_later(self._accept_timeout, self._too_late, call)
        try:
            if link.blocked:
                await self._until_writable()
            if link.closed:
                raise CannotConnect(f"the link with {link.peer} is over")
            self._calls[sid] = call
            link.send_call(message)
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
            async with asyncio.timeout(self._accept_timeout):
                await self.link.writable.wait()
        except TimeoutError as error:
            raise self._late(error) from error

    def _too_late(self, call: Call) -> None:
        if self.link.busy:
            # An engine blocks the worker's event loop: the call is accepted once the loop runs again.
            call.timer = self._loop.call_later(self._accept_timeout, self._too_late, call)
        elif not call.verdict.done():
            call.verdict.set_result(self._late())

    def _late(self, cause: BaseException | None = None) -> ConnectionTimeout:
        return ConnectionTimeout(
            f"{self.link.peer} did not accept the call within {self._accept_timeout} s", cause=cause
        )

    def forget(self, sid: int) -> bool:
        """Drop the rows of this stream from now on. Return whether the stream was open."""
        return self._calls.pop(sid, None) is not None

    def lost(self, error: DynamoError) -> None:
        """End all calls of the closed link."""
        calls, self._calls = self._calls, {}
        lost = Disconnected(error.message, cause=error) if isinstance(error, CannotConnect) else error
        for call in calls.values():
            # A call that was not accepted has begun nothing, if it never reached the worker.
            call.over(lost if call.begun else error)

    # Messages of the worker.

    def on_accepted(self, accepted: Accepted) -> None:
        """Record that a handler accepted a call."""
        call = self._calls.get(accepted.sid)
        if call is not None:
            call.accepted()

    def on_refused(self, refused: Refused) -> None:
        """Record that a handler refused a call."""
        call = self._calls.pop(refused.sid, None)
        if call is not None:
            call.over(from_wire(refused.error))

    def on_ended(self, ended: Ended) -> None:
        """Record that a handler has ended."""
        call = self._calls.pop(ended.sid, None)
        if call is not None:
            call.over(None if ended.error is None else from_wire(ended.error))

    def on_rows(self, message: Rows) -> None:
        """Receive items of any number of streams."""
        calls = self._calls
        for row in message.rows:
            call = calls.get(row.sid)
            if call is None:
                # Closed here while rows were in flight.
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
            if not self._unacked:
                # After the turn of the readers, so that they are free for the next rows.
                self._read_since = monotonic()
                self._loop.call_soon(self._rest)
            self._unacked += 1

    def _rest(self) -> None:
        """Acknowledge the rows: at once if reading them was quick, else after as much time again.

        So a busy process gets fewer and larger frames.
        """
        took = monotonic() - self._read_since
        if took < BUSY:
            self._send_ack()
        else:
            self._loop.call_later(min(took, MAX_REST), self._send_ack)

    def _send_ack(self) -> None:
        frames, self._unacked = self._unacked, 0
        self.link.send(Ack(frames))

    def _break(self, call: Call, error: DynamoError) -> None:
        call.abandon()
        call.over(error)


class Call(Source):
    """One call. What arrives before the caller has its source is held back."""

    __slots__ = (
        "_context",
        "_error",
        "_forget_ctx",
        "_held",
        "_link",
        "_over",
        "_paused",
        "_siblings",
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

    def __init__(self, siblings: Calls, sid: int, endpoint: Endpoint) -> None:
        self._siblings = siblings
        self._link = siblings.link
        self._sid = sid
        self._sink: Sink | None = None
        #: The sink is called in the context of its call, so that log lines carry the ids of the request.
        self._context = copy_context()
        self._held: list[tuple[bool, Any]] = []
        self._over = asyncio.Event()
        self._paused = False
        self._error: DynamoError | None = None
        self._forget_ctx: Callable[[], None] = _nothing
        #: Fires when the acceptance is late.
        self.timer: asyncio.TimerHandle
        self.compact = endpoint.item_type is LLMEngineOutput
        self.decode = item_decoder(endpoint).decode
        #: The number of the next row; none may come before the call was accepted.
        self.expected = -1
        #: None once accepted, else the refusal.
        self.verdict: asyncio.Future[DynamoError | None] = asyncio.get_running_loop().create_future()
        self.data: Callable[[Any], None] = self._hold_data
        self.event: Callable[[Annotated[Any]], None] = self._hold_event

    # The link's side.

    @property
    def begun(self) -> bool:
        """Whether the worker has accepted it."""
        return self.expected >= 0

    def watch(self, ctx: EngineContext) -> None:
        """Stop the call when the context is stopped."""
        self._forget_ctx = ctx.on_stop(lambda: self._stop(kill=ctx.is_killed()))

    def accepted(self) -> None:
        """Record that the handler accepted the call."""
        if not self.verdict.done():
            self.expected = 0
            self.verdict.set_result(None)

    def deliver_to(self, sink: Sink) -> None:
        """Deliver to `sink` what was held back, and all that follows."""
        self._sink = sink
        self.data, self.event = sink.data, self._event
        held, self._held = self._held, []
        for is_event, item in held:
            if is_event:
                sink.event(item)
            else:
                sink.data(item)
        if self._over.is_set():
            self._deliver_end()

    def over(self, error: DynamoError | None) -> None:
        """Record that nothing more will come."""
        if self._over.is_set():
            return
        self._forget_ctx()
        if not self.verdict.done():
            self.verdict.set_result(error or EngineShutdown("the call ended before it was accepted"))
        self._error = error
        self._over.set()
        self._deliver_end()

    def _deliver_end(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            self.data = self.event = _drop
            self._context.copy().run(sink.closed, self._error)

    def _event(self, item: Annotated[Any]) -> None:
        if self._sink is not None:
            # A copy: a context that is entered cannot be entered again, and a sink may do anything.
            self._context.copy().run(self._sink.event, item)

    def abandon(self) -> None:
        """Give the call up: stop it at the worker, unless it has ended there, and drop what still arrives."""
        self._forget_ctx()
        if self._siblings.forget(self._sid):
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
            if not self._link.warned_of_abandoned:
                self._link.warned_of_abandoned = True
                log.warning("calls of %s do not end within %s s and are abandoned", self._link.peer, CLOSE_BOUND)
        finally:
            self.abandon()
            self.over(None)
            if sink is not None:
                sink.closed(None)

    def _stop(self, *, kill: bool) -> None:
        if not self._over.is_set():
            # The other end takes a stop as the end of any pause.
            self._paused = False
            self._link.send(Stop(self._sid, kill))


def _drop(_: Any) -> None:
    return None


def _nothing() -> None:
    return None
