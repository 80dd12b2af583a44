"""One call over a transport, seen from both ends.

The serving end gives the transport a `Handler`. The calling end gives it a `Sink`, into which the transport pushes what
arrives, and gets a `Source` back, with which to stop it. The transport never waits for the sink: a sink that is full
calls `Source.pause`.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from dynamo_core.contracts.context import Callback, EngineContext
from dynamo_core.errors import DynamoError
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.resources import AsyncResource

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """Something a worker can be called for, and the types that travel.

    `request_type` and `item_type` must be types msgspec can encode. `merge`, if given, joins items that wait in one
    stream; the result may not be longer than what it was given.
    """

    name: str
    request_type: Any
    item_type: Any
    merge: Callable[[Sequence[Any]], list[Any]] | None = None


class ServedContext(EngineContext):
    """The context of a call on the serving side. What is deferred runs exactly once, however the call ends."""

    __slots__ = ("_announce", "_deferred")

    def __init__(
        self, request_id: str, *, attempt_id: str | None = None, metadata: dict[str, str] | None = None
    ) -> None:
        super().__init__(request_id, attempt_id=attempt_id, metadata=metadata)
        self._deferred: list[Callback] | None = []
        self._announce: Callable[[Annotated[Any]], None] | None = None

    def open(self, announce: Callable[[Annotated[Any]], None]) -> None:
        """The call was accepted: from now on `announce` takes events beside the handler's items."""
        if self._deferred is not None:
            self._announce = announce

    def announce(self, event: Annotated[Any]) -> None:
        """Sends the caller an event beside what the handler yields. Dropped unless the call is open."""
        if self._announce is not None:
            self._announce(event)

    def complete(self) -> None:
        """Nothing may follow what has been sent but the completing flag."""
        self._announce = None

    def defer(self, callback: Callback) -> None:
        """Runs `callback` when the call has ended; at once if it already has."""
        if self._deferred is None:
            callback()
        else:
            self._deferred.append(callback)

    def close(self) -> None:
        """Runs what was deferred, last first. Called by the transport; repeating it does nothing."""
        deferred, self._deferred = self._deferred, None
        self._announce = None
        for callback in reversed(deferred or ()):
            try:
                callback()
            except Exception:  # one that fails must not keep the others from releasing what they hold
                log.exception("what was deferred to the end of call %s failed", self.attempt_id)


#: Awaiting it accepts the call, or raises the refusal; what it returns is iterated and closed by the transport. Items
#: are of the endpoint's `item_type`, or `Annotated` for annotations.
Handler: TypeAlias = Callable[[Any, ServedContext], Awaitable[AsyncGenerator[Any, None]]]


class Sink(Protocol):
    """Where a transport puts what arrives for one attempt. All methods are called in the event loop's thread."""

    def data(self, item: Any) -> None:
        """One item of data, in order."""

    def event(self, item: Annotated[Any]) -> None:
        """An error, an annotation, or the flag that completes the stream."""

    def closed(self, error: DynamoError | None) -> None:
        """Nothing more will come. Without the flag before it, something was lost: `error` says what, if known."""


class Source(AsyncResource):
    """The calling end's grip on an accepted call."""

    @abstractmethod
    async def aclose(self) -> None:
        """Ends the call. If it had not ended, the handler's context is stopped, as an explicit wish of the caller.

        When this returns within one process, every ``finally`` of the handler has run. Safe twice.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stops the handler's context, and returns at once; the stream then ends by itself."""

    def pause(self) -> None:
        """Asks the transport to deliver no more until `resume`. What is under way may still arrive."""

    def resume(self) -> None:
        """Takes `pause` back."""


# The endpoints that every worker serves.

GENERATE = Endpoint("generate", PreprocessedRequest, LLMEngineOutput, merge_outputs)
EMBED = Endpoint("embed", EmbedRequest, EmbedOutput)
MODEL_FILE = Endpoint("model_file", ModelFileRequest, ModelFileChunk)
#: Refused as `NotSupported` by a worker that does not keep track of its own cache.
KV_HISTORY = Endpoint("kv_history", KvHistoryRequest, KvHistoryPart)
