"""Limits on the connections of a listener and on the time to their first header.

A connection is given to the HTTP server only with its first request header complete. Until then it holds a few bytes
and one timer, so a crowd that connects and says nothing, or says it byte by byte, costs little and not for long. With
TLS the handshake has the same deadline, and counts as one connection whether it succeeds or not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl as ssl_module
from collections.abc import Callable
from typing import cast

from dynamo_core.errors import Problem
from dynamo_core.protocol.ids import new_request_id
from dynamo_core.tasks import TaskSet

from dynamo_http.errors import error_body
from dynamo_http.stalled_connections import Stalls

log = logging.getLogger(__name__)

#: Seconds until the first request header must be complete.
HEADER_TIMEOUT = 10.0
#: Bytes after which an unfinished header goes to the HTTP server all the same, which refuses it with a reason.
HEADER_LIMIT = 64 * 1024
#: Seconds for a client to read what is left and to end TLS in order, unless the stalls have a deadline.
_SHUTDOWN_TIMEOUT = 30.0

#: How a handshake of TLS begins.
_TLS_HELLO = b"\x16\x03"
#: Seconds for which the log says nothing more of clients that speak the wrong protocol.
_QUIET = 60.0

_TIMED_OUT = (
    b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Type: application/json\r\nX-Request-Id: %b\r\n"
    b"Content-Length: %d\r\n\r\n%b"
)
_TIMED_OUT_BODY = error_body(Problem(408, "The request's header did not arrive in time"))


class ConnectionLimiter:
    """Makes a protocol for each new connection of one listener.

    `make` gives the HTTP server's protocol; `served` tells how many connections the server has now; `stalls` watches
    those that it was given. `name` is the listener's.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        served: Callable[[], int],
        *,
        max_connections: int,
        header_timeout: float = HEADER_TIMEOUT,
        ssl: ssl_module.SSLContext | None = None,
        stalls: Stalls | None = None,
        name: str = "HTTP",
    ) -> None:
        self._make = make
        self._name = name
        self._quiet_until = 0.0
        #: What new connections shake hands with. It may be replaced, if connections have TLS at all.
        self.ssl = ssl
        self._stalls = stalls
        self._shutdown_timeout = _SHUTDOWN_TIMEOUT if stalls is None else stalls.deadline
        self._handshakes = TaskSet()
        self._served = served
        self._max = max_connections
        self._header_timeout = header_timeout
        self._waiting: set[_PendingConnection] = set()
        self._settled: asyncio.Future[None] | None = None
        self._room = 0
        self._closed = False
        #: Connections closed at once because there were too many.
        self.refused = 0
        #: Connections closed because their first header did not come in time.
        self.timed_out = 0
        #: Connections closed because no TLS came about.
        self.unsafe = 0

    def warn_of_protocol(self, peer: object, fault: str) -> None:
        """Log, once in a while, that a client at `peer` speaks the wrong protocol."""
        now = asyncio.get_running_loop().time()
        if now >= self._quiet_until:
            self._quiet_until = now + _QUIET
            host = peer[0] if isinstance(peer, tuple) else "an unknown address"
            log.warning("the %s listener %s (logged once a minute at most)", self._name, fault.format(host))

    def __call__(self) -> asyncio.BaseProtocol:
        """Return the protocol of a connection that has just been accepted."""
        if self._closed or not self._admit():
            self.refused += 1
            return _Refusal()
        connection = _PendingConnection(self)
        # Counted before the transport exists: a crowd may be accepted in one turn of the loop.
        self._waiting.add(connection)
        return connection if self.ssl is None else _PendingHandshake(self, connection)

    async def settled(self, timeout: float) -> None:
        """Return once every connection has begun a request or is gone, or after `timeout` seconds."""
        if self._waiting:
            self._settled = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._settled], timeout=timeout)

    def close(self) -> None:
        """Close every connection that has not begun a request. New ones are refused."""
        self._closed = True
        for connection in list(self._waiting):
            connection.leave()

    async def aclose(self) -> None:
        """Close like `close`, and return when no handshake is left."""
        self.close()
        await self._handshakes.aclose()

    def _left(self, connection: _PendingConnection) -> None:
        self._waiting.discard(connection)
        if not self._waiting and self._settled is not None and not self._settled.done():
            self._settled.set_result(None)

    async def _secure(self, sock: socket.socket, connection: _PendingConnection, peer: object) -> None:
        """Shake hands; from then on the connection is as any other."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=self.ssl,
                ssl_handshake_timeout=self._header_timeout,
                ssl_shutdown_timeout=self._shutdown_timeout,
            )
        except (OSError, TimeoutError) as error:
            # Errors of TLS are among them. The client's fault: no certificate that we know, no TLS at all, or gone.
            self.unsafe += 1
            if getattr(error, "reason", None) == "HTTP_REQUEST":
                self.warn_of_protocol(peer, "has TLS, and a client at {} speaks plain HTTP: it has to use https")
            sock.close()
        finally:
            if connection._transport is None:
                connection.leave()

    def _admit(self) -> bool:
        # Counting costs time per connection, so it is done only when the room seen last time is used up.
        if self._room <= 0:
            self._room = self._max - self._served() - len(self._waiting)
        if self._room <= 0:
            return False
        self._room -= 1
        return True


class _Refusal(asyncio.Protocol):
    """A protocol that closes its connection without an answer, which would cost what the limit saves."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).abort()


class _PendingHandshake(asyncio.Protocol):
    """A connection that has to become TLS.

    It is given up for another on the same socket, made with TLS from the start: event loops differ in whether the first
    bytes can be kept for a TLS that comes later.
    """

    def __init__(self, limiter: ConnectionLimiter, connection: _PendingConnection) -> None:
        self._limiter = limiter
        self._connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        plain = cast(asyncio.Transport, transport)
        try:
            sock = socket.socket(fileno=os.dup(plain.get_extra_info("socket").fileno()))
        except OSError:
            # No descriptor is left.
            self._connection.leave()
            return
        finally:
            plain.abort()
        sock.setblocking(False)
        secure = self._limiter._secure(sock, self._connection, plain.get_extra_info("peername"))
        self._limiter._handshakes.spawn(secure, name="tls-handshake")


class _PendingConnection(asyncio.Protocol):
    """A connection whose first header is not complete."""

    __slots__ = ("_data", "_limiter", "_timer", "_transport")

    def __init__(self, limiter: ConnectionLimiter) -> None:
        self._limiter = limiter
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._limiter._closed:
            self.leave()
            return
        self._timer = asyncio.get_running_loop().call_later(self._limiter._header_timeout, self._late)

    def data_received(self, data: bytes) -> None:
        buffer = self._data
        # Empty lines may stand before a request. They are not the end of its header, and need not be kept.
        seen = max(0, len(buffer) - 3)
        buffer += data if buffer else data.lstrip(b"\r\n")
        # A bare line feed is no end of a header, but it is the HTTP server that says so.
        if buffer.startswith(_TLS_HELLO) and self._limiter.ssl is None:
            self._refuse_tls()
        elif buffer.find(b"\r\n\r\n", seen) >= 0 or buffer.find(b"\n\n", seen) >= 0 or len(buffer) > HEADER_LIMIT:
            self._hand_over()

    def connection_lost(self, exc: Exception | None) -> None:
        self._done()
        self._transport = None

    def leave(self) -> None:
        """Close the connection."""
        self._done()
        if self._transport is not None:
            self._transport.close()

    def _hand_over(self) -> None:
        self._done()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        protocol = self._limiter._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._limiter._stalls is not None:
            self._limiter._stalls.watch(transport)
        protocol.data_received(bytes(self._data))

    def _refuse_tls(self) -> None:
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        self._limiter.warn_of_protocol(peer, "has no TLS, and a client at {} speaks it: it has to use http")
        self.leave()

    def _late(self) -> None:
        self._limiter.timed_out += 1
        if self._data and self._transport is not None:
            name = new_request_id().encode()
            self._transport.write(_TIMED_OUT % (name, len(_TIMED_OUT_BODY), _TIMED_OUT_BODY))
        self.leave()

    def _done(self) -> None:
        self._limiter._left(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
