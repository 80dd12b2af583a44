"""The body of every HTTP error: flat keys for operators' tools, and the envelope for client SDKs."""

from __future__ import annotations

import msgspec
from aiohttp import web
from dynamo_core.errors import CLIENT_CLOSED_REQUEST, Problem, error_type

_encoder = msgspec.json.Encoder()

#: Statuses that have no reason phrase in the standard library.
_REASONS = {CLIENT_CLOSED_REQUEST: "Client Closed Request", 529: "Site Is Overloaded"}


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


def error_body(problem: Problem) -> bytes:
    """Return ``{"error": {"message", "type", "param", "code"}, "message", "type", "code"}`` as JSON.

    The outer `code` is the HTTP status; the inner one is a word for programs, such as ``model_not_found``.
    """
    message, kind = problem.message, problem.type or error_type(problem.status)
    detail = _Detail(message, kind, problem.param, problem.code)
    try:
        return _encoder.encode(_Body(detail, message, kind, problem.status))
    except UnicodeEncodeError:
        # Half a surrogate pair, quoted from a client's body.
        message = message.encode("utf-8", "replace").decode()
        detail = _Detail(message, kind, None, problem.code)
        return _encoder.encode(_Body(detail, message, kind, problem.status))


def error_response(problem: Problem, body: bytes | None = None) -> web.Response:
    """Return the response to a request of which nothing has been answered yet; without `body` with `error_body`."""
    response = web.Response(
        status=problem.status,
        reason=_REASONS.get(problem.status),
        body=error_body(problem) if body is None else body,
        content_type="application/json",
        headers=problem.headers,
    )
    if problem.retry_after is not None:
        response.headers["Retry-After"] = str(problem.retry_after)
    return response
