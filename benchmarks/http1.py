"""A light HTTP/1.1 client: one request at a time on a kept connection, with only the parsing that measuring needs.

A full client would use as much CPU as the server it measures, on the same small machine.
"""

import asyncio
import re
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Final, cast
from urllib.parse import urlsplit

HEAD_LIMIT: Final = 64 * 1024
BODY_LIMIT: Final = 16 * 1024 * 1024
CONNECT_DEADLINE: Final = 10.0

_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[^\r\n]*\bchunked[ \t]*\r\n", re.IGNORECASE)
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;|$)")
_CLOSE = re.compile(rb"\r\nconnection:[ \t]*close[ \t]*\r\n", re.IGNORECASE)

_CONTENT = re.compile(rb'"(?:reasoning_)?content":\s*"[^"]')
_DONE = re.compile(rb"^data: ?\[DONE\]\r?$", re.MULTILINE)
_ERROR = re.compile(rb'^data: ?(\{"error".*)$', re.MULTILINE)
_FINISH = re.compile(rb'"finish_reason":\s*"([^"]+)"')
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')


class BadResponse(Exception):
    """What came back is not an HTTP/1.1 response that this client can read."""


class ResponseParser:
    """Reads one response from pieces cut anywhere.

    `status` is 0 until the head is in. `keep_alive` says whether the connection can carry another request.
    """

    __slots__ = ("_chunked", "_held", "_in_trailer", "_left", "_skip", "_until_eof", "done", "keep_alive", "status")

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self.keep_alive = True
        self._held = b""
        self._left = 0
        self._skip = 0
        self._chunked = False
        self._in_trailer = False
        self._until_eof = False

    def feed(self, data: bytes) -> bytes:
        """Take the next piece and return the body bytes in it. Raise BadResponse."""
        if self.done:
            raise BadResponse("bytes came after the end of the response")
        if self._held:
            data, self._held = self._held + data, b""
        start = 0
        if not self.status:
            start = self._read_head(data)
            if not self.status:
                self._hold(data[start:])
                return b""
        if self._chunked:
            return self._read_chunks(data, start)
        if self._until_eof:
            return data[start:]
        body = data[start : start + self._left]
        self._left -= len(body)
        if not self._left:
            self._finish(data, start + len(body))
        return body

    def feed_eof(self) -> None:
        """Handle the close of the peer.

        End a body that has no length; raises BadResponse if anything is still to come.
        """
        self.keep_alive = False
        if self._until_eof:
            self.done = True
        elif not self.done:
            raise BadResponse("the connection was closed before the response was complete")

    def _read_head(self, data: bytes) -> int:
        """Read the head, past any 1xx answers. Return where the body (or the unread rest) starts."""
        start = 0
        while (end := data.find(b"\r\n\r\n", start)) >= 0:
            head = data[start : end + 2]
            start = end + 4
            if not head.startswith(b"HTTP/1.") or not head[9:12].isdigit():
                raise BadResponse(f"not an HTTP/1.1 status line: {head[:60]!r}")
            status = int(head[9:12])
            if status < 200:
                continue
            self.status = status
            self.keep_alive = head.startswith(b"HTTP/1.1") and _CLOSE.search(head) is None
            if _CHUNKED.search(head):
                self._chunked = True
            elif length := _CONTENT_LENGTH.search(head):
                self._left = int(length[1])
            elif status not in (204, 304):
                self._until_eof = True
                self.keep_alive = False
            break
        return start

    def _read_chunks(self, data: bytes, at: int) -> bytes:
        pieces: list[bytes] = []
        end = len(data)
        while at < end:
            if self._left:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._skip = 2
            elif self._skip:
                step = min(self._skip, end - at)
                at += step
                self._skip -= step
            else:
                eol = data.find(b"\r\n", at)
                if eol < 0:
                    self._hold(data[at:])
                    break
                line = data[at:eol]
                at = eol + 2
                if self._in_trailer:
                    if not line:
                        self._finish(data, at)
                        break
                    continue
                self._left = _chunk_size(line)
                self._in_trailer = not self._left
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _hold(self, rest: bytes) -> None:
        if len(rest) > HEAD_LIMIT:
            raise BadResponse(f"a head or chunk line is longer than {HEAD_LIMIT} bytes")
        self._held = rest

    def _finish(self, data: bytes, at: int) -> None:
        if at != len(data):
            raise BadResponse("bytes came after the end of the response")
        self.done = True


def _chunk_size(line: bytes) -> int:
    size = _SIZE.match(line)
    if size is None:
        raise BadResponse(f"not a chunk size: {line[:60]!r}")
    return int(size[1], 16)


class EventCounter:
    """Counts the events of a server-sent stream and finds how it ended, without decoding each one.

    Lines are counted, not blank-line blocks, so both line endings work; an OpenAI event has one `data:` line. A
    JSON text cannot hold a raw line break or an unescaped quote, so the patterns never match inside generated text.
    """

    __slots__ = ("_recent", "_tail", "events", "first_content")

    def __init__(self) -> None:
        self.events = 0
        self.first_content: float | None = None
        self._tail = b""
        # The ending needs about six lines; each entry holds at least one, so 32 entries always reach far enough back.
        self._recent: deque[bytes] = deque(maxlen=32)

    def feed(self, body: bytes, now: float) -> None:
        """Take the next body bytes, which arrived at `now` (seconds on the caller's clock)."""
        if self._tail:
            body = self._tail + body
        cut = body.rfind(b"\n") + 1
        self._tail = body[cut:]
        if not cut:
            return
        lines = body[:cut]
        self.events += lines.count(b"\ndata:") + lines.startswith(b"data:")
        self._recent.append(lines[-4096:])
        if self.first_content is None and _CONTENT.search(lines):
            self.first_content = now

    def ending(self) -> "StreamEnding":
        """Return how the stream ended, from its last lines."""
        last = b"".join(self._recent)
        finish = _FINISH.findall(last)
        tokens = _COMPLETION_TOKENS.findall(last)
        error = _ERROR.search(last)
        return StreamEnding(
            done=_DONE.search(last) is not None,
            finish_reason=finish[-1].decode() if finish else None,
            completion_tokens=int(tokens[-1]) if tokens else None,
            error=error[1][:200].decode(errors="replace") if error else None,
        )


@dataclass(frozen=True, slots=True)
class StreamEnding:
    """The last words of a stream. `completion_tokens` is None when the server sent no usage."""

    done: bool
    finish_reason: str | None
    completion_tokens: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Reply:
    """One response. Times are seconds of `time.perf_counter`. `body` is empty for a stream, `stream` None for unary."""

    status: int
    body: bytes
    stream: EventCounter | None
    sent: float
    first_byte: float
    ended: float


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an OpenAI-compatible server is. `prefix` is the path before `/v1`."""

    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> "Endpoint":
        """Parse a base URL, with or without a closing `/v1`. Raise ValueError naming what is wrong."""
        parts = urlsplit(url)
        if parts.scheme != "http":
            raise ValueError(f"{url!r}: only http:// can be measured")
        if not parts.hostname:
            raise ValueError(f"{url!r} names no host")
        return cls(parts.hostname, parts.port or 80, parts.path.rstrip("/").removesuffix("/v1"))

    def get(self, path: str) -> bytes:
        """Return the bytes of a GET request."""
        return f"GET {self.prefix}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n\r\n".encode()

    def post(self, path: str, body: bytes) -> bytes:
        """Return the bytes of a POST request with a JSON body."""
        head = (
            f"POST {self.prefix}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Connection(asyncio.Protocol):
    """A kept connection. `exchange` sends one request and waits for its whole response."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Reply] | None = None
        self._parser = ResponseParser()
        self._counter: EventCounter | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._sent = 0.0
        self._first_byte = 0.0

    @classmethod
    async def open(cls, endpoint: Endpoint) -> "Connection":
        """Connect within CONNECT_DEADLINE. Raise OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_DEADLINE):
            _, connection = await loop.create_connection(cls, endpoint.host, endpoint.port)
        return connection

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, *, stream: bool, timeout: float) -> Reply:
        """Send `request` and return the response; `timeout` is in seconds.

        The connection is unusable after a failure. Raise TimeoutError, ConnectionError or BadResponse.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionError("the connection is closed")
        waiter: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiter = waiter
        self._parser = ResponseParser()
        self._counter = EventCounter() if stream else None
        self._parts = []
        self._size = 0
        self._first_byte = 0.0
        self._sent = perf_counter()
        self._transport.write(request)
        try:
            async with asyncio.timeout(timeout):
                return await waiter
        finally:
            self._waiter = None
            if not (waiter.done() and not waiter.cancelled() and waiter.exception() is None):
                self.abort()

    def close(self) -> None:
        """Close the connection. May be called again."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Drop the connection at once. May be called again."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but ancestry

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        waiter = self._waiter
        if waiter is None or waiter.done():
            self.abort()
            return
        if not self._first_byte:
            self._first_byte = now
        parser = self._parser
        try:
            body = parser.feed(data)
            if body:
                if self._counter is not None and parser.status == 200:
                    self._counter.feed(body, now)
                else:
                    self._keep(body)
        except BadResponse as error:
            waiter.set_exception(error)
            return
        if parser.done:
            self._resolve(waiter, now)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if exc is not None:
            waiter.set_exception(ConnectionError(f"the connection was lost: {exc}"))
            return
        try:
            self._parser.feed_eof()
        except BadResponse as error:
            waiter.set_exception(error)
            return
        self._resolve(waiter, perf_counter())

    def _keep(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > BODY_LIMIT:
            raise BadResponse(f"the body is longer than {BODY_LIMIT} bytes")
        self._parts.append(body)

    def _resolve(self, waiter: "asyncio.Future[Reply]", now: float) -> None:
        status = self._parser.status
        stream = self._counter if status == 200 else None
        waiter.set_result(Reply(status, b"".join(self._parts), stream, self._sent, self._first_byte, now))
        if not self._parser.keep_alive and self._transport is not None:
            self._transport.close()


async def fetch(endpoint: Endpoint, path: str, *, timeout: float) -> Reply:
    """GET `path` on a connection of its own; `timeout` (seconds) is for the exchange. Raise what `exchange` raises."""
    connection = await Connection.open(endpoint)
    try:
        return await connection.exchange(endpoint.get(path), stream=False, timeout=timeout)
    finally:
        connection.close()
