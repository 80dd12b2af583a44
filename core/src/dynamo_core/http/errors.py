"""The body of every HTTP error: the flat keys that operators' tools read, and the envelope that client SDKs read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from aiohttp import web

from dynamo_core.errors import (
    LOST_WORKER,
    Cancelled,
    DeadlineExceeded,
    DynamoError,
    InvalidArgument,
    ModelNotFound,
    NotSupported,
    ServiceOverloaded,
    Unavailable,
    WorkerOverloaded,
)

CLIENT_CLOSED_REQUEST = 499

INTERNAL_MESSAGE = "Internal server error"
OVERLOADED_MESSAGE = "Service temporarily unavailable"
LOST_MESSAGE = "The worker of this request was lost, please retry"
LATE_MESSAGE = "The model did not answer in time"

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

_encoder = msgspec.json.Encoder()


class _Detail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class _Body(msgspec.Struct):
    error: _Detail
    message: str
    type: str
    code: int


def error_type(status: int) -> str:
    """The `type` of an error with this HTTP status."""
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")


def error_body(
    status: int, message: str, *, type: str | None = None, param: str | None = None, code: str | None = None
) -> bytes:
    """``{"error": {"message", "type", "param", "code"}, "message", "type", "code"}`` as JSON.

    The outer `code` is the HTTP status; the inner one is a word for programs, such as ``model_not_found``. `param`
    names the field of the request that is wrong.
    """
    kind = type or error_type(status)
    detail = _Detail(message, kind, param, code)
    try:
        return _encoder.encode(_Body(detail, message, kind, status))
    except UnicodeEncodeError:
        # Half a surrogate pair, quoted from a client's body.
        message = message.encode("utf-8", "replace").decode()
        return _encoder.encode(_Body(_Detail(message, kind, None, code), message, kind, status))


def error_response(
    status: int,
    message: str,
    *,
    type: str | None = None,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """A response with `error_body`."""
    return web.Response(
        status=status,
        reason=_REASONS.get(status),
        body=error_body(status, message, type=type, param=param, code=code),
        content_type="application/json",
        headers=headers,
    )


#: Statuses that have no reason phrase in the standard library.
_REASONS = {CLIENT_CLOSED_REQUEST: "Client Closed Request", 529: "Site Is Overloaded"}


def response_for(error: DynamoError) -> web.Response:
    """The response to a request that ended with this error before its first byte. Shows public messages only."""
    if isinstance(error, InvalidArgument):
        return error_response(400, error.message or "Invalid request", param=error.field)
    if isinstance(error, ModelNotFound):
        return error_response(404, error.message or "Model not found", code="model_not_found")
    if isinstance(error, ServiceOverloaded):
        seconds = max(1, math.ceil(error.retry_after))
        message = f"{OVERLOADED_MESSAGE}: {error.message}"
        return error_response(503, message, headers={"Retry-After": str(seconds)})
    if isinstance(error, WorkerOverloaded):
        return response_for(ServiceOverloaded())
    if isinstance(error, Unavailable):
        return error_response(503, error.message or OVERLOADED_MESSAGE, headers={"Retry-After": "1"})
    if isinstance(error, Cancelled):
        return error_response(CLIENT_CLOSED_REQUEST, "Request cancelled")
    if isinstance(error, NotSupported):
        return error_response(501, error.message or HTTPStatus.NOT_IMPLEMENTED.phrase)
    if isinstance(error, DeadlineExceeded):
        return error_response(504, LATE_MESSAGE)
    if isinstance(error, LOST_WORKER):
        return error_response(503, LOST_MESSAGE, headers={"Retry-After": "1"})
    return error_response(500, INTERNAL_MESSAGE)
