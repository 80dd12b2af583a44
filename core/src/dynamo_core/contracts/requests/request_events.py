"""Request events: the life of each client request, for extensions. A few per request, none per token, no text.

Events hold what the frontend knows already, so that making one costs little. msgspec can encode them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Final, Protocol, Self

import msgspec

from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.contracts.router import ScoredRank
from dynamo_core.protocol.records import RequestRecord
from dynamo_core.resources import AsyncResource

#: How many events a subscription holds unless it says otherwise.
CAPACITY: Final = 4096


class RequestEvent(msgspec.Struct, frozen=True, gc=False, tag_field="event"):
    """The base of all events. `time` is in seconds of `time.monotonic`, the clock of this process's event loop."""

    request_id: str
    time: float


class RequestReceived(RequestEvent, frozen=True, gc=False, tag="received"):
    """A client asks for a model that exists. `request_type` is ``stream`` or ``unary``."""

    model: str
    endpoint: str
    request_type: str
    principal: Principal
    x_request_id: str | None
    trace_id: str


class RequestAdmitted(RequestEvent, frozen=True, gc=False, tag="admitted"):
    """Admission has let the request in, after `waited` seconds.

    `call_id` names the call, of which a request has one; of several choices each has its own after the first event.
    """

    call_id: str
    model: str
    prompt_tokens: int
    waited: float


class RequestRefused(RequestEvent, frozen=True, gc=False, tag="refused"):
    """Admission has refused the request, at its `precheck` or at its `admit`. `error` is the kind of the error.

    `plugin` is the name of the plugin that has; ``chain`` where several took too long together.
    """

    model: str
    stage: str
    error: str
    reason: str
    retry_after: float | None
    waited: float
    plugin: str = ""


class RequestRouted(RequestEvent, frozen=True, gc=False, tag="routed"):
    """The router has chosen a worker for an attempt, after `seconds`. `RequestAttempted` tells what the worker said.

    `after` is the kind of the error for which the attempt before it ended, empty for the first. `candidates` are the
    ranks with the lowest costs and the chosen one, in the order of their costs; None if no subscription asks for them,
    or if the router has no costs.
    """

    call_id: str
    attempt_id: str
    model: str
    role: str
    router: str
    instance_id: int
    dp_rank: int
    overlap: int
    after: str
    seconds: float
    candidates: Sequence[ScoredRank] | None


class RequestAttempted(RequestEvent, frozen=True, gc=False, tag="attempted"):
    """The chosen worker has accepted the attempt, or not: then `error` is the kind of the error."""

    attempt_id: str
    instance_id: int
    error: str
    reason: str


class RequestFirstToken(RequestEvent, frozen=True, gc=False, tag="first_token"):
    """The first output is about to be sent to the client."""


class RequestMoved(RequestEvent, frozen=True, gc=False, tag="moved"):
    """A worker that had accepted the request has failed, and another one is sought. `tokens` had come by then."""

    call_id: str
    model: str
    instance_id: int | None
    tokens: int
    error: str
    reason: str


class RequestFinished(RequestEvent, frozen=True, gc=False, tag="finished"):
    """The request has ended, well or badly. The last event of a request.

    `reason` is the kind and the message of the error, if the client is not to blame for it; else empty.
    """

    record: RequestRecord
    reason: str = ""


class Subscription(AsyncResource):
    """The events of all requests of this process since it was made, in order, for one reader.

    It holds a bounded number. A reader that falls behind loses the oldest, which `dropped` counts; a request never
    waits for a reader. The reader is woken a moment after an event, so that many are read at once.
    """

    @property
    @abstractmethod
    def dropped(self) -> int:
        """The number of events the reader has lost."""

    @abstractmethod
    def __aiter__(self) -> Self: ...

    @abstractmethod
    async def __anext__(self) -> RequestEvent:
        """Return the next event; end the iteration once the subscription is closed and all that it held was read."""

    @abstractmethod
    async def batch(self) -> list[RequestEvent]:
        """Return all events that are held, at least one; none once the subscription is closed and all was read."""

    @abstractmethod
    async def aclose(self) -> None:
        """Take no further events; those that are held can still be read. Safe twice."""


class RequestEvents(Protocol):
    """The subscription point of extensions for request events."""

    def subscribe(self, capacity: int = CAPACITY, candidates: int = 0) -> Subscription:
        """Begin to hold events, `capacity` of them at most. The extension's subscriptions end with it.

        `candidates` is how many ranks `RequestRouted` lists. It costs time for each request, so ask for few.
        """
