"""Server-sent events to one client, without aiohttp's writer once the headers are out.

aiohttp's `StreamResponse.write` is a coroutine: it needs a task that wakes for every piece. Here a callback writes
straight to the transport, with the chunk framing of HTTP/1.1 made by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from aiohttp import HttpVersion11, web
from dynamo_http import set_probe

from dynamo_generation.answers import raw_response
from dynamo_generation.answers.framing import EVENTS, Framing
from dynamo_generation.requests.ignored_fields import headers_of

#: Seconds of silence after which a client that may be gone is written to.
PROBE_AFTER = 1.0
#: Bytes that a client which is behind takes until it is written to again.
_STEP = 64 * 1024

#: How much goes out through aiohttp with the headers; less than what makes its `write` wait for the client.
_WITH_HEADERS = 32 * 1024


class ClientGone(Exception):
    """The client is not there any more, or does not read."""


class _Response(web.StreamResponse):
    # Headers wait for the first piece of the body, so that both leave in one write. Should aiohttp drop this switch,
    # there will be two writes and nothing else changes.
    _send_headers_immediately = False


class EventStream:
    """One streamed response: events, or what `framing` says. `stall` is in seconds, `high_water` in bytes."""

    __slots__ = (
        "_chunked",
        "_clock",
        "_high_water",
        "_http",
        "_raw",
        "_stall",
        "_transport",
        "framing",
        "last_write",
        "response",
    )

    def __init__(self, http: web.Request, *, stall: float, high_water: int, framing: Framing = EVENTS) -> None:
        self.framing = framing
        self._http = http
        self._stall = stall
        self._clock = asyncio.get_running_loop().time
        self._high_water = high_water
        self._chunked = http.version >= HttpVersion11
        self._raw = False
        self._transport: asyncio.Transport | None = None
        #: The response, once its headers are out.
        self.response: web.StreamResponse | None = None
        #: When the last bytes were written, in the loop's time.
        self.last_write = 0.0

    def set_probe(self, probe: Callable[[], None] | None) -> None:
        """Have `probe` called, now and then, once the client has closed its sending half."""
        set_probe(self._http, probe)

    async def open(self, first: bytes) -> None:
        """Send the headers and the first bytes.

        Raises:
            ClientGone: it is too late.
        """
        self._transport = self._http.transport
        if self._transport is None:
            raise ClientGone
        if self._high_water >= _STEP:
            # The client is written to again each time that it has taken a part of what waits.
            self._transport.set_write_buffer_limits(self._high_water, self._high_water - _STEP)
        if raw_response.fast_path(self._http) and raw_response.has_room(self._http, len(first)):
            self._raw = True
            head = raw_response.stream_head(self._http, self.framing.content_type)
            chunk = b"%b%x\r\n%b\r\n" % (head, len(first), first) if first else head
            try:
                await self._http.writer.write(chunk)
            except ConnectionError as error:
                raise ClientGone from error
            self.response = raw_response.sent()
            self.last_write = self._clock()
            return
        response = _Response(
            status=HTTPStatus.OK,
            headers={
                "Content-Type": self.framing.content_type,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers_of(self._http),
            },
        )
        if self._chunked:
            response.enable_chunked_encoding()
        else:
            # Before HTTP/1.1 only the end of the connection ends a body of unknown length.
            response.force_close()
        await response.prepare(self._http)
        self.response = response
        try:
            await response.write(first[:_WITH_HEADERS])
        except ConnectionError as error:
            raise ClientGone from error
        self.last_write = self._clock()
        if len(first) > _WITH_HEADERS:
            self.push(first[_WITH_HEADERS:])

    def push(self, data: bytes) -> bool:
        """Write without waiting; whether so much waits for the client now that `drained` is due.

        Raises:
            ClientGone: the connection is closed.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ClientGone
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        self.last_write = self._clock()
        return transport.get_write_buffer_size() > self._high_water

    async def drained(self) -> None:
        """Return once the client has taken a part of what waits.

        Raises:
            ClientGone: it did not within the deadline; the connection was cut.
        """
        try:
            async with asyncio.timeout(self._stall):
                await self._http.writer.drain()
        except (TimeoutError, ConnectionError) as error:
            self._abort()
            raise ClientGone from error

    async def end(self, last: bytes) -> web.StreamResponse:
        """Write the last bytes and end the response as it should end.

        Raises:
            ClientGone: the client left or did not read it in time.
        """
        response = self.response
        if response is None:
            raise ClientGone
        try:
            if raw_response.has_room(self._http, len(last)):
                await self._finish(response, last)
            else:
                async with asyncio.timeout(self._stall):
                    await self._finish(response, last)
        except (TimeoutError, ConnectionError) as error:
            self._abort()
            raise ClientGone from error
        return response

    async def _finish(self, response: web.StreamResponse, last: bytes) -> None:
        if self._raw:
            end = b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if last else b"0\r\n\r\n"
            await self._http.writer.write_eof(end)
        else:
            await response.write_eof(last)

    def cut(self, last: bytes) -> None:
        """Write the last bytes and close the connection without ending the response.

        No client takes it for a whole one. A client that does not read them loses the connection after the deadline.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self.push(last)
        # `abort` would throw away what has not left yet, `close` lets it out first.
        transport.close()
        asyncio.get_running_loop().call_later(self._stall, transport.abort)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
