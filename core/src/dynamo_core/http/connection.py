"""One connection as the HTTP library serves it, with what is missing there."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from dynamo_core.contracts.frontend import ErrorResponse
from dynamo_core.errors import INTERNAL, INTERNAL_MESSAGE, Problem
from dynamo_core.http.packed import NamedRequest

#: Most headers of a request, and most bytes of its first line and of each header.
MAX_HEADERS = 128
MAX_FIELD = 8190

_TOO_LARGE = (
    f"The request has more than {MAX_HEADERS} headers, or its first line or a header has more than {MAX_FIELD} bytes"
)


class Connection(web.RequestHandler):
    """Words what is not HTTP as every other error, by `respond_error`, and tells a handler at once that the rest of its
    request's body is not.

    The library keeps such a fault until the handler is done, which waits for a body that will never come. And it reads
    on behind an answer that was given early, so that the client sees the answer, for some seconds: here, also for no
    more than some bytes.
    """

    __slots__ = ("_early", "_left", "_respond_error")

    def __init__(self, *args: Any, respond_error: ErrorResponse, **options: Any) -> None:
        super().__init__(*args, **options)
        self._respond_error = respond_error
        #: The body behind an answer that was given early, and how many bytes may still come before it ends.
        self._early: StreamReader | None = None
        self._left = 0

    def answered_early(self, body: StreamReader, most: int) -> None:
        """A body will not be read: closes the connection if more than `most` bytes come before it ends."""
        self._early, self._left = body, most

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is not HTTP. The library's own repeats what was sent, in HTTP/1.0."""
        # Logs it, and raises if an answer had begun.
        super().handle_error(request, status, exc, message)
        if isinstance(exc, LineTooLong) or (message or "").startswith("Too many headers"):
            problem = Problem(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LARGE)
        elif isinstance(exc, HttpProcessingError):
            problem = Problem(HTTPStatus.BAD_REQUEST, "The request is not HTTP/1.1, or not framed as it says")
        else:
            problem = Problem(status, INTERNAL_MESSAGE, INTERNAL)
        answer = self._respond_error(problem)
        if isinstance(request, NamedRequest):
            request.answer_in(HttpVersion11)
        answer.force_close()
        return answer

    def data_received(self, data: bytes) -> None:
        """Parses what has come."""
        early = self._early
        if early is not None:
            self._left -= len(data)
            if early.is_eof():
                self._early = None
            elif self._left < 0:
                self.force_close()
        super().data_received(data)
        # Usually nothing waits behind the request that is served. Should the library rename this, it only tells later.
        waiting = getattr(self, "_messages", None)
        if waiting and not isinstance(waiting[-1][0], RawRequestMessage):
            request = getattr(self, "_current_request", None)
            if request is not None and not request.content.is_eof():
                request.content.set_exception(web.RequestPayloadError("the rest of the body is not HTTP"))
