"""An HTTP listener: binding, refusals, and orderly shutdown."""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import logging
import os
import socket
import ssl as ssl_module
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

from aiohttp import ClientConnectionResetError, HttpVersion10, HttpVersion11, StreamReader, http_parser, web
from aiohttp.http_exceptions import HttpProcessingError
from dynamo_core.contracts.http_route import ErrorResponse, HttpHandler, HttpRoute
from dynamo_core.errors import (
    INTERNAL,
    ConfigError,
    DynamoError,
    Problem,
    Unavailable,
    problem_of,
)
from dynamo_core.resources import AsyncResource

from dynamo_http.binding import bind_error
from dynamo_http.body_budget import BodyBudget
from dynamo_http.compressed_bodies import BufferedRequest, request_factory
from dynamo_http.connection import MAX_FIELD, MAX_HEADERS, Connection
from dynamo_http.connection_limiter import HEADER_TIMEOUT, ConnectionLimiter
from dynamo_http.cors import Cors
from dynamo_http.errors import error_response
from dynamo_http.stalled_connections import Stalls

log = logging.getLogger(__name__)
_protocol_log = logging.getLogger(f"{__name__}.protocol")

_MEGABYTE = 1024 * 1024
#: Seconds that a cancelled handler may take to clean up before its connection is cut.
_CANCEL_GRACE = 2.0
#: Seconds to read away, and ignore, what a client still sends after its answer.
_LINGER = 5.0
#: Seconds that a connection which was accepted last may take to say what it wants.
_LAST_WORDS = 1.0
_BACKLOG = 1024
#: Seconds until a request's body must be complete, unless the settings say otherwise.
BODY_TIMEOUT = 60.0
#: Bytes of an answer that the kernel takes ahead of what it can send. More would hide for long that a client is slow.
_UNSENT = 128 * 1024
#: Seconds that a client may leave an answer unread, unless the settings say otherwise.
_WRITE_STALL = 30.0
_MALFORMED_BODY = Problem(400, "The request body is not framed, or not encoded, as its header says")

_Handle = Callable[[Any], Awaitable[web.StreamResponse]]


class _AlreadyReported(ConnectionError):
    """The end of a response that had begun: the connection is closed, so that no client takes it for whole."""


class _BodyTimeout(web.RequestPayloadError):
    """Ends the body of a request that does not arrive in time."""

    def __init__(self, seconds: float) -> None:
        self.problem = Problem(408, f"The request body did not arrive within {seconds:g} s")
        super().__init__(self.problem.message)


class _ProtocolNoise(logging.Filter):
    """A log filter for records of the HTTP library that are a client's fault or were reported here."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            log.debug("a client sent what is not HTTP: %s", error.message)
        return not isinstance(
            error, (_AlreadyReported, HttpProcessingError, web.RequestPayloadError, ClientConnectionResetError)
        )


_protocol_log.addFilter(_ProtocolNoise())


class Listener(AsyncResource):
    """Serves routes on one address, within limits.

    `name` is how messages call it; `port` 0 takes any free one; `body_limit` is in bytes, and `body_budget` bounds the
    sum of all bodies; `port_option` is what an operator sets to move it. Times are in seconds: `idle_timeout` between
    two requests, `header_timeout` until the first request's header is complete, `body_timeout` until the body behind a
    header is, `write_stall` that a client may leave an answer unread.

    With `reuse_port` others may listen on the port too, if all of them set it; the kernel gives each new connection to
    one of them.

    `respond_error` words what the listener answers in place of a handler of a route that does not word it itself.
    `overload_status` is that of a request which is refused for load; without it the table's.

    A handler is cancelled when its client leaves. An error that a handler raises is told as `problem_of` has it; if the
    answer had begun, the connection is closed instead.
    """

    def __init__(
        self,
        name: str,
        *,
        host: str,
        port: int,
        routes: Iterable[HttpRoute],
        body_limit: int,
        body_budget: BodyBudget | None = None,
        max_connections: int,
        idle_timeout: float,
        header_timeout: float = HEADER_TIMEOUT,
        body_timeout: float = BODY_TIMEOUT,
        write_stall: float = _WRITE_STALL,
        reuse_port: bool = False,
        ssl: ssl_module.SSLContext | None = None,
        cors: Cors | None = None,
        port_option: str = "--http-port",
        respond_error: ErrorResponse = error_response,
        overload_status: int | None = None,
    ) -> None:
        self.name = name
        self.routes = tuple(routes)
        self._host = host
        self._port = port
        self._body_limit = body_limit
        self._body_budget = body_budget
        self._max_connections = max_connections
        self._header_timeout = header_timeout
        self._body_timeout = body_timeout
        self._stalls = Stalls(write_stall)
        self._reuse_port = reuse_port
        self._ssl = ssl
        self._cors = cors
        self._port_option = port_option
        self._respond_error = respond_error
        self._overload_status = overload_status
        #: Handlers by method and path, of routes without variables.
        self._exact: dict[tuple[str, str], HttpHandler] = {}
        #: How routes word errors, by their handlers.
        self._wording: dict[HttpHandler, ErrorResponse] = {}
        #: Of the exact ones, those that are answered while the process is still starting.
        self._early: set[tuple[str, str]] = set()
        self._starting = False
        self._options = _connection_options(idle_timeout)
        self._runner = web.AppRunner(
            self._application(self.routes), handler_cancellation=True, shutdown_timeout=_CANCEL_GRACE, **self._options
        )
        self._running: dict[asyncio.Task[None], object] = {}
        self._draining = False
        self._leaving = False
        self._server: asyncio.Server | None = None
        self._limiter: ConnectionLimiter | None = None
        self._addresses: list[tuple[str, int]] = []
        self._closing = asyncio.Lock()
        self._closed = False

    @property
    def port(self) -> int:
        """The port it listens on; before `start`, the one asked for."""
        return self._addresses[0][1] if self._addresses else self._port

    @property
    def url(self) -> str:
        """The URL for clients on this host, without a slash at the end."""
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
        return self._limiter.refused if self._limiter is not None else 0

    @property
    def timed_out_connections(self) -> int:
        """Connections closed because their first request header did not come in time."""
        return self._limiter.timed_out if self._limiter is not None else 0

    @property
    def stalled_connections(self) -> int:
        """Connections cut because their clients did not read what they were sent."""
        return self._stalls.cut

    @property
    def unsafe_connections(self) -> int:
        """Connections closed because no TLS came about."""
        return self._limiter.unsafe if self._limiter is not None else 0

    @property
    def certificate(self) -> ssl_module.SSLContext | None:
        """The TLS context of new connections; None where they have no TLS."""
        return self._ssl

    def use_certificate(self, ssl: ssl_module.SSLContext | None) -> None:
        """Use this context for new connections; open ones keep theirs."""
        self._ssl = ssl
        if self._limiter is not None:
            self._limiter.ssl = ssl

    async def start(self, *, accept: bool = True, starting: bool = False) -> None:
        """Bind and begin to serve; without `accept` it only holds the address until `accept` is called.

        With `starting` only routes that are `before_ready` are answered until `started` is called; others get a 503.

        Raises:
            ConfigError: the address cannot be bound, or not be served safely; the message says which listener, where,
                and what to set.
        """
        self._starting = starting
        await self._runner.setup()
        server = self._runner.server
        if server is None:
            raise RuntimeError("the HTTP server was not made")
        # Most requests need none of what the library's application does for each: resolving, freezing, signals.
        server.request_handler = partial(self._handle, server.request_handler)
        server.request_factory = request_factory(self._body_limit, asyncio.get_running_loop(), self._body_budget)
        self._limiter = ConnectionLimiter(
            partial(
                Connection, server, respond_error=self._respond_error, loop=asyncio.get_running_loop(), **self._options
            ),
            lambda: self.connections,
            max_connections=self._max_connections,
            header_timeout=self._header_timeout,
            ssl=self._ssl,
            stalls=self._stalls,
            name=self.name,
        )
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._limiter,
                self._host or None,
                self._port,
                backlog=_BACKLOG,
                reuse_address=True,
                reuse_port=self._reuse_port or None,
                start_serving=accept,
            )
        except (OSError, OverflowError, UnicodeError) as error:
            await self.aclose()
            raise ConfigError(bind_error(self.name, self._host, self._port, self._port_option, error)) from error
        for sock in self._server.sockets:
            # Connections that it accepts have the option too.
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        self._addresses = [sock.getsockname()[:2] for sock in self._server.sockets]
        if http_parser.HttpRequestParser is http_parser.HttpRequestParserPy:
            await self._without_parser()
        log.info("the %s listener serves %s", self.name, _told(self.routes))
        if self.exposure == "network":
            log.warning(
                "the %s listener is open to the network on %s:%d; every host that reaches it can use it",
                self.name,
                self._host or "*",
                self.port,
            )

    async def _without_parser(self) -> None:
        """Warn that aiohttp lacks its C parser: refusals of smuggling are proved with that one only."""
        lacks = "aiohttp runs without its C parser; install a wheel of aiohttp built with it"
        if self.exposure == "network":
            await self.aclose()
            raise ConfigError(
                f"the {self.name} listener will not serve the network on {self._host or '*'}:{self.port}: {lacks}, or "
                "serve 127.0.0.1 only"
            )
        log.warning("%s: HTTP is read by the slow parser, which refuses less of what is malformed", lacks)

    async def accept(self) -> None:
        """Begin to serve, if `start` did not."""
        if self._server is not None and not self._draining:
            await self._server.start_serving()

    def started(self) -> None:
        """Answer all routes from now on."""
        self._starting = False

    def leave(self) -> None:
        """Close every connection after its next answer, so that clients go elsewhere before a drain."""
        self._leaving = True

    async def drain_and_close(self, timeout: float) -> None:
        """Stop accepting, let running requests end for up to `timeout` seconds, then cancel the rest.

        Idle connections are closed at once; those of running requests after their answer. `aclose` cuts this short.
        """
        self._draining = True
        await self._close_door()
        if timeout and self._limiter is not None:
            await self._limiter.settled(min(timeout, _LAST_WORDS))
        self._stop_accepting()
        await self._close_idle()
        if self._running:
            await asyncio.wait(list(self._running), timeout=timeout)
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel what runs and close everything. Safe twice, at the same time too, and without `start`."""
        self._stop_accepting()
        running = list(self._running)
        for task in running:
            task.cancel()
        async with self._closing:
            if self._closed:
                return
            if running:
                await asyncio.wait(running, timeout=_CANCEL_GRACE)
            if self._limiter is not None:
                await self._limiter.aclose()
            await self._runner.cleanup()
            self._stalls.close()
            # Only now: a caller that cuts this short closes the rest by calling again.
            self._closed = True

    def _stop_accepting(self) -> None:
        self._draining = True
        if self._server is not None:
            self._server.close()
        if self._limiter is not None:
            self._limiter.close()

    async def _close_door(self) -> None:
        """Stop listening, without losing a connection that the kernel has made and the loop has not taken yet."""
        server, limiter = self._server, self._limiter
        if server is None or limiter is None:
            return
        # The same sockets once more, since the server does not let its own be asked.
        doors = [socket.socket(fileno=os.dup(listening.fileno())) for listening in server.sockets]
        server.close()
        accepted: list[socket.socket] = []
        for door in doors:
            door.setblocking(False)
            with door, suppress(OSError):
                # An error is that there is no more, or that this one never listened.
                while True:
                    accepted.append(door.accept()[0])
        loop = asyncio.get_running_loop()
        try:
            while accepted:
                accepted[-1].setblocking(False)
                await loop.connect_accepted_socket(limiter, accepted[-1])
                accepted.pop()
        finally:
            for connection in accepted:
                connection.close()

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

    def _application(self, routes: Iterable[HttpRoute]) -> web.Application:
        app = web.Application(middlewares=[self._middleware], client_max_size=self._body_limit)
        if self._cors is not None:
            app.on_response_prepare.append(self._cors.mark)
        for route in routes:
            handler = _as_coroutine(route.handler)
            if route.respond_error is not None:
                self._wording[handler] = route.respond_error
            if "{" not in route.path:
                self._exact[route.method.upper(), route.path] = handler
                if route.before_ready:
                    self._early.add((route.method.upper(), route.path))
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

    async def _handle(self, application: _Handle, request: Any) -> web.StreamResponse:
        """Bound the time of a request's body, however a handler reads it."""
        body = request.content
        if body.is_eof():
            # The whole body came with the head, as nearly all do: there is nothing to wait for.
            return await self._dispatch(application, request)
        deadline = asyncio.get_running_loop().call_later(self._body_timeout, _expire, body, self._body_timeout)
        try:
            return await self._dispatch(application, request)
        finally:
            deadline.cancel()

    async def _dispatch(self, application: _Handle, request: Any) -> web.StreamResponse:
        """Take a request for an exact path to its handler; any other, or one that asks for more, to `application`."""
        if self._leaving:
            # As if the client had asked for it: the writer of the answer goes by this, and says so in its header.
            request._message = request._message._replace(should_close=True)
        if request.protocol.half_closed:
            request.protocol.close_after_last()
        handler = self._exact.get((request.method, request.raw_path))
        if self._starting and (request.method.replace("HEAD", "GET"), request.path) not in self._early:
            return self._words(handler)(problem_of(Unavailable("The service is starting, please retry later")))
        headers = request.headers
        if request.version != HttpVersion11 or "transfer-encoding" in headers:
            fault = _framing_fault(request)
            if fault is not None:
                refused = self._words(handler)(Problem(400, fault))
                # Whatever the client speaks, or says that it does.
                request.answer_in(HttpVersion11)
                refused.force_close()
                return refused
        if handler is None or "expect" in headers or "origin" in headers:
            response = await application(request)
        else:
            response = await self._guard(request, handler, found=True)
        if "upgrade" in headers or request.method == "CONNECT":
            # We speak nothing else, but the parser takes what follows for another protocol.
            request.protocol.close()
        if not request.content.is_eof():
            request.protocol.answered_early(request.content, self._body_limit)
        return response

    @web.middleware
    async def _middleware(self, request: web.Request, handler: HttpHandler) -> web.StreamResponse:
        if self._cors is not None and (answer := self._cors.preflight(request)) is not None:
            return answer
        return await self._guard(request, handler, found=request.match_info.http_exception is None)

    async def _guard(self, request: web.Request, handler: HttpHandler, *, found: bool) -> web.StreamResponse:
        """Run a handler within the limits; `found` is whether it is that of a route, not of the library's refusal."""
        task = asyncio.current_task()
        if task is not None and task not in self._running:
            self._running[task] = request.protocol
            task.add_done_callback(self._ended)
        try:
            length = request.content_length
            if length is not None and length > self._body_limit:
                return self._too_large(handler)
            response = await handler(request)
        except web.HTTPException as error:
            response = self._http_error(request, error, handler, found=found)
        except ClientConnectionResetError:
            raise
        except web.RequestPayloadError as error:
            if request.writer.output_size:
                raise
            log.debug("a client's body ends early: %s", error)
            response = self._words(handler)(error.problem if isinstance(error, _BodyTimeout) else _MALFORMED_BODY)
            response.force_close()
        except Exception as error:
            if request.writer.output_size:
                self._break(request, error)
            problem = problem_of(error, self._overload_status)
            if problem.metric == INTERNAL or not isinstance(error, DynamoError):
                log.error("%s %s failed", request.method, request.path, exc_info=error)
            response = self._words(handler)(problem)
        finally:
            if isinstance(request, BufferedRequest):
                request.give_back()
        if self._draining and not response.prepared:
            response.force_close()
        return response

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)

    def _break(self, request: web.Request, error: Exception) -> None:
        log.error("%s %s failed in the middle of its answer", request.method, request.path, exc_info=error)
        raise _AlreadyReported from error

    def _too_large(self, handler: HttpHandler) -> web.Response:
        limit = f"{self._body_limit / _MEGABYTE:.6g}"
        message = f"Request body exceeds the limit of {limit} MB set by DYN_HTTP_BODY_LIMIT_MB"
        response = self._words(handler)(Problem(413, message))
        response.force_close()
        return response

    def _http_error(
        self, request: web.Request, error: web.HTTPException, handler: HttpHandler, *, found: bool
    ) -> web.StreamResponse:
        """Return the library's own refusals, in our form. Redirects and the like pass as they are."""
        if error.status < 400 or error.content_type == "application/json":
            return _copy(error)
        respond_error = self._words(handler)
        if error.status == HTTPStatus.NOT_FOUND and not found:
            return respond_error(Problem(404, f"Route not found: {request.method} {request.path}"))
        if isinstance(error, web.HTTPMethodNotAllowed):
            refused = respond_error(Problem(405, f"Method not allowed: {request.method} {request.path}"))
            refused.headers["Allow"] = ",".join(sorted(error.allowed_methods))
            return refused
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            return self._too_large(handler)
        return respond_error(Problem(error.status, error.reason))

    def _words(self, handler: HttpHandler | None) -> ErrorResponse:
        """Return how the route of this handler words errors."""
        return self._respond_error if handler is None else self._wording.get(handler, self._respond_error)


def _expire(body: StreamReader, seconds: float) -> None:
    """End a body that is not complete after so many seconds."""
    if not body.is_eof():
        body.set_exception(_BodyTimeout(seconds))


def _connection_options(idle_timeout: float) -> dict[str, Any]:
    """Return how the library is to treat each connection."""
    return {
        "access_log": None,
        # A request unpacks its body itself, when a handler reads it.
        "auto_decompress": False,
        "keepalive_timeout": idle_timeout,
        "lingering_time": _LINGER,
        "max_headers": MAX_HEADERS,
        "max_line_size": MAX_FIELD,
        "max_field_size": MAX_FIELD,
        "logger": _protocol_log,
    }


def _told(routes: Iterable[HttpRoute]) -> str:
    """Return the routes as ``GET /a, /b; POST /c``."""
    paths: dict[str, list[str]] = {}
    for route in sorted(routes, key=lambda route: (route.method, route.path)):
        paths.setdefault(route.method, []).append(route.display_path)
    return "; ".join(f"{method} {', '.join(those)}" for method, those in paths.items())


def _framing_fault(request: web.BaseRequest) -> str | None:
    """Return why to refuse a request that another server could take for two, or for a longer or shorter one."""
    if request.version < HttpVersion10:
        return "HTTP/0.9 is not spoken here"
    if "Transfer-Encoding" in request.headers and request.version < HttpVersion11:
        return "HTTP/1.0 has no Transfer-Encoding"
    if request.headers.get("Transfer-Encoding", "chunked").strip().lower() != "chunked":
        return "Transfer-Encoding must be chunked, and nothing else"
    return None


def _as_coroutine(handler: HttpHandler) -> Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]:
    """Return the handler as the library wants it; the contract allows anything that gives an awaitable."""
    if inspect.iscoroutinefunction(handler):
        return handler

    async def call(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    return call


def _copy(error: web.HTTPException) -> web.Response:
    """Return the exception as a response; returning the exception itself is deprecated."""
    headers = error.headers.copy()
    headers.popall("Content-Type", None)
    headers.popall("Content-Length", None)
    return web.Response(
        status=error.status, reason=error.reason, text=error.text, headers=headers, content_type=error.content_type
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
