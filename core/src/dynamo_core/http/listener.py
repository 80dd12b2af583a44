"""An HTTP listener: where it binds, what it refuses, and how it ends."""

from __future__ import annotations

import asyncio
import errno
import inspect
import ipaddress
import logging
import socket
import ssl as ssl_module
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

from aiohttp import ClientConnectionResetError, http_parser, web
from aiohttp.http_exceptions import HttpProcessingError

from dynamo_core.contracts.frontend import HttpHandler, HttpRoute
from dynamo_core.errors import ConfigError, DynamoError
from dynamo_core.http.errors import INTERNAL_MESSAGE, error_response, error_type, response_for
from dynamo_core.http.gate import Gate

log = logging.getLogger(__name__)
_protocol_log = logging.getLogger(f"{__name__}.protocol")

_MEGABYTE = 1024 * 1024
#: Seconds that a cancelled handler may take to clean up before its connection is cut.
_CANCEL_GRACE = 2.0
#: Seconds to read away, and ignore, what a client still sends after its answer.
_LINGER = 5.0
_BACKLOG = 1024
_MAX_ECHO = 256

_Handle = Callable[[Any], Awaitable[web.StreamResponse]]


class _AlreadyReported(ConnectionError):
    """Ends a response that had begun: the connection is closed, so that nobody takes what came for the whole."""


class _ProtocolNoise(logging.Filter):
    """Drops what the HTTP library reports although it is a client's fault or has been reported here."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            log.debug("a client sent what is not HTTP: %s", error.message)
        return not isinstance(error, (_AlreadyReported, HttpProcessingError, ClientConnectionResetError))


_protocol_log.addFilter(_ProtocolNoise())


class Listener:
    """Serves routes on one address, within limits.

    `name` is how messages call it; `port` 0 takes any free one; `body_limit` is in bytes, `idle_timeout` in seconds;
    `port_option` is what an operator sets to move it.

    A handler is cancelled when its client leaves. An error that a handler raises becomes a JSON answer; if the answer
    had begun, the connection is closed instead.
    """

    def __init__(
        self,
        name: str,
        *,
        host: str,
        port: int,
        routes: Iterable[HttpRoute],
        body_limit: int,
        max_connections: int,
        idle_timeout: float,
        reuse_port: bool = False,
        ssl: ssl_module.SSLContext | None = None,
        port_option: str = "--http-port",
    ) -> None:
        self.name = name
        self._host = host
        self._port = port
        self._body_limit = body_limit
        self._max_connections = max_connections
        self._idle_timeout = idle_timeout
        self._reuse_port = reuse_port
        self._ssl = ssl
        self._port_option = port_option
        #: Handlers by method and path, of routes without variables.
        self._exact: dict[tuple[str, str], HttpHandler] = {}
        self._runner = web.AppRunner(
            self._application(routes),
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=idle_timeout,
            lingering_time=_LINGER,
            logger=_protocol_log,
            shutdown_timeout=_CANCEL_GRACE,
        )
        self._running: dict[asyncio.Task[None], object] = {}
        self._draining = False
        self._server: asyncio.Server | None = None
        self._gate: Gate | None = None
        self._addresses: list[tuple[str, int]] = []
        self._closing = asyncio.Lock()
        self._closed = False

    @property
    def port(self) -> int:
        """The port it listens on; before `start`, the one asked for."""
        return self._addresses[0][1] if self._addresses else self._port

    @property
    def url(self) -> str:
        """Where a client on this host reaches it, without a slash at the end."""
        host = self._host
        if host in ("", "0.0.0.0"):
            host = "127.0.0.1"
        elif host == "::":
            host = "::1"
        scheme = "http" if self._ssl is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def exposure(self) -> Literal["loopback", "network"]:
        """Whether only this host can reach it. Known after `start`; before, the cautious answer is given."""
        if self._addresses and all(_is_loopback(host) for host, _ in self._addresses):
            return "loopback"
        return "network"

    @property
    def connections(self) -> int:
        """Open connections that have sent a request."""
        server = self._runner.server
        return len(server.connections) if server is not None else 0

    @property
    def running(self) -> int:
        """Requests being handled."""
        return len(self._running)

    @property
    def refused_connections(self) -> int:
        """Connections closed at once because there were `max_connections`."""
        return self._gate.refused if self._gate is not None else 0

    @property
    def timed_out_connections(self) -> int:
        """Connections closed because their first request header did not come in time."""
        return self._gate.timed_out if self._gate is not None else 0

    async def start(self) -> None:
        """Binds and begins to serve.

        Raises:
            ConfigError: the address cannot be bound; the message says which listener, where, and what to set.
        """
        if http_parser.HttpRequestParser is http_parser.HttpRequestParserPy:
            log.warning(
                "aiohttp runs without its C parser; HTTP will be slow. Install a wheel of aiohttp built with it"
            )
        await self._runner.setup()
        server = self._runner.server
        if server is None:
            raise RuntimeError("the HTTP server was not made")
        # Most requests need none of what the library's application does for each: resolving, freezing, signals.
        server.request_handler = partial(self._dispatch, server.request_handler)
        self._gate = Gate(server, lambda: self.connections, max_connections=self._max_connections)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._gate,
                self._host or None,
                self._port,
                ssl=self._ssl,
                backlog=_BACKLOG,
                reuse_address=True,
                reuse_port=self._reuse_port or None,
            )
        except (OSError, OverflowError, UnicodeError) as error:
            await self.aclose()
            raise ConfigError(self._bind_error(error)) from error
        self._addresses = [sock.getsockname()[:2] for sock in self._server.sockets]
        if self.exposure == "network":
            log.warning(
                "the %s listener is open to the network on %s:%d; whoever reaches it can use it",
                self.name,
                self._host or "*",
                self.port,
            )

    async def drain_and_close(self, timeout: float) -> None:
        """Stops accepting, lets running requests end for up to `timeout` seconds, then cancels the rest.

        Idle connections are closed at once; those of running requests after their answer. `aclose` cuts this short.
        """
        self._stop_accepting()
        await self._close_idle()
        if self._running:
            await asyncio.wait(list(self._running), timeout=timeout)
        await self.aclose()

    async def aclose(self) -> None:
        """Cancels what runs and closes everything. Safe twice, at the same time too, and without `start`."""
        self._stop_accepting()
        running = list(self._running)
        for task in running:
            task.cancel()
        async with self._closing:
            if self._closed:
                return
            if running:
                await asyncio.wait(running, timeout=_CANCEL_GRACE)
            await self._runner.cleanup()
            # Only now: whoever cuts this short closes the rest by calling again.
            self._closed = True

    def _stop_accepting(self) -> None:
        self._draining = True
        if self._server is not None:
            self._server.close()
        if self._gate is not None:
            self._gate.close()

    async def _close_idle(self) -> None:
        server = self._runner.server
        if server is None:
            return
        # What has been read from a socket already becomes a request, over a few turns of the loop: such a connection is
        # not idle.
        for _ in range(4):
            await asyncio.sleep(0)
        busy = {id(protocol) for protocol in self._running.values()}
        for connection in server.connections:
            if id(connection) in busy:
                connection.close()
            else:
                connection.force_close()

    def _bind_error(self, error: Exception) -> str:
        where = f"the {self.name} listener cannot listen on {self._host or '*'}:{self._port}"
        another = f"choose another port with {self._port_option}"
        number = error.errno if isinstance(error, OSError) else None
        if number == errno.EADDRINUSE:
            return f"{where}: the port is in use; end the process that holds it, or {another}"
        if number in (errno.EACCES, errno.EPERM):
            return f"{where}: not allowed; {another} (1024 or above)"
        if isinstance(error, OverflowError):
            return f"{where}: not a port; {another} (0 to 65535)"
        if isinstance(error, (socket.gaierror, UnicodeError)) or number == errno.EADDRNOTAVAIL:
            return f"{where}: this host has no such address; set host to one of its own, such as 127.0.0.1 or 0.0.0.0"
        return f"{where}: {error}; choose another address, or {another}"

    def _application(self, routes: Iterable[HttpRoute]) -> web.Application:
        app = web.Application(middlewares=[self._middleware], client_max_size=self._body_limit)
        app.on_response_prepare.append(_echo_request_id)
        for route in routes:
            handler = _as_coroutine(route.handler)
            if "{" not in route.path:
                self._exact[route.method.upper(), route.path] = handler
            try:
                if route.method.upper() == "GET":
                    app.router.add_get(route.path, handler)
                else:
                    app.router.add_route(route.method, route.path, handler)
            except (RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"the {self.name} listener cannot serve {route.method} {route.path}: {error}; "
                    "two plugins may want the same route: drop one, or move it to another listener"
                ) from error
        return app

    async def _dispatch(self, application: _Handle, request: Any) -> web.StreamResponse:
        """Takes a request for an exact path to its handler; any other, or one that asks for more, to `application`."""
        handler = self._exact.get((request.method, request.raw_path))
        headers = request.headers
        if handler is None or "expect" in headers or "x-request-id" in headers:
            return await application(request)
        return await self._guard(request, handler, found=True)

    @web.middleware
    async def _middleware(self, request: web.Request, handler: HttpHandler) -> web.StreamResponse:
        return await self._guard(request, handler, found=request.match_info.http_exception is None)

    async def _guard(self, request: web.Request, handler: HttpHandler, *, found: bool) -> web.StreamResponse:
        """Runs a handler within the limits; `found` is whether it is that of a route, not of the library's refusal."""
        task = asyncio.current_task()
        if task is not None and task not in self._running:
            self._running[task] = request.protocol
            task.add_done_callback(self._ended)
        try:
            length = request.content_length
            if length is not None and length > self._body_limit:
                return self._too_large()
            response = await handler(request)
        except web.HTTPException as error:
            response = self._http_error(request, error, found=found)
        except DynamoError as error:
            if request.writer.output_size:
                self._break(request, error)
            response = response_for(error)
            if response.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                log.error("%s %s failed", request.method, request.path, exc_info=error)
        except ClientConnectionResetError:
            raise
        except Exception as error:
            if request.writer.output_size:
                self._break(request, error)
            log.error("%s %s failed", request.method, request.path, exc_info=error)
            response = error_response(500, INTERNAL_MESSAGE)
        if self._draining and not response.prepared:
            response.force_close()
        return response

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)

    def _break(self, request: web.Request, error: Exception) -> None:
        log.error("%s %s failed in the middle of its answer", request.method, request.path, exc_info=error)
        raise _AlreadyReported from error

    def _too_large(self) -> web.Response:
        limit = f"{self._body_limit / _MEGABYTE:.6g}"
        response = error_response(413, f"Request body exceeds the limit of {limit} MB set by DYN_HTTP_BODY_LIMIT_MB")
        response.force_close()
        return response

    def _http_error(self, request: web.Request, error: web.HTTPException, *, found: bool) -> web.StreamResponse:
        """The library's own refusals, in our form. Redirects and the like pass as they are."""
        if error.status < 400 or error.content_type == "application/json":
            return _copy(error)
        if error.status == HTTPStatus.NOT_FOUND and not found:
            return error_response(404, f"Route not found: {request.method} {request.path}")
        if isinstance(error, web.HTTPMethodNotAllowed):
            return error_response(
                405,
                f"Method not allowed: {request.method} {request.path}",
                headers={"Allow": ",".join(sorted(error.allowed_methods))},
            )
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            return self._too_large()
        return error_response(error.status, error.reason, type=error_type(error.status))


def _as_coroutine(handler: HttpHandler) -> Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]:
    """The handler as the library wants it; the contract allows anything that gives an awaitable."""
    if inspect.iscoroutinefunction(handler):
        return handler

    async def call(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    return call


def _copy(error: web.HTTPException) -> web.Response:
    """The exception as a response; returning the exception itself is deprecated."""
    headers = error.headers.copy()
    headers.popall("Content-Type", None)
    headers.popall("Content-Length", None)
    return web.Response(
        status=error.status, reason=error.reason, text=error.text, headers=headers, content_type=error.content_type
    )


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """A client finds its own request id on the answer, whatever the answer is."""
    value = request.headers.get("x-request-id")
    if value and len(value) <= _MAX_ECHO:
        response.headers["x-request-id"] = value


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
