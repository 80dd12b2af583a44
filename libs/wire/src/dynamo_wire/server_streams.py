"""The serving end of a link's calls: rows of many streams leave in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol

from dynamo_core import DynamoError, Endpoint, Handler, LLMEngineOutput, ServedCall, ServedContext, TaskSet
from dynamo_core.errors import Disconnected, Unknown, to_wire
from dynamo_core.protocol import Annotated

from dynamo_wire.messages import ROWS_TAG, Accepted, Ack, Ended, Open, Pause, Refused, Resume, Stop, encode

#: Items of one stream that may wait for the end of the loop's turn; beyond them its handler waits. Items that cannot be
#: merged may be large, so fewer of them may wait.
PENDING = 64
PENDING_UNMERGED = 4

#: Frames of rows that may be in flight. Until the caller acknowledges them, rows that can be merged wait, as bytes do
#: with Nagle's algorithm; the first row of a stream never waits.
WINDOW = 1


class OutgoingLink(Protocol):
    """The link as the streams need it."""

    @property
    def closed(self) -> bool:
        """Whether nothing more will be sent."""

    @property
    def blocked(self) -> bool:
        """Whether the write buffer is full, so that handlers have to wait."""

    @property
    def writable(self) -> asyncio.Event:
        """Set while it is not blocked."""

    def send(self, message: Any) -> None:
        """Send a message at the end of this turn of the loop."""

    def schedule(self) -> None:
        """Have `ServerStreams.collect` called at the end of this turn of the loop."""

    async def sent(self) -> None:
        """Return when what was given to `send` has left this process, unless much waits before it."""


class ServerStreams:
    """All calls that are served over one link."""

    def __init__(self, link: OutgoingLink) -> None:
        self.link = link
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, ServerStream] = {}
        self._dirty: list[ServerStream] = []
        #: Calls whose rows can be merged, and whose callers want each row at once.
        self._low_latency = 0
        #: Frames of rows that asked for an `Ack` and have none yet.
        self.in_flight = 0
        #: Awaited by handlers whose items wait to be collected; None while no handler waits.
        self._collected: asyncio.Future[None] | None = None
        self._tail: list[bytes] = []

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, sid: int) -> bool:
        return sid in self._calls

    # What the caller says.

    def open(self, opening: Open, endpoint: Endpoint, handler: Handler, request: Any, owner: TaskSet) -> None:
        """Start a call; `owner` keeps its task."""
        ctx = ServedContext(opening.request_id, attempt_id=opening.attempt_id, metadata=opening.metadata)
        stream = self._calls[opening.sid] = ServerStream(self, opening.sid, endpoint, opening.coalesce)
        self._low_latency += stream.low_latency
        stream.call = ServedCall(handler, request, ctx, stream)
        stream.call.start(owner)

    def on_stop(self, stop: Stop) -> None:
        """End a stream for its caller."""
        stream = self._calls.get(stop.sid)
        if stream is not None:
            stream.resume()
            stream.call.stop(kill=stop.kill)

    def on_pause(self, pause: Pause) -> None:
        """Pause a stream for its caller."""
        stream = self._calls.get(pause.sid)
        if stream is not None:
            stream.pause()

    def on_resume(self, resume: Resume) -> None:
        """Resume a stream for its caller."""
        stream = self._calls.get(resume.sid)
        if stream is not None:
            stream.resume()

    def on_ack(self, ack: Ack) -> None:
        """Record that the caller has read frames of rows.

        Raises:
            Disconnected: it acknowledges more than were sent.
        """
        if ack.frames > self.in_flight:
            raise Disconnected("more portions were taken than sent")
        self.in_flight -= ack.frames
        if self._dirty:
            self.link.schedule()

    def lost(self) -> None:
        """Close all handlers of the closed link. Their contexts are not stopped, since the caller did not give up."""
        for stream in list(self._calls.values()):
            stream.drop()
            stream.call.lost()
        self._report_collected()

    # What streams say.

    def dirty(self, stream: ServerStream) -> None:
        """Note that the stream has items; they are collected at the end of this turn, or after the next `Ack`."""
        self._dirty.append(stream)
        self.link.schedule()

    async def collected(self) -> None:
        """Return when the waiting items are collected or dropped."""
        if self._collected is None:
            self._collected = self._loop.create_future()
        await asyncio.shield(self._collected)

    def ended(self, sid: int, error: DynamoError | None, *, told: bool) -> None:
        """Record that a call has ended; the caller is told after its rows, unless it was `told` before."""
        stream = self._calls.pop(sid, None)
        if stream is not None:
            self._low_latency -= stream.low_latency
        if not told and not self.link.closed:
            self._tail.append(encode(Ended(sid, None if error is None else to_wire(error))))
            self.link.schedule()

    def cut(self, sid: int, error: DynamoError) -> None:
        """Tell the caller that the stream has ended, though the handler may still run."""
        self._tail.append(encode(Ended(sid, to_wire(error))))
        self.link.schedule()

    # What the link asks for.

    def collect(self, out: list[bytes], limit: int) -> None:
        """Append the messages that wait, each of `limit` bytes at most. Called at the end of a turn of the loop."""
        dirty, self._dirty = self._dirty, []
        if self.link.closed:
            for stream in dirty:
                stream.drop()
            return
        if dirty and self.in_flight >= WINDOW:
            # The caller has not acknowledged the last frame: rows that can be merged wait for its `Ack`.
            self._dirty = [stream for stream in dirty if not stream.urgent]
            dirty = [stream for stream in dirty if stream.urgent]
        if dirty:
            rows: list[tuple[Any, ...]] = []
            for stream in dirty:
                stream.collect(rows)
            self._pack(rows, out, limit)
            self._report_collected()
        if self._tail:
            out += self._tail
            self._tail = []

    def _report_collected(self) -> None:
        collected, self._collected = self._collected, None
        if collected is not None and not collected.done():
            collected.set_result(None)

    def _pack(self, rows: list[tuple[Any, ...]], out: list[bytes], limit: int) -> None:
        """Pack all rows into one message, or several if they are too large or one of them cannot be sent."""
        if not rows:
            return
        ask = self._low_latency > 0 and self.in_flight < WINDOW
        try:
            message = encode((ROWS_TAG, rows, ask))
        except Exception as error:  # an engine may put anything into an item
            message, problem = b"", str(error)
        else:
            if len(message) <= limit:
                out.append(message)
                self.in_flight += ask
                return
            problem = f"it has {len(message)} bytes, more than the {limit} that may be sent"
        if len(rows) == 1:
            stream = self._calls.get(rows[0][0])
            if stream is not None:
                stream.fail(Unknown(f"an item could not be sent: {problem}"))
            return
        half = len(rows) // 2
        self._pack(rows[:half], out, limit)
        self._pack([row for row in rows[half:] if not self._failed(row[0])], out, limit)

    def _failed(self, sid: int) -> bool:
        stream = self._calls.get(sid)
        return stream is not None and stream.failed


class ServerStream:
    """The sink of one call; see `dynamo_core.contracts.transports.serving.ServerStream`."""

    __slots__ = (
        "_coalesce",
        "_compact",
        "_later",
        "_limit",
        "_link",
        "_merge",
        "_number",
        "_over",
        "_pending",
        "_queued",
        "_resumed",
        "_siblings",
        "_sid",
        "call",
        "failed",
        "low_latency",
    )

    def __init__(self, siblings: ServerStreams, sid: int, endpoint: Endpoint, coalesce: int) -> None:
        self._siblings = siblings
        self._link = siblings.link
        self._sid = sid
        self._merge = endpoint.merge
        self._compact = endpoint.item_type is LLMEngineOutput
        self._limit = PENDING if endpoint.merge is not None else PENDING_UNMERGED
        #: Items that wait before the link is told. The first goes at once, and so do items that cannot be merged.
        self._coalesce = 1
        self._later = 1 if endpoint.merge is None else max(1, min(coalesce, PENDING))
        self.low_latency = endpoint.merge is not None and coalesce == 1
        self._pending: list[Any] = []
        #: Whether the link was told.
        self._queued = False
        self._number = 0
        #: Whether the handler has ended.
        self._over = False
        #: Set when the caller resumes; None while the stream is not paused.
        self._resumed: asyncio.Event | None = None
        self.failed = False
        self.call: ServedCall

    # What the call does.

    async def accepted(self) -> None:
        self._link.send(Accepted(self._sid))
        await self._link.sent()

    def refused(self, error: DynamoError) -> None:
        self.failed = True
        self._link.send(Refused(self._sid, to_wire(error)))

    def data(self, item: Any) -> None:
        pending = self._pending
        pending.append(item)
        if len(pending) >= self._coalesce and not self._queued:
            self._send()

    def event(self, item: Annotated[Any]) -> None:
        self._pending.append(item)
        # The end of the handler follows in the next turn, and carries this flag.
        if not self._queued and not item.is_complete_final():
            self._send()

    def room(self) -> Awaitable[None] | None:
        if self._resumed is None and len(self._pending) < self._limit and not self._link.blocked:
            return None
        return self._wait()

    def ended(self, error: DynamoError | None) -> None:
        self._over = True
        if self._pending and not self._queued:
            self._send()
        self._siblings.ended(self._sid, error, told=self.failed)

    def _send(self) -> None:
        self._queued = True
        self._siblings.dirty(self)

    async def _wait(self) -> None:
        while True:
            if self._resumed is not None:
                await self._resumed.wait()
            elif self._link.blocked:
                await self._link.writable.wait()
            elif len(self._pending) >= self._limit:
                await self._siblings.collected()
            else:
                return

    # What the link does.

    @property
    def urgent(self) -> bool:
        """Whether what waits should not wait for the caller.

        It is the first or last of its stream, or cannot be merged.
        """
        return not self._number or self._over or self._merge is None

    def pause(self) -> None:
        """Pause the stream."""
        if self._resumed is None:
            self._resumed = asyncio.Event()

    def resume(self) -> None:
        """Resume the stream."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            resumed.set()

    def drop(self) -> None:
        """Drop the items that wait: the caller is gone."""
        self._pending.clear()

    def fail(self, error: DynamoError) -> None:
        """End the stream at once, and then the handler."""
        self.failed = True
        self._siblings.cut(self._sid, error)
        self.resume()
        self.call.stop(kill=True)

    def collect(self, rows: list[tuple[Any, ...]]) -> None:
        """Append what waits, merged and then numbered, as rows."""
        items, self._pending = self._pending, []
        self._queued = False
        self._coalesce = self._later
        if self.failed:
            return
        if len(items) > 1 and self._merge is not None:
            try:
                items = self._merged(items)
            except Exception as error:  # items of an engine that are not what the endpoint says
                self.fail(Unknown(f"items could not be merged: {error}"))
                return
        sid, number, compact = self._sid, self._number, self._compact
        for item in items:
            kind = type(item)
            if kind is Annotated:
                rows.append((sid, number, item))
            # Comparing with an item that has tokens only is as cheap as looking at each field, and forgets none.
            elif compact and kind is LLMEngineOutput and item == LLMEngineOutput(item.token_ids):
                rows.append((sid, number, item.token_ids))
            else:
                rows.append((sid, number, None, item))
            number += 1
        self._number = number

    def _merged(self, items: list[Any]) -> list[Any]:
        merge = self._merge
        assert merge is not None  # noqa: S101 - only called with one
        merged: list[Any] = []
        run: list[Any] = []
        for item in items:
            if type(item) is Annotated:
                if run:
                    merged += merge(run)
                    run = []
                merged.append(item)
            else:
                run.append(item)
        if run:
            merged += merge(run)
        return merged
