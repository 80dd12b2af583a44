"""The door of a listener: how many connections there may be, and how long one may take to say what it wants.

A connection is given to the HTTP server only with its first request header complete. Until then it holds a few bytes
and one timer, so a crowd that connects and says nothing, or says it byte by byte, costs little and not for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

#: Seconds until the first request header must be complete.
HEADER_TIMEOUT = 10.0
#: Bytes after which an unfinished header goes to the HTTP server all the same, which refuses it with a reason.
HEADER_LIMIT = 64 * 1024

_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Gate:
    """Makes a protocol for each new connection of one listener.

    `make` gives the HTTP server's protocol; `served` tells how many connections the server has now.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        served: Callable[[], int],
        *,
        max_connections: int,
        header_timeout: float = HEADER_TIMEOUT,
    ) -> None:
        self._make = make
        self._served = served
        self._max = max_connections
        self._header_timeout = header_timeout
        self._waiting: set[_Visitor] = set()
        self._room = 0
        self._closed = False
        #: Connections closed at once because there were too many.
        self.refused = 0
        #: Connections closed because their first header did not come in time.
        self.timed_out = 0

    def __call__(self) -> asyncio.BaseProtocol:
        """The protocol of a connection that has just been accepted."""
        if self._closed or not self._admit():
            self.refused += 1
            return _Refusal()
        visitor = _Visitor(self)
        # Counted before the transport exists: a crowd may be accepted in one turn of the loop.
        self._waiting.add(visitor)
        return visitor

    def close(self) -> None:
        """Closes every connection that has not begun a request. New ones are refused."""
        self._closed = True
        for visitor in list(self._waiting):
            visitor.leave()

    def _admit(self) -> bool:
        # Counting costs time per connection, so it is done only when the room seen last time is used up.
        if self._room <= 0:
            self._room = self._max - self._served() - len(self._waiting)
        if self._room <= 0:
            return False
        self._room -= 1
        return True


class _Refusal(asyncio.Protocol):
    """Closes its connection at once, without a word: an answer would cost what the limit is there to save."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).abort()


class _Visitor(asyncio.Protocol):
    """A connection whose first header is not complete."""

    __slots__ = ("_data", "_gate", "_timer", "_transport")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._gate._closed:
            self.leave()
            return
        self._timer = asyncio.get_running_loop().call_later(self._gate._header_timeout, self._late)

    def data_received(self, data: bytes) -> None:
        buffer = self._data
        seen = max(0, len(buffer) - 3)
        buffer += data
        # A bare line feed is no end of a header, but it is the HTTP server that says so.
        if buffer.find(b"\r\n\r\n", seen) >= 0 or buffer.find(b"\n\n", seen) >= 0 or len(buffer) > HEADER_LIMIT:
            self._hand_over()

    def connection_lost(self, exc: Exception | None) -> None:
        self._done()
        self._transport = None

    def leave(self) -> None:
        """Closes the connection."""
        self._done()
        if self._transport is not None:
            self._transport.close()

    def _hand_over(self) -> None:
        self._done()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        protocol = self._gate._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(bytes(self._data))

    def _late(self) -> None:
        self._gate.timed_out += 1
        if self._data and self._transport is not None:
            self._transport.write(_TIMED_OUT)
        self.leave()

    def _done(self) -> None:
        self._gate._waiting.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
