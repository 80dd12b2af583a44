"""One HTTP connection: aiohttp's request handler, with its gaps filled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from dynamo_core.contracts.http_route import ErrorResponse
from dynamo_core.errors import INTERNAL, INTERNAL_MESSAGE, Problem

from dynamo_http.compressed_bodies import BufferedRequest
from dynamo_http.half_closed import SUPPORTED, EarlyStatusLine, was_reset

#: Most headers of a request, and most bytes of its first line and of each header.
MAX_HEADERS = 128
MAX_FIELD = 8190
#: Seconds between two looks at a connection whose client has closed its sending half.
_LOOK = 0.25

_TOO_LARGE = (
    f"The request has more than {MAX_HEADERS} headers, or its first line or a header has more than {MAX_FIELD} bytes"
)


def set_probe(request: web.Request, probe: Callable[[], None] | None) -> None:
    """Set what writes something that clients ignore into the answer to `request`, which has begun.

    The connection calls `probe` again and again once the client has closed its sending half, to find out whether it
    still reads.
    """
    if isinstance(request.protocol, Connection):
        request.protocol.probe = probe


class Connection(web.RequestHandler):
    """A connection that answers invalid HTTP like every other error, by `respond_error`.

    It tells a handler at once that the rest of its request's body is not HTTP. The library keeps such a fault until the
    handler is done, which waits for a body that will never come. And it reads on behind an answer that was given early,
    so that the client sees the answer, for some seconds: here, also for no more than some bytes.

    A client may close its sending half behind its last request: it gets its answers, and then the connection is closed.
    The bytes of the answer find out whether the client is gone instead; before there are any, the connection sends the
    first ones of the status line ahead. `probe` writes something into an answer that has begun, if nothing else has
    been written lately. With TLS, whose layer here knows no half, and where the kernel does not tell of a reset, the
    connection is closed at once.
    """

    __slots__ = ("_early", "_left", "_look_timer", "_respond_error", "half_closed", "probe")

    def __init__(self, *args: Any, respond_error: ErrorResponse, **options: Any) -> None:
        super().__init__(*args, **options)
        self._respond_error = respond_error
        #: The body behind an answer that was given early, and how many bytes may still come before it ends.
        self._early: StreamReader | None = None
        self._left = 0
        self._look_timer: asyncio.TimerHandle | None = None
        #: Whether the client has closed its sending half and gets the rest of its answers.
        self.half_closed = False
        self.probe: Callable[[], None] | None = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open if the client waits for an answer."""
        if self.half_closed:
            return True
        waiter = self._waiter
        idle = waiter is not None and not waiter.done()
        if idle or self._force_close or not SUPPORTED or self.ssl_context is not None:
            return False
        self.half_closed = True
        self.close_after_last()
        self._look_timer = self._loop.call_later(_LOOK, self._look)
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        """End what watches the connection, and cancel its handler."""
        if self._look_timer is not None:
            self._look_timer.cancel()
            self._look_timer = None
        super().connection_lost(exc)

    def close_after_last(self) -> None:
        """Close the connection after the answer to the request that is served now, unless another one waits."""
        if not self._messages:
            self.close()

    def _look(self) -> None:
        """Find out whether the client is gone."""
        transport, request = self.transport, self._current_request
        if transport is None or transport.is_closing():
            return
        if was_reset(transport):
            transport.abort()
            return
        if request is not None and not request.content.is_eof():
            # The rest of its body will never come.
            transport.close()
            return
        if request is not None and not request.writer.output_size:
            self._probe_early(transport)
        elif request is not None and self.probe is not None:
            self.probe()
        self._look_timer = self._loop.call_later(_LOOK, self._look)

    def _probe_early(self, transport: Any) -> None:
        now = self._loop.time()
        if not isinstance(transport, EarlyStatusLine):
            early: Any = EarlyStatusLine(transport, partial(self._answer_begins, transport), now)
            self.transport = transport = early
        transport.probe(now)

    def _answer_begins(self, transport: asyncio.Transport) -> None:
        if self.transport is not None:
            self.transport = transport

    def answered_early(self, body: StreamReader, most: int) -> None:
        """Close the connection if more than `most` bytes of a body come that is not read."""
        self._early, self._left = body, most

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to what is not HTTP. The library's own repeats what was sent, in HTTP/1.0."""
        # Logs it, and raises if an answer had begun.
        super().handle_error(request, status, exc, message)
        if isinstance(exc, LineTooLong) or (message or "").startswith("Too many headers"):
            problem = Problem(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LARGE)
        elif isinstance(exc, HttpProcessingError):
            problem = Problem(HTTPStatus.BAD_REQUEST, "The request is not HTTP/1.1, or not framed as it says")
        else:
            problem = Problem(status, INTERNAL_MESSAGE, INTERNAL)
        answer = self._respond_error(problem)
        if isinstance(request, BufferedRequest):
            request.answer_in(HttpVersion11)
        answer.force_close()
        return answer

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
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
