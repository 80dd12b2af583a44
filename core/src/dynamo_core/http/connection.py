"""One connection as the HTTP library serves it, with what is missing there."""

from __future__ import annotations

from aiohttp import web
from aiohttp.http import RawRequestMessage


class Connection(web.RequestHandler):
    """Tells a handler at once that the rest of its request's body is not HTTP.

    The library keeps such a fault until the handler is done, which waits for a body that will never come.
    """

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """Parses what has come."""
        super().data_received(data)
        # Usually nothing waits behind the request that is served. Should the library rename this, it only tells later.
        waiting = getattr(self, "_messages", None)
        if waiting and not isinstance(waiting[-1][0], RawRequestMessage):
            request = getattr(self, "_current_request", None)
            if request is not None and not request.content.is_eof():
                request.content.set_exception(web.RequestPayloadError("the rest of the body is not HTTP"))
