"""Requests to the API server: tokens, refusals, pauses that it asks for, and watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import ClientResponse
from dynamo_core import jitter
from dynamo_core.errors import CannotConnect
from dynamo_leases import Json, JsonClient, JsonStream, Refused, StreamEnded, UnsupportedServer

from dynamo_plugin_discovery_kubernetes.access import Access
from dynamo_plugin_discovery_kubernetes.errors import Throttled, Unauthorized, failure

#: The longest pause in seconds that is kept because a server asks for it.
MAX_PAUSE = 60.0


class Client:
    """A client for the tasks of one event loop."""

    def __init__(self, access: Access, timeout: float) -> None:
        """`timeout` in seconds, for one answer, pauses that the server asks for included."""
        self._access = access
        self._timeout = timeout
        self._http = JsonClient("Kubernetes", tls=access.tls, timeout=timeout)
        #: When the server wants to be asked again, by the loop's clock.
        self._not_before = 0.0

    async def ask(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Json | None = None
    ) -> Json:
        """Send one request, and return the object that is the answer.

        Raises:
            CannotConnect: the server cannot be asked; `Refused` if it is there and does not let this process.
            Status: what was asked for is not there, already is, or has changed.
        """
        async with self._http.deadline(self._access.url), await self._open(method, path, query, body) as response:
            return await self._object(response)

    @asynccontextmanager
    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Events]:
        """Yield the changes of a collection.

        Raises:
            CannotConnect: as `ask`.
            Status: `GONE` if the server does not know any more what has changed since.
        """
        async with self._http.deadline(self._access.url):
            response = await self._open("GET", path, {**query, "watch": "true"}, None)
        async with self._http.stream(self._access.url, response) as stream:
            yield Events(stream)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _open(self, method: str, path: str, query: Mapping[str, str] | None, body: Json | None) -> ClientResponse:
        """Return the answer to a request that the server has accepted."""
        deadline = asyncio.get_running_loop().time() + self._timeout
        again = True
        while True:
            await self._wait_for_turn(deadline)
            token = self._access.token.current()
            response = await self._send(method, path, query, body, token)
            if response.status < 300:
                return response
            async with response:
                error = await self._failure(response)
            if isinstance(error, Unauthorized):
                # The token may have been replaced in its file since it was read.
                if not (again and self._access.token.another(token)):
                    raise Refused(
                        f"Kubernetes at {self._access.url} refuses the token: {error}", cause=error
                    ) from error
                again = False
            elif isinstance(error, Throttled):
                pause = min(error.seconds, MAX_PAUSE)
                self._not_before = asyncio.get_running_loop().time() + jitter(pause, 1, 1.25)
            else:
                raise error

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
        authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
        return await self._http.send(
            method,
            self._access.url + path,
            query=query,
            body=body,
            headers={"Accept": "application/json"} | authorization,
        )

    async def _failure(self, response: ClientResponse) -> Exception:
        try:
            status = await self._object(response)
        except UnsupportedServer:
            # A proxy in between says what it likes.
            status = {}
            if response.status in (400, 404, 405):
                raise
        return failure(self._access.url, response.status, status, _pause(response))

    async def _object(self, response: ClientResponse) -> Json:
        answer = await self._http.read_object(response)
        if answer is None or "kind" not in answer:
            path = response.url.path
            raise UnsupportedServer(
                f"{self._access.url} answers {path} with HTTP {response.status} and no object of Kubernetes"
            )
        return answer


class Events:
    """The events of a watch. A `read` that is cancelled loses nothing."""

    def __init__(self, stream: JsonStream) -> None:
        self._stream = stream

    async def read(self) -> list[Json]:
        """Return the events that have arrived since, perhaps none yet.

        Raises:
            StreamEnded: there will be no more.
            Status: `GONE` if the server does not know any more what has changed.
            CannotConnect: the server says something else than events.
        """
        events = await self._stream.read()
        for event in events:
            if not isinstance(event.get("object"), dict):
                raise CannotConnect(f"Kubernetes at {self._stream.server} sends what is no event: it has no object")
            if event.get("type") == "ERROR":
                self._refuse(event["object"])
        return events

    def _refuse(self, status: Json) -> None:
        error = failure(self._stream.server, int(status.get("code", 500)), status)
        if isinstance(error, Unauthorized | Throttled):
            raise StreamEnded(str(error)) from error
        raise error


def _pause(response: ClientResponse) -> float | None:
    """Return what the server asks for, in seconds; a date, which Kubernetes never sends, counts as a second."""
    header = response.headers.get("Retry-After")
    if header is None:
        return None
    return float(header) if header.isascii() and header.isdigit() else 1.0
