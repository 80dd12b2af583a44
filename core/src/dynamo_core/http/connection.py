"""One connection as the HTTP library serves it, with what is missing there."""

from __future__ import annotations

from typing import Any

from aiohttp import StreamReader, web
from aiohttp.http import RawRequestMessage


class Connection(web.RequestHandler):
    """Tells a handler at once that the rest of its request's body is not HTTP.

    The library keeps such a fault until the handler is done, which waits for a body that will never come. And it reads
    on behind an answer that was given early, so that the client sees the answer, for some seconds: here, also for no
    more than some bytes.
    """

    __slots__ = ("_early", "_left")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: The body behind an answer that was given early, and how many bytes may still come before it ends.
        self._early: StreamReader | None = None
        self._left = 0

    def answered_early(self, body: StreamReader, most: int) -> None:
        """A body will not be read: closes the connection if more than `most` bytes come before it ends."""
        self._early, self._left = body, most

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
