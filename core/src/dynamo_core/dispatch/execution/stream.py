"""`ResponseStream`: one per client request, from acceptance to close, whatever happens underneath.

Transports push into the *inlet* of the current attempt; the reader takes everything that waits, merged. What arrives
through an inlet that is no longer the current one is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dynamo_core.contracts.call import Sink, Source
from dynamo_core.dispatch.execution.flush import FlushQueue
from dynamo_core.dispatch.execution.stall import StallTimeout
from dynamo_core.errors import Cancelled, DynamoError, StreamIncomplete
from dynamo_core.protocol.annotated import Annotated

#: Items that may wait for the reader before the source is asked to pause, and the level at which it may go on.
HIGH_WATER = 1024
LOW_WATER = 256

Merge = Callable[[Sequence[Any]], list[Any]]
#: Makes of an item that arrives the one that the reader is to see.
Adjust = Callable[[Any], Any]


class Rescue(Protocol):
    """What keeps a stream alive when an attempt has failed."""

    def lost(self, error: DynamoError) -> DynamoError | None:
        """The current attempt has failed. None if the stream is to stay open; else the error it ends with."""

    def give_up(self) -> None:
        """The stream has ended badly for another reason: nobody waits any more."""

    async def aclose(self) -> None:
        """Returns when nothing of the rescue is under way. Safe twice."""


class ResponseStream:
    """The items of one answer. Has one reader, which iterates, or sets `on_ready` and uses `take`.

    It ends well only after the flag that completes the stream. `on_end` runs once, as soon as the stream has ended or
    is closed, so that what the request held is free even while a slow reader still takes the rest; `on_close` runs
    once, in `aclose`. `observers` are told every batch that the reader takes. `rescue`, if there is one, is asked
    before the failure of an attempt ends the stream.
    """

    __slots__ = (
        "_arrived",
        "_began",
        "_callback",
        "_close_done",
        "_coalesce",
        "_ended",
        "_error",
        "_flush",
        "_inlet",
        "_items",
        "_merge",
        "_merged",
        "_observers",
        "_on_close",
        "_on_end",
        "_on_first",
        "_queued",
        "_reader_paused",
        "_source",
        "_source_paused",
        "_stall_timer",
        "_waiter",
        "instance_id",
        "prefill_instance_id",
        "rescue",
    )

    def __init__(
        self,
        merge: Merge | None,
        flush: FlushQueue,
        *,
        observers: Sequence[Callable[[Sequence[Any]], None]] = (),
        on_end: Callable[[], None] | None = None,
        on_close: Callable[[], None] | None = None,
        stall: StallTimeout | None = None,
    ) -> None:
        self._merge = merge
        self._flush = flush
        self._on_end = on_end
        self._on_close = on_close
        self._on_first: Callable[[], None] | None = _nothing
        self._observers: Sequence[Callable[[Sequence[Any]], None]] = tuple(observers)
        self._items: deque[Any] = deque()
        self._merged: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._callback: Callable[[], None] | None = None
        self._coalesce = 1
        self._queued = False
        self._inlet: _Inlet | None = None
        self._source: Source | None = None
        self._reader_paused = False
        self._source_paused = False
        self._ended = False
        self._began = False
        self._error: DynamoError | None = None
        self._close_done: asyncio.Future[None] | None = None
        #: Items that were taken and events that came, over all attempts.
        self._arrived = 0
        self._stall_timer = None if stall is None else stall.timer(self)
        #: The worker that serves the current attempt.
        self.instance_id: int | None = None
        #: The worker that computed its prompt, if that was another one's part.
        self.prefill_instance_id: int | None = None
        #: Who is asked when an attempt fails.
        self.rescue: Rescue | None = None

    # The pipeline's side.

    def begin(self, on_first: Callable[[], None] | None = None, adjust: Adjust | None = None) -> Sink:
        """The sink for a new attempt; whatever an earlier attempt still delivers is dropped from now on.

        `on_first` is called when the attempt's first item of data arrives; `adjust` is given every item of data.
        """
        self._began = self.begun
        self._on_first = on_first or _nothing
        self._source = None
        self._source_paused = False
        self._inlet = inlet = _Inlet(self) if adjust is None else _AdjustingInlet(self, adjust)
        return inlet

    def attach(self, source: Source, instance_id: int) -> None:
        """The attempt was accepted: `source` is the grip on it."""
        self._source = source
        self.instance_id = instance_id
        if self._stall_timer is not None and not self._ended:
            self._stall_timer.start()
        self._balance()

    def regrip(self, source: Source) -> None:
        """Puts another grip in the place of the one that was attached, around which it was made."""
        self._source = source

    def let_go(self) -> Source | None:
        """The grip on an attempt that has failed; it is the caller's from now on."""
        source, self._source = self._source, None
        self._source_paused = False
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        return source

    def lose(self, error: DynamoError) -> None:
        """The current attempt is of no use any more, although its own stream says nothing of it."""
        if self._ended:
            return
        self._inlet = None
        if self._source is not None:
            self._source.stop()
        self._lost(error)

    def fail(self, error: DynamoError) -> None:
        """Ends the stream badly, unless it has ended."""
        if self._ended:
            return
        self._inlet = None
        if self._source is not None:
            self._source.stop()
        self._end(error)

    @property
    def started(self) -> bool:
        """Whether the current attempt has delivered data."""
        return self._on_first is None

    @property
    def begun(self) -> bool:
        """Whether any attempt has delivered data."""
        return self._began or self._on_first is None

    @property
    def arrived(self) -> int:
        """How many items and events have arrived so far, taken or not."""
        return self._arrived + len(self._items)

    @property
    def source_paused(self) -> bool:
        """Whether the worker was asked to send no more for now, since the reader cannot keep up."""
        return self._source_paused

    def ahead(self) -> Sequence[Any]:
        """The items that have arrived and not been taken, as they came."""
        return tuple(self._items)

    # The reader's side.

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> Any:
        merged = self._merged
        while not merged:
            merged.extend(self.take())
            if merged:
                break
            if self._ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return merged.popleft()

    def take(self) -> Sequence[Any]:
        """Everything that waits, merged, without waiting; empty if nothing does."""
        items = self._items
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
        if self._source_paused:
            self._balance()
        for observe in self._observers:
            observe(batch)
        return batch

    def on_ready(self, callback: Callable[[], None] | None, *, coalesce: int = 1) -> None:
        """Calls `callback` once per loop turn in which something arrived or the stream ended; soon, if so already.

        With `coalesce` a reader in no hurry is called only when so many items wait, or the stream has ended. It must be
        far below `HIGH_WATER`.
        """
        self._callback = callback
        self._coalesce = coalesce
        if callback is not None and (self._items or self._ended):
            self._wake()

    @property
    def waiting(self) -> int:
        """How many items wait, before merging."""
        return len(self._items)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come; what waits can still be taken."""
        return self._ended

    @property
    def error(self) -> DynamoError | None:
        """Why the stream ended badly, once `ended`."""
        return self._error

    def pause(self) -> None:
        """The reader cannot keep up: asks for no more until `resume`."""
        self._reader_paused = True
        self._balance()

    def resume(self) -> None:
        """Takes `pause` back."""
        self._reader_paused = False
        self._balance()

    async def aclose(self) -> None:
        """Ends the request, wherever it is. When this returns, all it held is released. Safe twice, also at once."""
        if self._close_done is not None:
            await asyncio.shield(self._close_done)
            return
        self._close_done = asyncio.get_running_loop().create_future()
        self._callback = None
        self._inlet = None
        rescue, self.rescue = self.rescue, None
        try:
            if rescue is not None:
                await rescue.aclose()
        finally:
            await self._close()

    async def _close(self) -> None:
        source, self._source = self._source, None
        try:
            if source is not None:
                await source.aclose()
        finally:
            self._items.clear()
            self._merged.clear()
            # An observer knows the request, which knows the stream: the circle would keep both until the next search.
            self._observers = ()
            self._end(Cancelled("the stream was closed"))
            self._stall_timer = None
            close, self._on_close = self._on_close, None
            try:
                if close is not None:
                    close()
            finally:
                if self._close_done is not None:
                    self._close_done.set_result(None)

    # Below.

    def _lost(self, error: DynamoError) -> None:
        rescue = self.rescue
        if rescue is not None:
            final = rescue.lost(error)
            if final is None:
                return
            error = final
        self._end(error)

    def _end(self, error: DynamoError | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._error = error
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        rescue = self.rescue
        if rescue is not None and error is not None:
            rescue.give_up()
        end, self._on_end = self._on_end, None
        if end is not None:
            end()
        self._wake()

    def _wake(self) -> None:
        if self._callback is not None:
            if not self._queued and (len(self._items) >= self._coalesce or self._ended):
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

    def _balance(self) -> None:
        source = self._source
        if source is None:
            return
        waiting = len(self._items)
        if not self._source_paused and (self._reader_paused or waiting > HIGH_WATER):
            self._source_paused = True
            source.pause()
        elif self._source_paused and not self._reader_paused and waiting <= LOW_WATER:
            self._source_paused = False
            source.resume()


class _Inlet:
    """Where the transport puts what arrives for one attempt. Holds the rule of ``complete_final``."""

    __slots__ = ("_stream",)

    def __init__(self, stream: ResponseStream) -> None:
        self._stream = stream

    def data(self, item: Any) -> None:
        # Runs for every token: in one piece, without calls that would find nothing to do.
        stream = self._stream
        if stream._inlet is not self:
            return
        items = stream._items
        items.append(item)
        if stream._on_first is not None:
            first, stream._on_first = stream._on_first, None
            first()
        waiting = len(items)
        if waiting > HIGH_WATER and not stream._source_paused:
            stream._balance()
        if stream._callback is None or (waiting >= stream._coalesce and not stream._queued):
            stream._wake()

    def event(self, item: Annotated[Any]) -> None:
        stream = self._stream
        if stream._inlet is not self:
            return
        stream._arrived += 1
        if item.is_error():
            stream._inlet = None
            stream._lost(item.to_error())
        elif item.is_complete_final():
            stream._inlet = None
            stream._end(None)

    def closed(self, error: DynamoError | None) -> None:
        stream = self._stream
        if stream._inlet is self:
            stream._inlet = None
            stream._lost(error or StreamIncomplete("the stream ended before it was complete"))


class _AdjustingInlet(_Inlet):
    """One whose items are changed before anybody sees them."""

    __slots__ = ("_adjust",)

    def __init__(self, stream: ResponseStream, adjust: Adjust) -> None:
        super().__init__(stream)
        self._adjust = adjust

    def data(self, item: Any) -> None:
        super().data(self._adjust(item))


def _nothing() -> None:
    return None
