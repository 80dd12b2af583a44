"""The life of one request on one side of the wire: its identity, and whether it should stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextvars import copy_context
from functools import partial

Callback = Callable[[], None]

log = logging.getLogger(__name__)


class EngineContext:
    """Identity and cancellation of one attempt at a request.

    `id` is the client's request id, shared by all attempts; `attempt_id` is unique per attempt. There are two
    levels of cancellation: *stopped* asks the engine to end the stream itself; *killed* means that no reader is left.
    Killed implies stopped. Callbacks run once, at once if the state is already reached, in the event loop's thread.
    """

    __slots__ = (
        "_children",
        "_event",
        "_kill_event",
        "_killed",
        "_on_stop",
        "_stopped",
        "attempt_id",
        "coalesce",
        "id",
        "metadata",
        "root_id",
    )

    def __init__(
        self,
        request_id: str,
        *,
        attempt_id: str | None = None,
        metadata: Mapping[str, str] | None = None,
        root_id: str | None = None,
    ) -> None:
        self.id = request_id
        #: The id of the client request that this is a part of, if it is one of several.
        self.root_id = root_id or request_id
        self.attempt_id = attempt_id or request_id
        #: Text that travels with the request, such as `traceparent`.
        self.metadata: dict[str, str] = dict(metadata) if metadata else {}
        #: How many items may wait at the serving end, after the first, before they are sent. A caller in no hurry
        #: allows many; the serving end may send them sooner.
        self.coalesce = 1
        self._stopped = False
        self._killed = False
        self._event: asyncio.Event | None = None
        self._kill_event: asyncio.Event | None = None
        self._on_stop: list[Callback] | None = None
        self._children: list[EngineContext] | None = None

    def is_stopped(self) -> bool:
        """Return whether the stream should end now. Engines ask this between yields."""
        return self._stopped

    def is_killed(self) -> bool:
        """Return whether no reader is left."""
        return self._killed

    async def stopped(self) -> None:
        """Return once the context is stopped."""
        if not self._stopped:
            self._event = self._event or asyncio.Event()
            await self._event.wait()

    async def killed(self) -> None:
        """Return once the context is killed."""
        if not self._killed:
            self._kill_event = self._kill_event or asyncio.Event()
            await self._kill_event.wait()

    def stop_generating(self) -> None:
        """Ask the engine to end the stream with a `cancelled` terminal. Repeating it does nothing."""
        if self._stopped:
            return
        self._stopped = True
        if self._event is not None:
            self._event.set()
        callbacks, self._on_stop = self._on_stop, None
        for child in self._children or ():
            child.stop_generating()
        # Popped one by one: a callback may unregister itself or another.
        while callbacks:
            callback = callbacks.pop(0)
            try:
                callback()
            except Exception:
                log.exception("a stop callback of request %s failed", self.id)

    def kill(self) -> None:
        """Mark the request as one without a reader; also stop it."""
        if self._killed:
            return
        self._killed = True
        if self._kill_event is not None:
            self._kill_event.set()
        for child in self._children or ():
            child.kill()
        self.stop_generating()

    def on_stop(self, callback: Callback) -> Callback:
        """Call `callback` when the context is stopped. Return a function that unregisters it.

        The callback runs with the context variables of this call, so that its log lines carry the ids of the request
        also where a connection stops it.
        """
        if self._stopped:
            callback()
            return _no_op
        if self._on_stop is None:
            self._on_stop = []
        callbacks = self._on_stop
        entry = partial(copy_context().run, callback)
        callbacks.append(entry)

        def remove() -> None:
            if entry in callbacks:
                callbacks.remove(entry)

        return remove

    def link_child(self, child: EngineContext) -> None:
        """Stop and kill `child` along with this context."""
        if self._children is None:
            self._children = []
        self._children.append(child)
        if self._killed:
            child.kill()
        elif self._stopped:
            child.stop_generating()


class GenerateContext:
    """The argument of `LLMEngine.generate`: the plain context, with methods for generating."""

    __slots__ = ("_first_token", "_inner")

    def __init__(self, inner: EngineContext, first_token: Callback | None = None) -> None:
        self._inner = inner
        self._first_token = first_token

    @property
    def id(self) -> str:
        """The client's request id."""
        return self._inner.id

    @property
    def attempt_id(self) -> str:
        """The id of this attempt; use it where two attempts of one request must not be confused."""
        return self._inner.attempt_id

    @property
    def metadata(self) -> Mapping[str, str]:
        """Text that travels with the request."""
        return self._inner.metadata

    def inner(self) -> EngineContext:
        """Return the plain context, for tasks that outlive `generate`."""
        return self._inner

    def is_stopped(self) -> bool:
        """Return whether to end the stream now with ``LLMEngineOutput.cancelled()``."""
        return self._inner.is_stopped()

    def is_killed(self) -> bool:
        """Return whether no reader is left."""
        return self._inner.is_killed()

    async def stopped(self) -> None:
        """Return once the request is stopped."""
        await self._inner.stopped()

    async def killed(self) -> None:
        """Return once the request is killed."""
        await self._inner.killed()

    def stop_generating(self) -> None:
        """Stop the request from the engine's side."""
        self._inner.stop_generating()

    def kill(self) -> None:
        """Kill the request from the engine's side."""
        self._inner.kill()

    def on_stop(self, callback: Callback) -> Callback:
        """Call `callback` when the request is stopped; see `EngineContext.on_stop`."""
        return self._inner.on_stop(callback)

    def link_child(self, child: EngineContext) -> None:
        """Stop and kill `child` along with this request."""
        self._inner.link_child(child)

    def notify_first_token(self) -> None:
        """Report the first token before it is yielded. Repeating it does nothing."""
        callback, self._first_token = self._first_token, None
        if callback is not None:
            callback()


def _no_op() -> None:
    return None
