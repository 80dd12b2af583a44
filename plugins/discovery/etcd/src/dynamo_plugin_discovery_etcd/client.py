"""The store over etcd's JSON gateway: requests with fail-over, the login, and the stream of a watch."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from dynamo_core import ClientTls, client_context
from dynamo_core.errors import CannotConnect
from dynamo_core.protocol import truncated
from dynamo_leases import JsonClient, JsonStream, Refused, UnsupportedServer

from dynamo_plugin_discovery_etcd.config import EtcdConfig
from dynamo_plugin_discovery_etcd.errors import LAST, PRECONDITION, Status, TokenExpired, failure
from dynamo_plugin_discovery_etcd.wire import Json

log = logging.getLogger(__name__)

#: A server that has lost the others of its cluster ends a watch instead of falling silent.
_NEEDS_LEADER = {"Grpc-Metadata-hasleader": "true"}
#: What a proxy says of a cluster behind it that may come back.
_FAILING = (408, 429, 500, 502, 503, 504)


class Client:
    """A client for the tasks of one event loop. A request may be sent twice, to two servers."""

    def __init__(self, config: EtcdConfig, tls: ssl.SSLContext | None) -> None:
        self._config = config
        self._http = JsonClient("etcd", tls=tls, timeout=config.timeout)
        self._at = 0
        self._token: str | None = None
        self._login = asyncio.Lock()

    @property
    def endpoint(self) -> str:
        """The server that is asked first: the one that answered last."""
        return self._config.endpoints[self._at]

    async def ask(self, path: str, body: Json) -> Json:
        """Send one request, to one server after the other until one serves.

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
        """Open a request whose answer is many messages, at the server that answered last.

        Raises:
            CannotConnect: it could not be opened.
        """
        endpoint = self.endpoint
        token = await self._logged_in(endpoint)
        async with self._http.deadline(endpoint):
            response = await self._http.send(
                "POST", endpoint + path, body=body, headers=_authorization(token) | _NEEDS_LEADER
            )
        async with self._http.stream(endpoint, response) as stream:
            if response.status != 200:
                raise CannotConnect(f"etcd at {endpoint} does not serve: HTTP {response.status} to a watch")
            yield Messages(stream)

    def forget_login(self) -> None:
        """Make the next request log in anew."""
        self._token = None

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

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
        """Return the token; None if there is none to be had."""
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
                    # Authentication is switched off: the server serves all clients. It may be switched on at any time.
                    log.warning("etcd at %s asks for no password", endpoint)
                    return None
            return self._token

    async def _post(self, endpoint: str, path: str, body: Json, token: str | None) -> Json:
        async with self._http.deadline(endpoint):
            response = await self._http.send("POST", endpoint + path, body=body, headers=_authorization(token))
            async with response:
                status, found = response.status, await self._http.read_object(response)
        if found is None or (status != 200 and not _is_failure(found)):
            if status in _FAILING:
                raise CannotConnect(f"etcd at {endpoint} does not serve: HTTP {status} to {path}")
            raise UnsupportedServer(f"this is no etcd: {endpoint} answers HTTP {status} to {path}")
        answer: Json = found.get("result", found)
        if not isinstance(answer, dict):
            raise CannotConnect(f"etcd at {endpoint} does not serve: its answer to {path} is none")
        if status != 200 or "error" in answer:
            raise _failure(endpoint, answer)
        return answer


class Messages:
    """The messages of a watch. A `read` that is cancelled loses nothing."""

    def __init__(self, stream: JsonStream) -> None:
        self._stream = stream

    @property
    def endpoint(self) -> str:
        """The server that sends."""
        return self._stream.server

    async def read(self) -> list[Json]:
        """Return the messages that have arrived since, perhaps none yet.

        Raises:
            CannotConnect: the stream has ended, or says so.
            TokenExpired: the login has.
        """
        return [self._result(message) for message in await self._stream.read()]

    def _result(self, message: Json) -> Json:
        if "error" in message:
            raise _failure(self.endpoint, message["error"])
        result: Json = message.get("result", {})
        if not isinstance(result, dict):
            raise CannotConnect(f"etcd at {self.endpoint} sends what is no message of a watch")
        return result


def tls_context(config: EtcdConfig) -> ssl.SSLContext | None:
    """Return what encrypted connections are made with; None if there are none.

    Raises:
        ConfigError: a file cannot be used.
    """
    if not any(endpoint.startswith("https:") for endpoint in config.endpoints):
        return None
    return client_context(config.tls or ClientTls(), "discovery.tls")


def _authorization(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": token}


def _is_failure(answer: dict[str, Any]) -> bool:
    """Return whether it is an error of etcd, and not of another service that speaks JSON."""
    code = answer.get("code", answer.get("grpc_code"))
    return isinstance(code, int) and 0 <= code <= LAST


def _failure(endpoint: str, answer: Any) -> Exception:
    fields = answer if isinstance(answer, dict) else {"error": answer}
    code = fields.get("code", fields.get("grpc_code", 0))
    reason = truncated(str(fields.get("message", fields.get("error", "no reason given"))))
    return failure(endpoint, code if isinstance(code, int) else 0, reason)
