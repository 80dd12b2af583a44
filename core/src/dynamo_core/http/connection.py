"""One connection as the HTTP library serves it, with what is missing there."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from aiohttp.http import RawRequestMessage


class Connection(web.RequestHandler):
    """Tells a handler at once that the rest of its request's body is not HTTP.

    The library keeps such a fault until the handler is done, which waits for a body that will never come. And it reads
    on behind an answer that was given early, so that the client sees the answer, for some seconds: here, also for no
    more than some bytes.
    """

    __slots__ = ("_left",)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: Bytes that may still come behind an early answer; None while a handler wants what comes.
        self._left: int | None = None

    def answered_early(self, most: int) -> None:
        """The body of the request will not be read: closes the connection once `most` bytes more have come."""
        self._left = most

    def awaits_body(self) -> None:
        """Another request is being served."""
        self._left = None

    def data_received(self, data: bytes) -> None:
        """Parses what has come."""
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                self.force_close()
        super().data_received(data)
        # Usually nothing waits behind the request that is served. Should the library rename this, it only tells later.
        waiting = getattr(self, "_messages", None)
        if waiting and not isinstance(waiting[-1][0], RawRequestMessage):
            request = getattr(self, "_current_request", None)
            if request is not None and not request.content.is_eof():
                request.content.set_exception(web.RequestPayloadError("the rest of the body is not HTTP"))
