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

from dynamo_core.contracts.requests.context import Callback, EngineContext
from dynamo_core.errors import DynamoError
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.events import KvHistoryPart, KvHistoryRequest
from dynamo_core.protocol.output import LLMEngineOutput, merge_outputs
from dynamo_core.protocol.records import (
    ModelFileChunk,
    ModelFileRequest,
    PeerReplyPart,
    PeerRequest,
    WorkerStateReport,
    WorkerStateRequest,
)
from dynamo_core.protocol.request import EmbedOutput, EmbedRequest, PreprocessedRequest, ScoreOutput, ScoreRequest
from dynamo_core.resources import AsyncResource

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """An endpoint of a worker, and the types of its messages.

    msgspec must be able to encode `request_type` and `item_type`. `merge`, if given, joins the pending items of one
    stream; its result may not be longer than its argument.
    """

    name: str
    request_type: Any
    item_type: Any
    merge: Callable[[Sequence[Any]], list[Any]] | None = None


class ServedContext(EngineContext):
    """The context of a call on the serving side. Deferred callbacks run exactly once, however the call ends."""

    __slots__ = ("_announce", "_deferred")

    def __init__(
        self, request_id: str, *, attempt_id: str | None = None, metadata: dict[str, str] | None = None
    ) -> None:
        super().__init__(request_id, attempt_id=attempt_id, metadata=metadata)
        self._deferred: list[Callback] | None = []
        self._announce: Callable[[Annotated[Any]], None] | None = None

    def open(self, announce: Callable[[Annotated[Any]], None]) -> None:
        """Mark the call as accepted: from now on `announce` sends events beside the handler's items."""
        if self._deferred is not None:
            self._announce = announce

    def announce(self, event: Annotated[Any]) -> None:
        """Send the caller an event beside the handler's items. Dropped unless the call is open."""
        if self._announce is not None:
            self._announce(event)

    def complete(self) -> None:
        """Allow nothing but the completing flag to follow."""
        self._announce = None

    def defer(self, callback: Callback) -> None:
        """Run `callback` at the end of the call; at once if the call has ended."""
        if self._deferred is None:
            callback()
        else:
            self._deferred.append(callback)

    def close(self) -> None:
        """Run the deferred callbacks, last first. The transport calls it; repeating it does nothing."""
        deferred, self._deferred = self._deferred, None
        self._announce = None
        for callback in reversed(deferred or ()):
            try:
                callback()
            except Exception:  # a callback that fails must not keep the others from releasing their resources
                log.exception("a callback at the end of call %s failed", self.attempt_id)


#: Awaiting it accepts the call, or raises the refusal; what it returns is iterated and closed by the transport. Items
#: are of the endpoint's `item_type`, or `Annotated` for annotations.
Handler: TypeAlias = Callable[[Any, ServedContext], Awaitable[AsyncGenerator[Any, None]]]


class Sink(Protocol):
    """Receives the messages of one attempt from a transport. All methods are called in the event loop's thread."""

    def data(self, item: Any) -> None:
        """Receive one item of data, in order."""

    def event(self, item: Annotated[Any]) -> None:
        """Receive an error, an annotation, or the flag that completes the stream."""

    def closed(self, error: DynamoError | None) -> None:
        """End the stream. Without the completing flag before it, items were lost: `error` says why, if known."""


class Source(AsyncResource):
    """The calling end's control over an accepted call."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the call. If it still runs, the handler's context is stopped as an explicit request of the caller.

        Within one process every ``finally`` of the handler has run when this returns. Safe twice.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop the handler's context, and return at once; the stream then ends by itself."""

    def pause(self) -> None:
        """Ask the transport to deliver nothing until `resume`. Messages under way may still arrive."""

    def resume(self) -> None:
        """End a `pause`."""


# The endpoints that every worker serves.

GENERATE = Endpoint("generate", PreprocessedRequest, LLMEngineOutput, merge_outputs)
EMBED = Endpoint("embed", EmbedRequest, EmbedOutput)
SCORE = Endpoint("score", ScoreRequest, ScoreOutput)
MODEL_FILE = Endpoint("model_file", ModelFileRequest, ModelFileChunk)
WORKER_STATE = Endpoint("worker_state", WorkerStateRequest, WorkerStateReport)
#: Refused as `NotSupported` by a worker that does not keep track of its own cache.
KV_HISTORY = Endpoint("kv_history", KvHistoryRequest, KvHistoryPart)

# The endpoint that a frontend serves to others.

FRONTEND_CALL = Endpoint("frontend_call", PeerRequest, PeerReplyPart)
