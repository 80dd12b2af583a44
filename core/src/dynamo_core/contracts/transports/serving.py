"""The serving half of every transport: run a handler, say whether it accepted, and complete the stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import aclosing
from typing import Any, Protocol

from dynamo_core.contracts.transports.call import Handler, ServedContext
from dynamo_core.errors import Cancelled, Disconnected, DynamoError, Unknown
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.tasks import TaskSet

log = logging.getLogger(__name__)

#: Items after which a handler that never waits lets the others have a turn of the loop.
YIELD_EVERY = 64

#: Seconds between the wish to stop and the cancelling of a handler that does not.
STOP_GRACE = 2.0


class ServerStream(Protocol):
    """The sink of a served call for the items that the handler yields."""

    async def accepted(self) -> None:
        """Record that the handler took the call.

        Return when the caller can learn of it, even if the handler blocks the event loop from now on; nothing else may
        be put in before.
        """

    def refused(self, error: DynamoError) -> None:
        """Record that the handler did not take the call. Nothing follows."""

    def data(self, item: Any) -> None:
        """Send one item of data."""

    def event(self, item: Annotated[Any]) -> None:
        """Send an annotation, an error, or the completing flag."""

    def room(self) -> Awaitable[None] | None:
        """Return none if more may be put in at once; else something that returns when more may be."""

    def ended(self, error: DynamoError | None) -> None:
        """Record that the handler, with every ``finally`` in it, has run to its end; called once, also after a refusal.

        `error` is set when the call was cut off from this side, so that the completing flag was not sent.
        """


class ServedCall:
    """One call being served, in a task of its own.

    A handler that was asked to stop and goes on for `STOP_GRACE` seconds is cancelled. After an error item the flag is
    still sent: the stream is complete, it just ended badly.
    """

    __slots__ = ("_ctx", "_handler", "_lost", "_request", "_stream", "_task", "_timer")

    def __init__(self, handler: Handler, request: Any, ctx: ServedContext, stream: ServerStream) -> None:
        self._handler = handler
        self._request = request
        self._ctx = ctx
        self._stream = stream
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lost = False

    def start(self, owner: TaskSet) -> None:
        """Start serving; `owner` keeps the task."""
        self._task = owner.spawn(self._run(), name=f"serve-{self._ctx.attempt_id}")
        self._task.add_done_callback(self._finished)
        self._ctx.on_stop(self._arm)

    def stop(self, *, kill: bool = False) -> None:
        """Stop (or kill) the context when the caller gave up, and cancel a handler that does not end in time."""
        if kill:
            self._ctx.kill()
        else:
            self._ctx.stop_generating()

    def lost(self) -> None:
        """Close the handler of a broken connection, without telling it that the caller gave up."""
        self._lost = True
        if self._task is not None:
            self._task.cancel()

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until the handler, with every ``finally`` in it, has run to its end; whether it did in `timeout` s.

        Without a timeout, a second longer than a stopped handler may take.
        """
        if self._task is None:
            return True
        if timeout is None:
            timeout = STOP_GRACE + 1.0
        done, _ = await asyncio.wait([self._task], timeout=timeout)
        if not done:
            log.error("request %s: a handler did not end %s s after it was stopped", self._ctx.id, timeout)
        return bool(done)

    def _arm(self) -> None:
        task = self._task
        if task is not None and not task.done():
            self._timer = asyncio.get_running_loop().call_later(STOP_GRACE, task.cancel)

    def _finished(self, task: asyncio.Task[None]) -> None:
        # A callback, not a `finally`: a task that is cancelled before its first step never enters its coroutine.
        if self._timer is not None:
            self._timer.cancel()
        self._ctx.close()
        cut = task.cancelled() or task.exception() is not None
        self._stream.ended(Disconnected("the call was cut off by the serving side") if cut else None)

    async def _run(self) -> None:
        try:
            items = await self._handler(self._request, self._ctx)
        except DynamoError as error:
            self._stream.refused(error)
            return
        except Exception as error:
            log.exception("a handler failed to take a call")
            self._stream.refused(Unknown("the call could not be taken", cause=error))
            return
        try:
            await self._stream.accepted()
            self._ctx.open(self._stream.event)
            await self._pump(items)
        except asyncio.CancelledError:
            if self._lost or not self._ctx.is_stopped():
                raise
            self._stream.event(Annotated.from_error(Cancelled("stopped")))
        except DynamoError as error:
            self._stream.event(Annotated.from_error(error))
        except Exception as error:
            log.exception("a handler failed in mid-stream")
            self._stream.event(Annotated.from_error(Unknown(str(error), cause=error)))
        self._ctx.complete()
        self._stream.event(Annotated.from_complete_final())

    async def _pump(self, items: Any) -> None:
        data, event, room = self._stream.data, self._stream.event, self._stream.room
        count = 0
        async with aclosing(items):
            async for item in items:
                if type(item) is Annotated:
                    event(item)
                else:
                    data(item)
                wait = room()
                if wait is not None:
                    await wait
                count += 1
                if not count % YIELD_EVERY:
                    await asyncio.sleep(0)
