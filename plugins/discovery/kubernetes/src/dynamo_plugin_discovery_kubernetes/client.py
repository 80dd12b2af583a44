"""Requests to the API server: who asks, what it refuses, when it wants to be left alone, and watches."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import AddrInfoType, ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector
from dynamo_core.backoff import jitter
from dynamo_core.errors import CannotConnect
from dynamo_core.protocol.reading import Unreadable, read_json, shown
from dynamo_leases import LineDecoder, Refused

from dynamo_plugin_discovery_kubernetes.access import Access
from dynamo_plugin_discovery_kubernetes.errors import NotSpoken, Throttled, Unauthorized, failure, unreachable

Json = dict[str, Any]

#: The longest pause in seconds that is kept because a server asks for it.
MAX_PAUSE = 60.0


#: After how many seconds of silence a connection is asked whether it lives, how often then, and how many times in vain.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}


class WatchEnded(Exception):
    """The server has ended the watch, or its connection broke; it may be opened again where it left off."""


class Client:
    """For the tasks of one event loop."""

    def __init__(self, access: Access, timeout: float) -> None:
        """`timeout` in seconds, for one answer, pauses that the server asks for included."""
        self._access = access
        self._timeout = timeout
        self._session: ClientSession | None = None
        #: When the server wants to be asked again, by the loop's clock.
        self._not_before = 0.0

    async def ask(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Json | None = None
    ) -> Json:
        """One request, and the object that is the answer.

        Raises:
            CannotConnect: the server cannot be asked; `Refused` if it is there and does not let this process.
            Status: what was asked for is not there, already is, or has changed.
        """
        try:
            async with asyncio.timeout(self._timeout), self._opened(method, path, query, body) as response:
                return await self._object(response)
        except (ClientError, OSError) as error:
            raise unreachable(self._access.url, error) from error

    @asynccontextmanager
    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Events]:
        """The changes of a collection.

        Raises:
            CannotConnect: as `ask`.
            Status: `GONE` if the server does not know any more what has changed since.
        """
        opening = self._opened("GET", path, {**query, "watch": "true"}, None)
        try:
            async with asyncio.timeout(self._timeout):
                response = await opening.__aenter__()
        except (ClientError, OSError) as error:
            raise unreachable(self._access.url, error) from error
        try:
            yield Events(self._access.url, response)
        finally:
            # Not given back, as the server would go on sending; nor does anybody wait for its goodbye.
            if response.connection is not None and response.connection.transport is not None:
                response.connection.transport.abort()
            await opening.__aexit__(None, None, None)

    async def aclose(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _opened(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Json | None
    ) -> AsyncIterator[ClientResponse]:
        """A request that the server has accepted."""
        deadline = asyncio.get_running_loop().time() + self._timeout
        again = True
        while True:
            await self._wait_for_turn(deadline)
            token = self._access.token.current()
            response = await self._send(method, path, query, body, token)
            try:
                if response.status < 300:
                    yield response
                    return
                raise await self._failure(response)
            except Unauthorized as error:
                # Another thread's or another second's file: the token may have been replaced since it was read.
                if not (again and self._access.token.another(token)):
                    raise Refused(
                        f"Kubernetes at {self._access.url} refuses the token: {error}", cause=error
                    ) from error
                again = False
            except Throttled as error:
                pause = min(error.seconds, MAX_PAUSE)
                self._not_before = asyncio.get_running_loop().time() + jitter(pause, 1, 1.25)
            finally:
                response.release()

    async def _wait_for_turn(self, deadline: float) -> None:
        clock = asyncio.get_running_loop()
        pause = self._not_before - clock.time()
        if pause <= 0:
            return
        if self._not_before >= deadline:
            raise CannotConnect(f"Kubernetes at {self._access.url} asks for a pause of {pause:.1f} s")
        await asyncio.sleep(pause)

    async def _send(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Json | None, token: str | None
    ) -> ClientResponse:
        if self._session is None:
            self._session = ClientSession(connector=TCPConnector(socket_factory=_socket))
        return await self._session.request(
            method,
            self._access.url + path,
            params=query,
            json=body,
            headers={"Accept": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"}),
            ssl=self._access.tls or True,
            timeout=ClientTimeout(total=None, sock_connect=self._timeout),
            allow_redirects=False,
        )

    async def _failure(self, response: ClientResponse) -> Exception:
        try:
            status = await self._object(response)
        except NotSpoken:
            # A proxy in between says what it likes.
            status = {}
            if response.status in (400, 404, 405):
                raise
        return failure(self._access.url, response.status, status, _pause(response))

    async def _object(self, response: ClientResponse) -> Json:
        try:
            told = read_json(await response.read())
        except Unreadable:
            told = None
        if not isinstance(told, dict) or "kind" not in told:
            path = response.url.path
            raise NotSpoken(
                f"{self._access.url} answers {path} with HTTP {response.status} and no object of Kubernetes"
            )
        return told


class Events:
    """The events of a watch. A `read` that is cancelled loses nothing."""

    def __init__(self, url: str, response: ClientResponse) -> None:
        self._url = url
        self._response = response
        self._lines = LineDecoder()

    async def read(self) -> list[Json]:
        """The events that have arrived since, perhaps none yet.

        Raises:
            WatchEnded: there will be no more.
            Status: `GONE` if the server does not know any more what has changed.
            CannotConnect: the server says something else than events.
        """
        try:
            data = await self._response.content.readany()
        except (ClientError, OSError) as error:
            raise WatchEnded(str(unreachable(self._url, error))) from error
        if not data:
            raise WatchEnded(f"Kubernetes at {self._url} has ended the watch")
        try:
            events: list[Json] = [_event(line) for line in self._lines.feed(data)]
        except ValueError as error:
            raise CannotConnect(
                f"Kubernetes at {self._url} sends what is no event: {shown(str(error))}", cause=error
            ) from error
        for event in events:
            if event.get("type") == "ERROR":
                self._refuse(event["object"])
        return events

    def _refuse(self, status: Json) -> None:
        error = failure(self._url, int(status.get("code", 500)), status)
        if isinstance(error, Unauthorized | Throttled):
            raise WatchEnded(str(error)) from error
        raise error


def _event(line: bytes) -> Json:
    event = read_json(line)
    if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
        raise Unreadable("it has no object")
    return event


def _pause(response: ClientResponse) -> float | None:
    """What the server asks for, in seconds; a date, which Kubernetes never sends, counts as a second."""
    told = response.headers.get("Retry-After")
    if told is None:
        return None
    return float(told) if told.isascii() and told.isdigit() else 1.0


def _socket(address: AddrInfoType) -> socket.socket:
    """A socket that finds out when its other end is gone without a word: a watch may have nothing to say for long."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        # Not every system has all of them.
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
