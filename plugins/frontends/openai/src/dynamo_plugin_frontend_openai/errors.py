"""What a client is told when something goes wrong: one table from errors to HTTP."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from aiohttp import web
from dynamo_core import errors as core
from dynamo_core.http.errors import LATE_MESSAGE, LOST_MESSAGE, error_body, error_response, error_type
from dynamo_core.protocol.reading import shown

log = logging.getLogger(__name__)

#: The body of every refusal for load, whoever refused.
OVERLOADED = "Service temporarily unavailable: All workers are busy, please retry later"

#: How long a client may be asked to wait, in seconds.
_RETRY_MIN, _RETRY_MAX = 1, 60


class HttpFault(Exception):
    """A fault of the HTTP request itself, before it has become a request to a model."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class TemplateFault(Exception):
    """A chat template took too long, or too much memory, and was stopped. The message is for the client too."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BrokenCall(core.DynamoError):
    """The model began a call of a tool in a stream, and did not end it as a call: a client must not carry it out."""

    def __init__(self, name: str, choice: int) -> None:
        super().__init__(f"The model broke off its call of tool {shown(name)!r}: the arguments are no JSON object")
        self.choice = choice


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as a client sees it. `metric` is the `error_type` label; `retry_after` is in whole seconds."""

    status: int
    message: str
    metric: str
    type: str | None = None
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    #: The choice of a stream that cannot be gone on with.
    choice: int | None = None

    def response(self) -> web.Response:
        """The answer to a request of which nothing has been answered yet."""
        response = error_response(self.status, self.message, type=self.type, param=self.param, code=self.code)
        if self.retry_after is not None:
            response.headers["Retry-After"] = str(self.retry_after)
        return response

    def event(self) -> bytes:
        """The last item of a stream that broke."""
        body = error_body(self.status, self.message, type=self.type, param=self.param, code=self.code)
        if self.choice is not None:
            # As others have it: a chunk whose choice has ended with an error.
            body = b'%b,"choices":[{"index":%d,"delta":{},"finish_reason":"error"}]}' % (body[:-1], self.choice)
        return b"data: %b\n\n" % body


def problem_of(error: BaseException, overload_status: int = 503) -> Problem:
    """How to tell a client about an error. Details that are not meant for clients are left out.

    `overload_status` is that of a request which is refused for load.
    """
    match error:
        case HttpFault():
            return Problem(error.status, error.message, "validation")
        case BrokenCall():
            return Problem(500, error.message, "internal", code="invalid_tool_call", choice=error.choice)
        case TemplateFault():
            return Problem(500, error.message, "internal")
        case core.ModelNotFound():
            return Problem(404, error.message, "not_found", param="model", code="model_not_found")
        case core.InvalidArgument():
            return Problem(400, error.message, "validation", param=error.field)
        case core.ServiceOverloaded():
            return _overloaded(error.retry_after, overload_status)
        case core.WorkerOverloaded():
            return _overloaded(_RETRY_MIN, overload_status)
        case core.Unavailable():
            return Problem(503, error.message, "unavailable", type="service_unavailable", retry_after=_RETRY_MIN)
        case core.NotSupported():
            return Problem(501, error.message, "not_implemented")
        case core.Cancelled():
            return Problem(499, "Request cancelled", "cancelled")
        case core.DeadlineExceeded() | TimeoutError():
            return Problem(504, LATE_MESSAGE, "response_timeout")
        case _ if isinstance(error, core.LOST_WORKER):
            return Problem(503, LOST_MESSAGE, "unavailable", type="service_unavailable", retry_after=_RETRY_MIN)
        case _:
            return Problem(500, "Internal server error", "internal")


def report(problem: Problem, error: BaseException, request_id: str) -> None:
    """Logs what the client is not told. Faults of the client are no news, and that a worker was lost is logged where
    it was noticed."""
    if isinstance(error, BrokenCall):
        log.warning("request %s failed: %s", request_id, error)
    elif problem.metric == "internal":
        log.error("request %s failed: %s", request_id, error, exc_info=error)
    elif problem.metric == "response_timeout":
        log.warning("request %s was given up: %s", request_id, error)


def _overloaded(retry_after: float, status: int) -> Problem:
    seconds = min(max(math.ceil(retry_after), _RETRY_MIN), _RETRY_MAX)
    return Problem(status, OVERLOADED, "overload", type=error_type(status), retry_after=seconds)
