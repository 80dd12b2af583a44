"""Every error of the framework as one tree, and the one table of the errors that API clients see.

::

    DynamoError
    ├── ConfigError                 the set-up is wrong; nothing was started (exit code 2)
    │   └── PluginError             a plugin is missing, broken or made for another API
    ├── InvalidArgument             the request cannot be served as it is; a retry will not help
    ├── ModelNotFound               no such model, beside others that are served
    ├── Unavailable                 nothing can serve this now: no worker has registered, or all are gone
    ├── ServiceOverloaded           workers exist but all are busy; try again after `retry_after` seconds
    ├── RateLimited                 the client asks more often than it may; try again after `retry_after` seconds
    ├── QuotaExceeded               the client has used up what it may have; a retry will not help
    ├── WorkerOverloaded            this one worker refused; another may accept
    ├── Cancelled                   the caller gave up
    ├── NotSupported                the engine does not offer what the request needs
    ├── CannotConnect               the worker could not be reached; nothing was sent
    ├── ConnectionTimeout           ... within the deadline
    ├── Disconnected                the connection broke after the request was sent
    ├── ResponseTimeout             the worker is connected but silent
    ├── DeadlineExceeded            the request has used up the time that it has in all
    ├── StreamIncomplete            the stream ended, or lost items, before it was complete
    ├── EngineShutdown              the engine is not running (any more)
    ├── HttpFault                   the HTTP request itself is wrong: raised by routes, never sent to another process
    ├── Unknown                     anything else
    └── BackendError                mixed into nine of the above: the error came from an engine

An error is known on the wire and in spans by its *kind*: ``InvalidArgument`` when the framework raised it,
``Backend(InvalidArgument)`` when an engine did. Catching ``InvalidArgument`` catches both.

Every HTTP door (the client APIs, operators' routes, health, the slot tracker) takes status, type, code, `param`,
headers and metric labels of an error from `problem_of`, and only words the body in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

import msgspec


class WireError(msgspec.Struct, omit_defaults=True, frozen=True):
    """An error in transit: its kind, its message and its chain of causes, nearest first."""

    kind: str
    message: str
    causes: list[WireError] = []
    retry_after: float | None = None
    field: str | None = None
    limits: dict[str, str] = {}


class DynamoError(Exception):
    """Base of all errors the framework raises on purpose.

    The message is meant for the operator; only errors whose class sets `public` show it to API clients.
    """

    kind: ClassVar[str] = "Unknown"
    #: Whether the message may be shown to API clients as it is.
    public: ClassVar[bool] = False
    #: A word for programs that API clients are told, such as ``model_not_found``.
    code: ClassVar[str | None] = None

    def __init__(self, message: str = "", *, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.message = message
        #: The plugin that has refused the request, where one has; for operators.
        self.plugin = ""
        if cause is not None:
            self.__cause__ = cause

    def __str__(self) -> str:
        return self.message


class ConfigError(DynamoError):
    """The set-up is wrong. The message is one line with place, fault and remedy."""

    kind = "ConfigError"


class PluginError(ConfigError):
    """A plugin is not installed, cannot be imported, or was made for another version of the API."""

    kind = "PluginError"


class InvalidArgument(DynamoError):
    """The request itself is wrong. `field` names the part of the request body, if one can be named."""

    kind = "InvalidArgument"
    public = True

    def __init__(self, message: str = "", *, field: str | None = None, cause: BaseException | None = None) -> None:
        super().__init__(message, cause=cause)
        self.field = field


class ModelNotFound(DynamoError):
    """The named model is not served here, though others are."""

    kind = "ModelNotFound"
    public = True


class Unavailable(DynamoError):
    """Nothing can serve the request now: no worker registered, or all of them are gone."""

    kind = "Unavailable"
    public = True


class ServiceOverloaded(DynamoError):
    """Every worker is busy. `retry_after` is in seconds."""

    kind = "ServiceOverloaded"
    public = True

    def __init__(
        self,
        message: str = "All workers are busy, please retry later",
        *,
        retry_after: float = 1.0,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message, cause=cause)
        self.retry_after = retry_after


class RateLimited(DynamoError):
    """The client asks more often, or for more, than it may in some time. It may retry after `retry_after` seconds.

    `limits` are told in headers. Names are those of `LIMITS`; `limit-…` and `remaining-…` are numbers, `reset-…` is how
    long until the limit is whole again, such as ``1.5s`` or ``6m0s``. Other names are not told.
    """

    kind = "RateLimited"
    public = True

    def __init__(
        self,
        message: str = "Rate limit reached, please retry later",
        *,
        retry_after: float = 1.0,
        limits: Mapping[str, str] | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message, cause=cause)
        self.retry_after = retry_after
        self.limits: Mapping[str, str] = limits or {}


class QuotaExceeded(DynamoError):
    """The client has used up what it may have. A retry will not help, and clients are told so."""

    kind = "QuotaExceeded"
    public = True


class WorkerOverloaded(DynamoError):
    """One worker refused the request because it is at capacity."""

    kind = "WorkerOverloaded"


class NotSupported(DynamoError):
    """The engine that serves the model does not offer what was asked for."""

    kind = "NotSupported"
    public = True


class Cancelled(DynamoError):
    """The caller gave up on the request."""

    kind = "Cancelled"


class CannotConnect(DynamoError):
    """A worker or a service could not be reached; nothing was sent to it."""

    kind = "CannotConnect"


class ConnectionTimeout(DynamoError):
    """A connection, or its acceptance of a request, took longer than the deadline."""

    kind = "ConnectionTimeout"


class Disconnected(DynamoError):
    """A connection broke after the request was sent over it."""

    kind = "Disconnected"


class ResponseTimeout(DynamoError):
    """The worker holds the connection but sent nothing within the deadline."""

    kind = "ResponseTimeout"


class DeadlineExceeded(DynamoError):
    """The request has used up the time that it has in all, whatever the workers did."""

    kind = "DeadlineExceeded"


class StreamIncomplete(DynamoError):
    """The stream ended, or lost items, before it was complete."""

    kind = "StreamIncomplete"


class EngineShutdown(DynamoError):
    """The engine is not running: it failed to start, crashed, or is being stopped."""

    kind = "EngineShutdown"


class Unknown(DynamoError):
    """An error that fits nowhere else, such as a foreign exception raised by an engine."""

    kind = "Unknown"


class HttpFault(DynamoError):
    """The HTTP request itself is wrong, before it has become a request to a model. It is told with this `status`."""

    public = True

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BackendError(DynamoError):
    """An error raised by an engine. Raise one of the variants: ``raise BackendError.InvalidArgument("…")``."""

    kind = "Backend(Unknown)"

    InvalidArgument: ClassVar[type[BackendInvalidArgument]]
    CannotConnect: ClassVar[type[BackendCannotConnect]]
    Disconnected: ClassVar[type[BackendDisconnected]]
    ConnectionTimeout: ClassVar[type[BackendConnectionTimeout]]
    ResponseTimeout: ClassVar[type[BackendResponseTimeout]]
    Cancelled: ClassVar[type[BackendCancelled]]
    EngineShutdown: ClassVar[type[BackendEngineShutdown]]
    StreamIncomplete: ClassVar[type[BackendStreamIncomplete]]
    Unknown: ClassVar[type[BackendUnknown]]


class BackendInvalidArgument(BackendError, InvalidArgument):
    """The engine or its set-up rejected the input."""

    kind = "Backend(InvalidArgument)"
    public = True


class BackendCannotConnect(BackendError, CannotConnect):
    """The engine cannot reach something it depends on."""

    kind = "Backend(CannotConnect)"


class BackendDisconnected(BackendError, Disconnected):
    """The engine lost a connection it depends on."""

    kind = "Backend(Disconnected)"


class BackendConnectionTimeout(BackendError, ConnectionTimeout):
    """The engine could not connect to something in time."""

    kind = "Backend(ConnectionTimeout)"


class BackendResponseTimeout(BackendError, ResponseTimeout):
    """Something the engine depends on did not answer in time."""

    kind = "Backend(ResponseTimeout)"


class BackendCancelled(BackendError, Cancelled):
    """The engine saw the request cancelled and reports it as an error."""

    kind = "Backend(Cancelled)"


class BackendEngineShutdown(BackendError, EngineShutdown):
    """The engine failed to start, crashed, or is not running."""

    kind = "Backend(EngineShutdown)"


class BackendStreamIncomplete(BackendError, StreamIncomplete):
    """The engine's stream ended before it could finish."""

    kind = "Backend(StreamIncomplete)"


class BackendUnknown(BackendError, Unknown):
    """An uncategorised failure of the engine."""

    kind = "Backend(Unknown)"


BackendError.InvalidArgument = BackendInvalidArgument
BackendError.CannotConnect = BackendCannotConnect
BackendError.Disconnected = BackendDisconnected
BackendError.ConnectionTimeout = BackendConnectionTimeout
BackendError.ResponseTimeout = BackendResponseTimeout
BackendError.Cancelled = BackendCancelled
BackendError.EngineShutdown = BackendEngineShutdown
BackendError.StreamIncomplete = BackendStreamIncomplete
BackendError.Unknown = BackendUnknown


#: Failures that cost a request its worker, or its engine something that the engine depends on. They are no bug of the
#: framework, and another try may succeed.
LOST_WORKER: tuple[type[DynamoError], ...] = (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    EngineShutdown,
    ResponseTimeout,
    StreamIncomplete,
)

#: Error types that metrics and logs ask for by name.
OVERLOAD, CANCELLED, INTERNAL = "overload", "cancelled", "internal"
#: The status of a request whose client left, or gave it up.
CLIENT_CLOSED_REQUEST = 499

#: What is told of an error whose own message is not for clients.
INTERNAL_MESSAGE = "Internal server error"
_OVERLOADED_MESSAGE = "Service temporarily unavailable: All workers are busy, please retry later"

#: How long a client may be asked to wait, in seconds.
_RETRY_MIN, _RETRY_MAX = 1, 60

#: What clients may be told of a limit, and how the names of those headers begin.
LIMITS = frozenset(f"{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens"))
LIMIT_HEADER = "x-ratelimit-"
_NO_HEADERS: Mapping[str, str] = {}


class HttpRow(NamedTuple):
    """The HTTP form of an error, the same for every API."""

    status: int
    #: The `error_type` label of request metrics, and the `class` label of failures.
    metric: str
    metric_class: str
    #: Told in place of the error's own message, which is told only if the class of the error is `public`.
    message: str | None = None
    #: None: that of the status.
    type: str | None = None
    param: str | None = None
    code: str | None = None
    #: Seconds.
    retry_after: int | None = None
    #: Further headers.
    headers: Mapping[str, str] = _NO_HEADERS


_BUSY = HttpRow(503, OVERLOAD, "CapacityExhausted", _OVERLOADED_MESSAGE, retry_after=_RETRY_MIN)
_LATE = HttpRow(504, "response_timeout", "DeadlineExceeded", "The model did not answer in time")
_LOST = HttpRow(
    503,
    "unavailable",
    "Unavailable",
    "The worker of this request was lost, please retry",
    retry_after=_RETRY_MIN,
)

#: The table. An error has the row of its class, or of the nearest base that has one.
HTTP_ROWS: dict[type[BaseException], HttpRow] = {
    InvalidArgument: HttpRow(400, "validation", "InvalidRequest"),
    # The status is the fault's own.
    HttpFault: HttpRow(400, "validation", "InvalidRequest"),
    ModelNotFound: HttpRow(404, "not_found", "NotFound", param="model", code="model_not_found"),
    Cancelled: HttpRow(CLIENT_CLOSED_REQUEST, CANCELLED, "Cancelled", "Request cancelled"),
    NotSupported: HttpRow(501, "not_implemented", "NotImplemented"),
    Unavailable: HttpRow(503, "unavailable", "Unavailable", retry_after=_RETRY_MIN),
    # `overload_status` stands in place of theirs.
    ServiceOverloaded: _BUSY,
    WorkerOverloaded: _BUSY,
    RateLimited: HttpRow(429, "rate_limited", "RateLimited", code="rate_limit_exceeded", retry_after=_RETRY_MIN),
    # Client SDKs retry every 429 that does not tell them not to.
    QuotaExceeded: HttpRow(
        429,
        "quota_exceeded",
        "QuotaExceeded",
        type="insufficient_quota",
        code="insufficient_quota",
        headers={"x-should-retry": "false"},
    ),
    DeadlineExceeded: _LATE,
    TimeoutError: _LATE,
    **dict.fromkeys(LOST_WORKER, _LOST),
    BaseException: HttpRow(500, INTERNAL, "Internal"),
}

#: The `type` of errors, by their status.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    CLIENT_CLOSED_REQUEST: "request_cancelled",
    501: "not_implemented_error",
    503: "service_unavailable",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_type(status: int) -> str:
    """Return the `type` of an error with this HTTP status."""
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")


#: Characters of a message to a client.
LONGEST_MESSAGE = 2000


class Problem(msgspec.Struct, frozen=True):
    """An error as an API client sees it. Every door words it in a body of its own.

    `metric` is the `error_type` label of request metrics. `param` names the field of the request that is wrong, `code`
    is a word for programs. Without `type` the error has that of its status. `retry_after` is in whole seconds.
    `headers` are sent along, beside ``Retry-After``. A message may quote what a client has sent, so it is cut at
    `LONGEST_MESSAGE` characters.
    """

    status: int
    message: str
    metric: str = "validation"
    type: str | None = None
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    headers: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        if len(self.message) > LONGEST_MESSAGE:
            msgspec.structs.force_setattr(self, "message", self.message[:LONGEST_MESSAGE] + "…")


def problem_of(error: BaseException, overload_status: int | None = None) -> Problem:
    """Return what a client is told of an error. Details that are not meant for clients are left out.

    `overload_status` is that of a request which is refused for load; without it the table's.
    """
    row = next(HTTP_ROWS[cls] for cls in type(error).__mro__ if cls in HTTP_ROWS)
    status, retry_after, headers = row.status, row.retry_after, row.headers
    if row.metric == OVERLOAD and overload_status is not None:
        status = overload_status
    if isinstance(error, ServiceOverloaded | RateLimited):
        # In this order a plugin's nan or infinity has bounds too.
        retry_after = math.ceil(min(max(_RETRY_MIN, error.retry_after), _RETRY_MAX))
    elif isinstance(error, HttpFault):
        status = error.status
    if isinstance(error, RateLimited) and error.limits:
        headers = {**headers, **dict(_limit_headers(error.limits))}
    message, param, code = row.message, row.param, row.code
    if isinstance(error, DynamoError):
        code = error.code or code
        if error.public and message is None:
            message = error.message
    if isinstance(error, InvalidArgument):
        param = error.field
    return Problem(
        status,
        INTERNAL_MESSAGE if message is None else message,
        row.metric,
        row.type,
        param,
        code,
        retry_after,
        headers,
    )


def _limit_headers(limits: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield limits as headers, without what no header can hold."""
    for name, value in limits.items():
        if name in LIMITS and value.isascii() and value.isprintable():
            yield f"{LIMIT_HEADER}{name}", value


def _tree(root: type[DynamoError]) -> Iterator[type[DynamoError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


_BY_KIND: dict[str, type[DynamoError]] = {cls.kind: cls for cls in _tree(DynamoError)}
_BY_KIND["Unknown"] = Unknown
_BY_KIND["Backend(Unknown)"] = BackendUnknown

#: How deep a chain of causes is carried and read; anything deeper is cut.
MAX_CAUSES = 8


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and what caused it, nearest first, at most `MAX_CAUSES` deep."""
    current: BaseException | None = error
    for _ in range(MAX_CAUSES + 1):
        if current is None:
            return
        yield current
        current = current.__cause__


def chain_has(error: BaseException, *types: type[BaseException]) -> bool:
    """Return whether the error, or anything that caused it, is one of the given types."""
    return any(isinstance(link, types) for link in chain(error))


def retryable(error: BaseException) -> bool:
    """Return whether another worker may do what this one refused or failed to do."""
    return isinstance(error, (*LOST_WORKER, WorkerOverloaded)) and not chain_has(error, InvalidArgument, Cancelled)


def blames_worker(error: BaseException) -> bool:
    """Return whether a failure says that its worker will not do for other requests either, rather than for this one."""
    if isinstance(error, BackendError):
        return isinstance(error, EngineShutdown)
    return isinstance(error, LOST_WORKER) and not isinstance(error, StreamIncomplete)


def lost_on_the_wire(error: BaseException) -> bool:
    """Return whether a failure is one of the wire to a worker, which may serve once it is reached again."""
    wire = (CannotConnect, ConnectionTimeout, Disconnected, StreamIncomplete)
    return isinstance(error, wire) and not isinstance(error, BackendError)


def as_backend_error(error: BaseException) -> DynamoError:
    """Return the error for an exception of an engine: a `DynamoError` as it is, anything else as Backend(Unknown)."""
    if isinstance(error, DynamoError):
        return error
    name, text = type(error).__name__, str(error)
    return BackendUnknown(f"{name}: {text}" if text else name, cause=error)


def to_wire(error: BaseException) -> WireError:
    """Return the error in the form that travels. Foreign exceptions become kind ``Unknown``."""
    links = [WireError(_kind_of(link), str(link)) for link in chain(error)]
    head = links[0]
    return WireError(
        head.kind,
        head.message,
        links[1:],
        getattr(error, "retry_after", None),
        getattr(error, "field", None),
        dict(error.limits) if isinstance(error, RateLimited) else {},
    )


def from_wire(wire: WireError) -> DynamoError:
    """Return the error that `to_wire` was given, with its type and chain of causes.

    An unknown kind becomes `Unknown`.
    """
    error = _build(wire)
    current = error
    for link in wire.causes[:MAX_CAUSES]:
        cause = _build(link)
        current.__cause__ = cause
        current = cause
    return error


def _kind_of(error: BaseException) -> str:
    return error.kind if isinstance(error, DynamoError) else "Unknown"


def _build(wire: WireError) -> DynamoError:
    cls = _BY_KIND.get(wire.kind, Unknown)
    if issubclass(cls, RateLimited):
        return cls(wire.message, retry_after=wire.retry_after or _RETRY_MIN, limits=wire.limits)
    if issubclass(cls, ServiceOverloaded) and wire.retry_after is not None:
        return cls(wire.message, retry_after=wire.retry_after)
    if issubclass(cls, InvalidArgument):
        return cls(wire.message, field=wire.field)
    return cls(wire.message)
