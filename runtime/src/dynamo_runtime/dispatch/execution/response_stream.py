"""`ResponseStream`: one per client request, from acceptance to close, whatever becomes of its attempts.

Transports push into the current `Attempt`; the reader takes everything that waits, merged. What arrives through an
attempt that is no longer the current one is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dynamo_core.contracts.transports.call import Source
from dynamo_core.errors import BackendError, Cancelled, DynamoError, StreamIncomplete
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.output import FinishReason

from dynamo_runtime.dispatch.load.tracker import Reservation
from dynamo_runtime.dispatch.timeouts import StallTimeout, StallTimer
from dynamo_runtime.dispatch.unread_answers import ReaderTimer, UnreadAnswer, UnreadAnswers
from dynamo_runtime.telemetry.route_span import RouteSpan

log = logging.getLogger(__name__)

#: Items that may wait for the reader before they are gathered or the source is asked to pause, and the level at which
#: it may go on.
HIGH_WATER = 256
LOW_WATER = 64

Merge = Callable[[Sequence[Any]], list[Any]]


class FlushQueue:
    """Collects callbacks and runs them together in the next loop turn.

    Sixty-four streams that got a token in the same read cost one scheduled call, not sixty-four.
    """

    __slots__ = ("_dirty",)

    def __init__(self) -> None:
        self._dirty: list[Callable[[], None]] = []

    def add(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the next loop turn. The caller makes sure that it is added once per turn."""
        if not self._dirty:
            asyncio.get_running_loop().call_soon(self._flush)
        self._dirty.append(callback)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        for callback in dirty:
            try:
                callback()
            except Exception:
                log.exception("a stream's reader failed")


class StreamOwner(Protocol):
    """The owner of a stream that outlives its attempts: a `RequestExecution`."""

    def first_item(self) -> None:
        """Record that the current attempt has delivered its first item."""

    def attempt_failed(self, error: DynamoError) -> DynamoError | None:
        """Handle the failure of the current attempt.

        None if the stream is to stay open; else the error it ends with.
        """

    def stream_ended(self, error: DynamoError | None) -> None:
        """Record that nothing more will come. Called once, also while a slow reader still takes the rest."""

    async def settle(self) -> None:
        """Cancel what is under way for the stream, and return when it has ended."""

    def stream_closed(self) -> None:
        """Record that the reader has closed the stream. Called once."""


class Attempt:
    """One call at one worker: the sink of the transport, with the rule of ``complete_final``.

    Holds a place on the load tracker, and a span, until it ends. That is when the stream ends, or sooner if the worker
    refuses or fails.
    """

    __slots__ = ("_reservation", "_span", "_stream", "started")

    def __init__(self, stream: ResponseStream, reservation: Reservation | None, span: RouteSpan | None) -> None:
        self._stream = stream
        self._reservation = reservation
        self._span = span
        #: Whether an item has come.
        self.started = False

    @property
    def placed(self) -> bool:
        """Whether it holds its place."""
        return self._reservation is not None

    @property
    def contended(self) -> bool:
        """Whether others wait for a first item of the worker that it has its place at."""
        return self._reservation is not None and self._reservation.contended

    def data(self, item: Any) -> None:
        # Runs for every token: in one piece, without calls that would find nothing to do.
        stream = self._stream
        if stream._sink is not self:
            return
        items = stream._items
        items.append(item)
        if not self.started:
            self._start()
        waiting = len(items)
        if waiting > HIGH_WATER and not stream.source_paused:
            stream._balance()
        if stream._callback is None or (waiting >= stream._coalesce and not stream._queued):
            stream._wake()

    def event(self, item: Annotated[Any]) -> None:
        if self._stream._sink is self:
            self._stream._take_event(item)

    def closed(self, error: DynamoError | None) -> None:
        if self._stream._sink is self:
            self._stream._attempt_lost(error or StreamIncomplete("the stream ended before it was complete"))

    def end(self, error: DynamoError | None) -> None:
        """Release what it holds. `error` says why it has failed, if it has. Safe twice."""
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.release()
        span, self._span = self._span, None
        if span is not None:
            span.end(error)

    def _start(self) -> None:
        self.started = True
        if self._reservation is not None:
            self._reservation.first_item()
        self._stream._begin()


class RecordedAttempt(Attempt):
    """An attempt whose span is recorded: an answer that the engine ends with an error is no success."""

    __slots__ = ("_engine_error",)

    def __init__(self, stream: ResponseStream, reservation: Reservation | None, span: RouteSpan) -> None:
        super().__init__(stream, reservation, span)
        self._engine_error: DynamoError | None = None

    def data(self, item: Any) -> None:
        if getattr(item, "finish_reason", None) is FinishReason.ERROR:
            self._engine_error = BackendError.Unknown(item.error_message or "the engine gave no reason")
        super().data(item)

    def end(self, error: DynamoError | None) -> None:
        super().end(error or self._engine_error)


class ResponseStream:
    """The items of one answer. Has one reader, which iterates, or sets `on_ready` and uses `take`.

    It ends well only after the flag that completes the stream. What its attempt holds is returned as soon as it has
    ended or is closed, even while a slow reader still takes the rest. `observe` is given every batch that the reader
    takes. An `owner` may keep it open when an attempt fails. With `unread`, what a slow reader has not taken is
    gathered there, on account of `tenant`; without it, the source is asked to pause.
    """

    __slots__ = (
        "_arrived",
        "_attempt",
        "_callback",
        "_close_done",
        "_coalesce",
        "_flush",
        "_gathered",
        "_items",
        "_merge",
        "_merged",
        "_observe",
        "_owner",
        "_queued",
        "_reader_paused",
        "_reader_timer",
        "_sink",
        "_source",
        "_stall_timer",
        "_tenant",
        "_unread",
        "_waiter",
        "begun",
        "ended",
        "error",
        "instance_id",
        "prefill_instance_id",
        "source_paused",
        "taken",
    )

    def __init__(
        self,
        merge: Merge | None,
        flush: FlushQueue,
        *,
        owner: StreamOwner | None = None,
        observe: Callable[[Sequence[Any]], None] | None = None,
        stall: StallTimeout | None = None,
        unread: UnreadAnswers | None = None,
        tenant: str = "",
    ) -> None:
        self._merge = merge
        self._unread = unread
        self._tenant = tenant
        #: What came before `_items`, if the reader did not keep up.
        self._gathered: UnreadAnswer | None = None
        self._reader_timer = None if unread is None else ReaderTimer(unread, self)
        #: Whether the reader has looked for more since the timer looked.
        self.taken = False
        self._flush = flush
        self._owner = owner
        self._observe = observe
        self._items: deque[Any] = deque()
        self._merged: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._callback: Callable[[], None] | None = None
        self._coalesce = 1
        self._queued = False
        #: The attempt that holds a place, and the one whose items count: None once it has ended.
        self._attempt: Attempt | None = None
        self._sink: Attempt | None = None
        self._source: Source | None = None
        self._reader_paused = False
        self._close_done: asyncio.Future[None] | None = None
        #: Items that were taken and events that came, over all attempts.
        self._arrived = 0
        self._stall_timer = None if stall is None else StallTimer(stall, self)
        #: Whether any attempt has delivered data.
        self.begun = False
        #: Whether nothing more will come, though what waits can still be taken; and why, if it ended badly.
        self.ended = False
        self.error: DynamoError | None = None
        #: Whether the worker was asked to send no more for now, since the reader cannot keep up.
        self.source_paused = False
        #: The worker that serves the current attempt, and the one that computed its prompt, if that was another one.
        self.instance_id: int | None = None
        self.prefill_instance_id: int | None = None

    # For the execution.

    def begin(self, reservation: Reservation | None = None, span: RouteSpan | None = None) -> Attempt:
        """Return a new attempt, which holds what is given.

        Whatever an earlier one still delivers is dropped from now on.
        """
        self._source = None
        self.source_paused = False
        attempt = Attempt(self, reservation, None) if span is None else RecordedAttempt(self, reservation, span)
        self._attempt = self._sink = attempt
        if self.ended:
            self._sink = None
            attempt.end(self.error)
        return attempt

    def attach(self, source: Source, instance_id: int) -> None:
        """Attach the call of a worker that accepted the attempt; `source` controls it."""
        self._source = source
        self.instance_id = instance_id
        if self._stall_timer is not None and not self.ended:
            self._stall_timer.start()
        self._balance()

    def replace_source(self, source: Source, prefill_instance_id: int) -> None:
        """Attach a source made around the one before, which covers the call of the prefill worker as well."""
        self._source = source
        self.prefill_instance_id = prefill_instance_id

    def detach_source(self) -> Source | None:
        """Return the source of an attempt that has failed; the caller closes it."""
        source, self._source = self._source, None
        self.source_paused = False
        self.prefill_instance_id = None
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        return source

    def answered_by(self, instance_id: int) -> None:
        """Take the whole answer of a prefill worker, which was called over a stream of its own."""
        self.instance_id = self.prefill_instance_id = instance_id

    def release_attempt(self, error: DynamoError) -> None:
        """Release what the current attempt holds: its worker has not accepted it, or has failed."""
        if self._attempt is not None:
            self._attempt.end(error)

    def fail_attempt(self, error: DynamoError) -> None:
        """Fail the current attempt, although its own call reports nothing."""
        if self._cut_off():
            self._attempt_lost(error)

    def fail(self, error: DynamoError) -> None:
        """End the stream badly, unless it has ended."""
        if self._cut_off():
            self._end(error)

    @property
    def contended(self) -> bool:
        """Whether others wait for the worker that serves the current attempt."""
        return self._attempt is not None and self._attempt.contended

    def give_up(self, error: DynamoError) -> None:
        """End the stream badly, even if it is whole, and drop what waits for its reader, who does not read."""
        if self._close_done is not None:
            return
        self._drop()
        if self.ended:
            self.error = error
        self.fail(error)

    def _cut_off(self) -> bool:
        """Stop the source and hear nothing more of it; False if the stream has ended."""
        if self.ended:
            return False
        self._sink = None
        if self._source is not None:
            self._source.stop()
        return True

    @property
    def placed(self) -> bool:
        """Whether a worker has the call, or is being asked, and nothing has ended it."""
        return self._attempt is not None and self._attempt.placed

    @property
    def started(self) -> bool:
        """Whether the current attempt has delivered data."""
        return self._attempt is not None and self._attempt.started

    @property
    def arrived(self) -> int:
        """The number of items and events so far, taken or not."""
        return self._arrived + self.waiting

    def unread_items(self) -> Sequence[Any]:
        """Return the items that have arrived and not been taken, as they came."""
        return (*self._gathered.items(), *self._items) if self._gathered is not None else tuple(self._items)

    # For the reader.

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> Any:
        merged = self._merged
        while not merged:
            merged.extend(self.take())
            if merged:
                break
            if self.ended:
                if self.error is not None:
                    raise self.error
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return merged.popleft()

    def take(self) -> Sequence[Any]:
        """Return what waits, merged, without waiting; empty if nothing does.

        A reader that has not kept up gets a part at once, and is called again for the next.
        """
        items = self._items
        self.taken = True
        if self._gathered is not None:
            return self._take_gathered(self._gathered)
        if not items:
            return ()
        self._arrived += len(items)
        if len(items) == 1:
            batch = [items.popleft()]
        else:
            batch = list(items)
            items.clear()
            if self._merge is not None:
                batch = self._merge(batch)
        if self.source_paused:
            self._balance()
        if self._observe is not None:
            self._observe(batch)
        return batch

    def on_ready(self, callback: Callable[[], None] | None, *, coalesce: int = 1) -> None:
        """Call `callback` once per loop turn in which something arrived or the stream ended; soon, if so already.

        With `coalesce` a reader in no hurry is called only when so many items wait, or the stream has ended. It must be
        far below `HIGH_WATER`.
        """
        self._callback = callback
        self._coalesce = coalesce
        if callback is not None and (self.waiting or self.ended):
            self._wake()

    @property
    def waiting(self) -> int:
        """The number of items that wait, before merging."""
        return len(self._items) + (0 if self._gathered is None else self._gathered.count)

    def pause(self) -> None:
        """Ask for no more until `resume`: the reader cannot keep up."""
        self._reader_paused = True
        self._balance()

    def resume(self) -> None:
        """Take `pause` back."""
        self._reader_paused = False
        self._balance()

    async def aclose(self) -> None:
        """End the request, wherever it is. When this returns, all it held is released. Safe twice, also at once."""
        if self._close_done is not None:
            await asyncio.shield(self._close_done)
            return
        self._close_done = asyncio.get_running_loop().create_future()
        self._callback = None
        self._sink = None
        try:
            if self._owner is not None:
                await self._owner.settle()
        finally:
            await self._close()

    async def _close(self) -> None:
        source, self._source = self._source, None
        try:
            if source is not None:
                await source.aclose()
        finally:
            self._drop()
            self._merged.clear()
            self._end(Cancelled("the stream was closed"))
            # These know the stream: circles would stay until the next search for them.
            owner, self._owner = self._owner, None
            self._observe = self._attempt = self._stall_timer = self._reader_timer = None
            try:
                if owner is not None:
                    owner.stream_closed()
            finally:
                if self._close_done is not None:
                    self._close_done.set_result(None)

    # For the current attempt.

    def _begin(self) -> None:
        self.begun = True
        if self._owner is not None:
            self._owner.first_item()

    def _take_event(self, item: Annotated[Any]) -> None:
        self._arrived += 1
        if item.is_error():
            self._attempt_lost(item.to_error())
        elif item.is_complete_final():
            self._end(None)

    def _attempt_lost(self, error: DynamoError) -> None:
        self._sink = None
        if self._owner is not None and self._close_done is None:
            final = self._owner.attempt_failed(error)
            if final is None:
                return
            error = final
        self._end(error)

    def _end(self, error: DynamoError | None) -> None:
        if self.ended:
            return
        self.ended = True
        self.error = error
        self._sink = None
        if self._reader_timer is not None:
            self._reader_timer.stop()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        if self._attempt is not None:
            self._attempt.end(error)
        if self._owner is not None:
            self._owner.stream_ended(error)
        self._wake()

    def _wake(self) -> None:
        if self._callback is not None:
            if not self._queued and (len(self._items) >= self._coalesce or self._gathered is not None or self.ended):
                self._queued = True
                self._flush.add(self._fire)
            return
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def _fire(self) -> None:
        self._queued = False
        if self._callback is not None:
            self._callback()

    def _take_gathered(self, gathered: UnreadAnswer) -> Sequence[Any]:
        batch, count = gathered.take()
        self._arrived += count
        if not gathered.count:
            self._gathered = None
        self._balance()
        if self.waiting:
            self._wake()
        if self._observe is not None:
            self._observe(batch)
        return batch

    def _balance(self) -> None:
        if self._unread is not None and self._merge is not None and len(self._items) > HIGH_WATER:
            self._gather(self._unread, self._merge)
        source = self._source
        if source is None or self.ended:
            return
        waiting = len(self._items)
        full = self._gathered is not None and self._gathered.full
        if not self.source_paused and (self._reader_paused or full or waiting > HIGH_WATER):
            self.source_paused = True
            source.pause()
        elif self.source_paused and not self._reader_paused and not full and waiting <= LOW_WATER:
            self.source_paused = False
            source.resume()
        if self._reader_timer is None:
            return
        if self.source_paused or self._gathered is not None:
            self._reader_timer.start()
        else:
            self._reader_timer.stop()

    def _gather(self, unread: UnreadAnswers, merge: Merge) -> None:
        """Put what waits aside, in a form that takes less."""
        gathered = self._gathered
        if gathered is None:
            gathered = self._gathered = UnreadAnswer(unread, self._tenant, self.give_up)
        items, self._items = self._items, deque()
        gathered.add(merge(list(items)), len(items))

    def _drop(self) -> None:
        self._items.clear()
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            gathered.release()
