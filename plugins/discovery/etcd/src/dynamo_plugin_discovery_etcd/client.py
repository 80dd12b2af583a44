"""The store over etcd's JSON gateway: requests with fail-over, the login, and the stream of a watch."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout
from dynamo_core.certificates import ClientTls, client_context
from dynamo_core.errors import CannotConnect
from dynamo_core.protocol.reading import Unreadable, read_json, shown
from dynamo_leases import LineDecoder, Refused

from dynamo_plugin_discovery_etcd.config import EtcdConfig
from dynamo_plugin_discovery_etcd.errors import (
    LAST,
    PRECONDITION,
    Status,
    TokenExpired,
    failure,
    stranger,
    unreachable,
)
from dynamo_plugin_discovery_etcd.wire import Json

log = logging.getLogger(__name__)

#: A server that has lost the others of its cluster ends a watch instead of falling silent.
_NEEDS_LEADER = {"Grpc-Metadata-hasleader": "true"}
#: What a proxy says of a cluster behind it that may come back.
_FAILING = (408, 429, 500, 502, 503, 504)


class Client:
    """For the tasks of one event loop. What is asked may be asked twice, of two servers."""

    def __init__(self, config: EtcdConfig, tls: ssl.SSLContext | None) -> None:
        self._config = config
        self._tls = tls
        self._timeout = ClientTimeout(total=config.timeout)
        self._session: ClientSession | None = None
        self._at = 0
        self._token: str | None = None
        self._login = asyncio.Lock()

    @property
    def endpoint(self) -> str:
        """The server that is asked first: the one that answered last."""
        return self._config.endpoints[self._at]

    async def ask(self, path: str, body: Json) -> Json:
        """One request, of one server after the other until one serves.

        Raises:
            CannotConnect: none does; `Refused` if one is there and says no.
            Status: what was asked for is not there, or already is.
        """
        error: CannotConnect | None = None
        for _ in self._config.endpoints:
            at = self._at
            try:
                return await self._ask(self.endpoint, path, body)
            except Refused:
                raise
            except CannotConnect as failed:
                error = error or failed
                if self._at == at:
                    self._at = (at + 1) % len(self._config.endpoints)
        assert error is not None  # noqa: S101 - there is at least one endpoint
        raise error

    @asynccontextmanager
    async def stream(self, path: str, body: Json) -> AsyncIterator[Messages]:
        """A request whose answer is many messages, of the server that answered last.

        Raises:
            CannotConnect: it could not be opened.
        """
        endpoint = self.endpoint
        token = await self._logged_in(endpoint)
        try:
            async with asyncio.timeout(self._config.timeout):
                response = await self._open().post(
                    endpoint + path,
                    json=body,
                    headers=_authorization(token) | _NEEDS_LEADER,
                    ssl=self._tls or True,
                    timeout=ClientTimeout(total=None, sock_connect=self._config.timeout),
                    allow_redirects=False,
                )
        except (ClientError, OSError) as error:
            raise unreachable(endpoint, error) from error
        try:
            if response.status != 200:
                raise CannotConnect(f"etcd at {endpoint} does not serve: HTTP {response.status} to a watch")
            yield Messages(endpoint, response)
        finally:
            # Not given back, as the server would go on sending; nor does anybody wait for its goodbye.
            if response.connection is not None and response.connection.transport is not None:
                response.connection.transport.abort()
            response.close()

    def forget_login(self) -> None:
        """The next request logs in anew."""
        self._token = None

    async def aclose(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> ClientSession:
        if self._session is None:
            self._session = ClientSession()
        return self._session

    async def _ask(self, endpoint: str, path: str, body: Json) -> Json:
        for again in (True, False):
            token = await self._logged_in(endpoint)
            try:
                return await self._post(endpoint, path, body, token)
            except TokenExpired as error:
                if token is None or not again:
                    raise Refused(f"etcd at {endpoint} refuses the login: {error}", cause=error) from error
                if self._token == token:
                    self._token = None
        raise AssertionError("unreachable")

    async def _logged_in(self, endpoint: str) -> str | None:
        """The token; None if there is none to be had."""
        name, password = self._config.username, self._config.password
        if name is None or password is None:
            return None
        async with self._login:
            if self._token is None:
                body = {"name": name, "password": password.get_secret_value()}
                try:
                    self._token = str((await self._post(endpoint, "/v3/auth/authenticate", body, None))["token"])
                except TokenExpired as error:
                    raise Refused(f"etcd at {endpoint} refuses the login: {error}", cause=error) from error
                except Status as error:
                    if error.code != PRECONDITION:
                        raise CannotConnect(f"etcd at {endpoint} does not serve: {error}", cause=error) from error
                    # Authentication is switched off: it takes everybody, and may be switched on at any time.
                    log.warning("etcd at %s asks nobody for a password", endpoint)
                    return None
            return self._token

    async def _post(self, endpoint: str, path: str, body: Json, token: str | None) -> Json:
        try:
            async with self._open().post(
                endpoint + path,
                json=body,
                headers=_authorization(token),
                ssl=self._tls or True,
                timeout=self._timeout,
                allow_redirects=False,
            ) as response:
                status, data = response.status, await response.read()
        except (ClientError, OSError) as error:
            raise unreachable(endpoint, error) from error
        try:
            told = read_json(data)
        except Unreadable:
            told = None
        if not isinstance(told, dict) or (status != 200 and not _is_failure(told)):
            if status in _FAILING:
                raise CannotConnect(f"etcd at {endpoint} does not serve: HTTP {status} to {path}")
            raise stranger(endpoint, f"HTTP {status} to {path}")
        answer: Json = told.get("result", told)
        if not isinstance(answer, dict):
            raise CannotConnect(f"etcd at {endpoint} does not serve: its answer to {path} is none")
        if status != 200 or "error" in answer:
            raise _failure(endpoint, answer)
        return answer


class Messages:
    """The messages of a stream. A `read` that is cancelled loses nothing."""

    def __init__(self, endpoint: str, response: ClientResponse) -> None:
        #: The server that sends.
        self.endpoint = endpoint
        self._response = response
        self._lines = LineDecoder()

    async def read(self) -> list[Json]:
        """The messages that have arrived since, perhaps none yet.

        Raises:
            CannotConnect: the stream has ended, or says so.
            TokenExpired: the login has.
        """
        try:
            data = await self._response.content.readany()
        except (ClientError, OSError) as error:
            raise unreachable(self.endpoint, error) from error
        if not data:
            raise CannotConnect(f"etcd at {self.endpoint} has ended the watch")
        try:
            lines = self._lines.feed(data)
        except ValueError as error:
            raise CannotConnect(f"etcd at {self.endpoint} sends {error}", cause=error) from error
        return [self._message(line) for line in lines]

    def _message(self, line: bytes) -> Json:
        try:
            message = read_json(line)
        except Unreadable as error:
            raise CannotConnect(f"etcd at {self.endpoint} sends what is no JSON", cause=error) from error
        if not isinstance(message, dict):
            raise CannotConnect(f"etcd at {self.endpoint} sends what is no message of a watch")
        if "error" in message:
            raise _failure(self.endpoint, message["error"])
        result: Json = message.get("result", {})
        if not isinstance(result, dict):
            raise CannotConnect(f"etcd at {self.endpoint} sends what is no message of a watch")
        return result


def tls_context(config: EtcdConfig) -> ssl.SSLContext | None:
    """What encrypted connections are made with; None if there are none.

    Raises:
        ConfigError: a file cannot be used.
    """
    if not any(endpoint.startswith("https:") for endpoint in config.endpoints):
        return None
    return client_context(config.tls or ClientTls(), "discovery.tls")


def _authorization(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": token}


def _is_failure(answer: dict[str, Any]) -> bool:
    """Whether it is an error of etcd, and not of another service that speaks JSON."""
    code = answer.get("code", answer.get("grpc_code"))
    return isinstance(code, int) and 0 <= code <= LAST


def _failure(endpoint: str, answer: Any) -> Exception:
    told = answer if isinstance(answer, dict) else {"error": answer}
    code = told.get("code", told.get("grpc_code", 0))
    reason = shown(str(told.get("message", told.get("error", "no reason given"))))
    return failure(endpoint, code if isinstance(code, int) else 0, reason)
