"""The connection to the server: one pool, requests that can be stopped at any moment, and a deadline for each wait."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import (
    ClientConnectorCertificateError,
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ServerDisconnectedError,
    TCPConnector,
)
from dynamo_core import BackendError, ClientTls, DynamoError, TaskSet, client_context
from dynamo_core.protocol import Unreadable, read

from dynamo_plugin_engine_upstream.config import UpstreamConfig
from dynamo_plugin_engine_upstream.server_errors import error_object, status_error

log = logging.getLogger(__name__)

#: Bytes of an error's body that are read.
_ERROR_BODY = 64 * 1024
#: Bytes of a list of models.
_LIST_BODY = 4 * 1024 * 1024
#: Bytes of an answer that is no stream: 2048 vectors of 4096 numbers each, as text.
_WHOLE_BODY = 256 * 1024 * 1024
#: Seconds for what comes after the last event, so that the connection can be used again.
_TAIL = 1.0

_encode = msgspec.json.encode
_lists = msgspec.json.Decoder()


class Stopped(Exception):
    """The request was stopped while the server was waited for."""


class Client:
    """A client for the tasks of one event loop."""

    def __init__(self, config: UpstreamConfig) -> None:
        self.config = config
        self._tasks = TaskSet()
        headers = {"accept": "text/event-stream, application/json"}
        if config.api_key is not None:
            headers["authorization"] = f"Bearer {config.api_key.get_secret_value()}"
        # The worker limits the requests at once; a full pool would queue them a second time.
        connector = TCPConnector(limit=0, keepalive_timeout=config.keep_alive, ssl=tls_context(config) or True)
        self._session = ClientSession(connector=connector, headers=headers, auto_decompress=True)
        self._timeout = ClientTimeout(total=None, connect=config.connect_timeout, sock_connect=config.connect_timeout)

    async def models(self) -> list[dict[str, Any]] | None:
        """Return what the server lists as its models; None if it has no such list.

        Raises:
            DynamoError: it cannot be reached, or refuses.
        """
        deadline = self.config.connect_timeout
        try:
            async with asyncio.timeout(2 * deadline):
                response = await self._session.get(
                    f"{self.config.url}/models", timeout=self._timeout, allow_redirects=False
                )
                async with response:
                    body = await response.content.read(_LIST_BODY)
                    if response.status in (404, 405, 501):
                        return None
                    if response.status != 200:
                        raise status_error(response.status, error_object(body), {})
        except (ClientError, OSError, ssl.SSLError) as error:
            raise unreachable(self.config.url, error) from error
        try:
            listed = read(_lists, body)["data"]
            if not isinstance(listed, list):
                raise TypeError("it is no list")
        except (Unreadable, KeyError, TypeError) as error:
            raise BackendError.CannotConnect(f"{self.config.url}/models is not a list of models") from error
        return [model for model in listed if isinstance(model, dict) and isinstance(model.get("id"), str)]

    def call(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], names: Mapping[str, str]) -> Call:
        """Return a request that has not been sent. `names` are those that clients are not to see."""
        return Call(self, path, _encode(body), {**headers, "content-type": "application/json"}, names)

    async def post(self, path: str, data: bytes, headers: Mapping[str, str]) -> ClientResponse:
        """Send a request and return when its answer begins.

        Raises:
            BackendError: nothing of an answer came.
        """
        config = self.config
        for again in (True, False):
            try:
                async with asyncio.timeout(config.first_byte_timeout):
                    return await self._session.post(
                        f"{config.url}/{path}", data=data, headers=headers, timeout=self._timeout, allow_redirects=False
                    )
            except ServerDisconnectedError as error:
                # An idle connection that the server closed in this moment: it has not seen the request.
                if not again:
                    raise unreachable(config.url, error) from error
            except TimeoutError as error:
                if isinstance(error, ClientError):
                    raise unreachable(config.url, error) from error
                raise BackendError.ResponseTimeout(
                    f"{config.url} did not begin an answer within {config.first_byte_timeout:g} s"
                ) from error
            except (ClientError, OSError) as error:
                raise unreachable(config.url, error) from error
        raise AssertionError("the second attempt returns or raises")

    def spawn(self, path: str, data: bytes, headers: Mapping[str, str]) -> asyncio.Task[ClientResponse | DynamoError]:
        """Return `post` as a task of this client, so that it can be cancelled by others; its error is its result."""
        return self._tasks.spawn(self._post_result(path, data, headers), name=f"upstream {path}")

    async def _post_result(self, path: str, data: bytes, headers: Mapping[str, str]) -> ClientResponse | DynamoError:
        try:
            return await self.post(path, data, headers)
        except DynamoError as error:
            return error

    async def aclose(self) -> None:
        """Close all connections. Safe twice."""
        await self._tasks.aclose()
        await self._session.close()


class Call:
    """One request: `open`, then `read` until nothing comes, and `aclose` in any case. `stop` may be called any time."""

    def __init__(
        self, client: Client, path: str, data: bytes, headers: Mapping[str, str], names: Mapping[str, str]
    ) -> None:
        self._client = client
        self._path = path
        self._data = data
        self._headers = headers
        self._names = names
        self._opening: asyncio.Task[ClientResponse | DynamoError] | None = None
        self._response: ClientResponse | None = None
        self._stopped = False
        self._silent = False
        self._begun = False
        self._waiting_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def open(self, kind: str = "text/event-stream") -> None:
        """Send the request; return when the server has begun to answer it with that type of content.

        Raises:
            Stopped: it was stopped.
            DynamoError: the server refuses, or cannot be reached.
        """
        if self._is_stopped():
            raise Stopped
        self._opening = task = self._client.spawn(self._path, self._data, self._headers)
        try:
            response = await task
        except asyncio.CancelledError:
            if task.done() and not task.cancelled() and isinstance(late := task.result(), ClientResponse):
                # It has come in the moment in which this task was cancelled.
                late.close()
            current = asyncio.current_task()
            if self._is_stopped() and not (current is not None and current.cancelling()):
                raise Stopped from None
            raise
        finally:
            self._opening = None
        if isinstance(response, DynamoError):
            raise response
        self._response = response
        if self._is_stopped():
            raise Stopped
        if response.status != 200:
            raise await self._status_error(response)
        if response.content_type != kind:
            wanted = "a stream" if kind == "text/event-stream" else kind
            raise BackendError.Unknown(f"{self._client.config.url} answered with {response.content_type}, not {wanted}")
        self._arm()

    async def whole(self) -> bytes:
        """Return the whole answer to a request that is not to be streamed.

        Raises:
            Stopped: it was stopped.
            DynamoError: as for `open` and `read`; or the answer is too large.
        """
        await self.open("application/json")
        parts: list[bytes] = []
        size = 0
        while part := await self.read():
            parts.append(part)
            size += len(part)
            if size > _WHOLE_BODY:
                raise BackendError.Unknown(f"{self._client.config.url} answered with more than {_WHOLE_BODY} bytes")
        return b"".join(parts)

    async def read(self) -> bytes:
        """Return what has come, at least one byte; empty at the end of the stream.

        Raises:
            Stopped: it was stopped.
            BackendError.ResponseTimeout: nothing came in time.
            BackendError.Disconnected: the connection broke.
        """
        assert self._response is not None  # noqa: S101 - read comes after open
        self._waiting_since = asyncio.get_running_loop().time()
        try:
            received = await self._response.content.readany()
        except (ClientError, OSError) as error:
            raise self._connection_error(error) from error
        finally:
            self._waiting_since = None
        if self._is_stopped():
            raise Stopped
        self._begun = True
        return received

    def stop(self) -> None:
        """End the request at once: the connection is closed, so that the server sees it too."""
        self._stopped = True
        if self._opening is not None:
            self._opening.cancel()
        if self._response is not None:
            self._response.close()

    async def aclose(self, *, complete: bool = False) -> None:
        """Let go of the connection: back into the pool if the answer was `complete`, else closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        response, self._response = self._response, None
        if response is None:
            return
        if complete and not response.content.at_eof():
            try:
                async with asyncio.timeout(_TAIL):
                    while await response.content.readany():
                        pass
            except (ClientError, OSError):
                pass
            except asyncio.CancelledError:
                response.close()
                raise
        # Nothing is closed by this where the end was read: the connection is in the pool by then.
        response.close()

    def _is_stopped(self) -> bool:
        # Asked again after each wait: what type checkers remember of an attribute is out of date by then.
        return self._stopped

    async def _status_error(self, response: ClientResponse) -> DynamoError:
        try:
            async with asyncio.timeout(self._client.config.connect_timeout):
                body = await response.content.read(_ERROR_BODY)
        except (ClientError, OSError):
            body = b""
        if self._stopped:
            raise Stopped
        return status_error(response.status, error_object(body), self._names)

    def _connection_error(self, error: Exception) -> Exception:
        if self._stopped:
            return Stopped()
        config = self._client.config
        if self._silent:
            limit = config.silence_timeout if self._begun else config.first_byte_timeout
            return BackendError.ResponseTimeout(f"{config.url} has sent nothing for {limit:g} s")
        return BackendError.Disconnected(f"{config.url} broke off its answer: {type(error).__name__}")

    # One timer per answer, which looks how long a read has waited; nothing is set or taken back per read.

    def _arm(self) -> None:
        config = self._client.config
        self._schedule_check(min(config.first_byte_timeout, config.silence_timeout))

    def _schedule_check(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check_silence)

    def _check_silence(self) -> None:
        config = self._client.config
        limit = config.silence_timeout if self._begun else config.first_byte_timeout
        waited = 0.0
        if self._waiting_since is not None:
            waited = asyncio.get_running_loop().time() - self._waiting_since
        # Timers may be a little early.
        if waited < limit - 0.001:
            self._schedule_check(limit - waited)
        elif self._response is not None:
            self._silent = True
            self._response.close()


def unreachable(url: str, error: BaseException) -> DynamoError:
    """Return the error for a server that no request reached, or that gave no answer to one."""
    if isinstance(error, ClientConnectorCertificateError | ssl.SSLCertVerificationError):
        # Not of this request: nothing will ever get through.
        return BackendError.EngineShutdown(f"{url} has a certificate that is not trusted; see `tls.ca`", cause=error)
    if isinstance(error, ClientConnectorError):
        # No process listens there. The framework avoids a worker with such an error for a while.
        return BackendError.EngineShutdown(f"{url} cannot be reached: {error.os_error}", cause=error)
    if isinstance(error, TimeoutError):
        return BackendError.EngineShutdown(f"{url} did not take a connection in time", cause=error)
    return BackendError.Disconnected(f"{url} closed the connection without an answer: {type(error).__name__}")


def tls_context(config: UpstreamConfig) -> ssl.SSLContext | None:
    """Return what encrypted connections are made with; None if there are none.

    Raises:
        ConfigError: a file cannot be used.
    """
    if not config.url.startswith("https:"):
        return None
    return client_context(config.tls or ClientTls(), "engine.tls")
