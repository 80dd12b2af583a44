"""JSON over HTTP, for stores with such an API: requests with a deadline, streams of lines, and errors in one line."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import (
    AddrInfoType,
    ClientConnectorCertificateError,
    ClientError,
    ClientResponse,
    ClientResponseError,
    ClientSession,
    ClientTimeout,
    TCPConnector,
)
from dynamo_core.errors import CannotConnect, ConfigError
from dynamo_core.protocol import Unreadable, read_json

from dynamo_leases.line_decoder import LineDecoder

Json = dict[str, Any]

#: Keep-alive of connections: the silence in seconds before the first probe, the pause between probes, and their number.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}


class UnsupportedServer(CannotConnect):
    """The server lacks the API of the store, or a needed part of it."""


class StreamEnded(CannotConnect):
    """The server has ended a stream, or its connection broke; it may be opened again."""


class JsonClient:
    """A client for the tasks of one event loop. `service` names the store in errors, such as ``etcd``.

    Times are in seconds.
    """

    def __init__(self, service: str, *, tls: ssl.SSLContext | None, timeout: float) -> None:
        """`timeout` bounds connecting, and all that happens in one `deadline`."""
        self.service = service
        self._tls = tls
        self._timeout = timeout
        self._session: ClientSession | None = None

    @asynccontextmanager
    async def deadline(self, server: str) -> AsyncIterator[None]:
        """Bound what happens inside, and map the errors of requests to a server.

        Raises:
            CannotConnect: the server cannot be asked.
            UnsupportedServer: it answers something else than HTTP.
        """
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except (ClientError, OSError) as error:
            raise unreachable(self.service, server, error) from error

    async def send(
        self,
        method: str,
        url: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ClientResponse:
        """Return the head of an answer; for use in a `deadline`. The caller releases it."""
        if self._session is None:
            self._session = ClientSession(connector=TCPConnector(socket_factory=_socket))
        return await self._session.request(
            method,
            url,
            params=query,
            json=body,
            headers=headers,
            ssl=self._tls or True,
            timeout=ClientTimeout(total=None, sock_connect=self._timeout),
            allow_redirects=False,
        )

    async def read_object(self, response: ClientResponse) -> Json | None:
        """Return the body of an answer; None if it is no JSON object. For use in a `deadline`."""
        try:
            value = read_json(await response.read())
        except Unreadable:
            return None
        return value if isinstance(value, dict) else None

    @asynccontextmanager
    async def stream(self, server: str, response: ClientResponse) -> AsyncIterator[JsonStream]:
        """Yield the messages of an answer that goes on; close its connection in the end."""
        try:
            yield JsonStream(self.service, server, response)
        finally:
            # The connection is not reused, as the server would go on sending; nor does a goodbye delay the end.
            if response.connection is not None and response.connection.transport is not None:
                response.connection.transport.abort()
            response.close()

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


class JsonStream:
    """Messages, one a line. A `read` that is cancelled loses nothing."""

    def __init__(self, service: str, server: str, response: ClientResponse) -> None:
        #: The server that sends.
        self.server = server
        self._where = f"{service} at {server}"
        self._service = service
        self._response = response
        self._lines = LineDecoder()

    async def read(self) -> list[Json]:
        """Return the messages that have arrived since, perhaps none yet.

        Raises:
            StreamEnded: there will be no more.
            CannotConnect: the server sends something else than messages.
        """
        try:
            data = await self._response.content.readany()
        except (ClientError, OSError) as error:
            raise StreamEnded(str(unreachable(self._service, self.server, error)), cause=error) from error
        if not data:
            raise StreamEnded(f"{self._where} has ended the watch")
        try:
            return [self._message(line) for line in self._lines.feed(data)]
        except ValueError as error:
            raise CannotConnect(f"{self._where} sends what is no message: {error}", cause=error) from error

    @staticmethod
    def _message(line: bytes) -> Json:
        message = read_json(line)
        if not isinstance(message, dict):
            raise Unreadable("it is no object")
        return message


def unreachable(service: str, server: str, error: Exception) -> CannotConnect:
    """Return the exception for a server that cannot be asked, in one line that names it; never a secret."""
    where = f"{service} at {server}"
    if isinstance(error, TimeoutError):
        return CannotConnect(f"{where} does not answer", cause=error)
    if isinstance(error, ClientResponseError):
        return UnsupportedServer(f"this is no {service}: {server} answers what is no HTTP", cause=error)
    inner = getattr(error, "os_error", None) or getattr(error, "certificate_error", None)
    words = str(inner or error) if isinstance(error, ClientError | OSError | ValueError) else type(error).__name__
    text = " ".join(words.split()).rstrip(".") or type(error).__name__
    return CannotConnect(f"{where} cannot be reached: {text}", cause=error)


def untrusted(error: CannotConnect, setting: str) -> ConfigError | None:
    """Return the error for a server whose certificate is not trusted; None for any other failure.

    `setting` is where the settings of TLS stand, such as ``discovery.tls``.
    """
    cause = error.__cause__
    if isinstance(cause, ClientConnectorCertificateError) or isinstance(
        getattr(cause, "os_error", None), ssl.SSLCertVerificationError
    ):
        return ConfigError(
            f"{setting}.ca: {error}; name the authority that signed the server's certificate", cause=error
        )
    return None


def _socket(address: AddrInfoType) -> socket.socket:
    """Return a socket that notices when its peer is gone without a word: a watch may have nothing to say for long."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        # Not every system has all of them.
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
