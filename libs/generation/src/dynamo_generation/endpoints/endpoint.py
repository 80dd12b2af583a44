"""The base of all model routes: read, check, find the model, account, and answer errors."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import msgspec
from aiohttp import web
from dynamo_core import DynamoError, EngineContext, Principal, Problem
from dynamo_core.errors import (
    CLIENT_CLOSED_REQUEST,
    ModelNotFound,
    QuotaExceeded,
    RateLimited,
    ServiceOverloaded,
    Unavailable,
)
from dynamo_core.protocol import truncated
from dynamo_http import error_response, principal_of, set_request_id

from dynamo_generation.answers import raw_response
from dynamo_generation.answers.annotations import Timing
from dynamo_generation.answers.sse import ClientGone, EventStream
from dynamo_generation.bodies.reading import Body, read_body
from dynamo_generation.endpoints.error_schema import ErrorBody
from dynamo_generation.endpoints.errors import error_event, report
from dynamo_generation.requests.end_user import Field, with_end_user
from dynamo_generation.requests.fields import Accepts
from dynamo_generation.requests.ignored_fields import IgnoredFields, headers_of

if TYPE_CHECKING:
    from dynamo_core import FrontendServices, InflightRequest, ServedModel

#: The headers that the books of a request want.
_BOOKED = ("traceparent", "tracestate", "x-request-id")

#: Bytes of an answer that are handed to the connection at once.
AT_ONCE = 256 * 1024

#: Models that an error names, if the one that was asked for is not there.
_NAMED = 5

ParsedT = TypeVar("ParsedT")
T = TypeVar("T")


@dataclass(slots=True)
class Exchange:
    """One request to one model that exists."""

    http: web.Request
    body: Body
    model: ServedModel
    inflight: InflightRequest
    timing: Timing
    ctx: EngineContext
    principal: Principal = field(default_factory=Principal)
    #: Where events go, if the client wants them.
    out: EventStream | None = None
    #: What ends a stream that breaks, where that depends on what was in it.
    broken: Callable[[Problem], bytes] | None = None
    #: What ends a stream that is whole, where something has to be done before it may end.
    finalize: Callable[[], Awaitable[bytes]] | None = None

    async def release_body(self) -> None:
        """Let go of a large body once an engine can be asked: its memory and its place are for others."""
        await self.body.release(self.http)


class ModelEndpoint(ABC, Generic[ParsedT]):
    """A route that asks a model. `ParsedT` is the type of a checked body."""

    #: The label of metrics.
    ENDPOINT: ClassVar[str]
    #: What the model's card calls what is asked for.
    MODEL_TYPE: ClassVar[str]
    #: How bodies are read, and the fields that may only ask for nothing; `check` goes by them.
    BODY: ClassVar[type[msgspec.Struct]]
    #: What an error looks like.
    ERROR: ClassVar[type[msgspec.Struct]] = ErrorBody
    PASSIVE: ClassVar[Mapping[str, Accepts]]
    #: Where a body names its end user and its session, best first.
    USER: ClassVar[Sequence[Field]] = ()
    SESSION: ClassVar[Sequence[Field]] = ()

    def __init__(self, services: FrontendServices, ignored: IgnoredFields) -> None:
        self.services = services
        self._ignored = ignored

    async def read(self, http: web.Request) -> Body:
        """Return the body; with what a client may leave out, where an API has another default.

        Raises:
            Exception: as `read_body` does.
        """
        return await read_body(http)

    @abstractmethod
    def check(self, raw: dict[str, Any]) -> ParsedT:
        """Check a body as far as no model is needed for it.

        Raises:
            InvalidArgument: naming the field.
        """

    def check_model(self, model: ServedModel) -> None:
        """Check that the model can be asked for this.

        Raises:
            ModelNotFound: it serves other things.
        """
        if self.MODEL_TYPE not in model.card.model_types:
            raise ModelNotFound(f"Model not found: {model.name!r} does not serve {self.ENDPOINT}")

    @abstractmethod
    async def serve(self, exchange: Exchange, parsed: ParsedT) -> web.StreamResponse:
        """Answer. Errors may be raised at any time, also after the answer has begun."""

    async def handle(self, http: web.Request) -> web.StreamResponse:
        """Return the handler of the route."""
        timing = Timing()
        try:
            body = await self.read(http)
            principal = with_end_user(principal_of(http), body.raw, self.USER, self.SESSION)
        except DynamoError as error:
            return self._reject(error)
        except web.RequestPayloadError:
            # The body is cut off, or late: the listener words the answer, as it does for every route.
            self.services.requests.refused("validation")
            raise
        model = self.find(body.raw.get("model"), principal)
        response: web.StreamResponse
        if isinstance(model, DynamoError):
            response = await self._refuse(http, body, model, principal)
        else:
            with self._begin(http, body.raw, model.name, principal) as inflight:
                set_request_id(http, inflight.request_id)
                ctx = EngineContext(inflight.request_id, metadata=inflight.metadata)
                response = await self._answer(Exchange(http, body, model, inflight, timing, ctx, principal))
        body.free_later()
        return response

    def _begin(self, http: web.Request, raw: dict[str, Any], model: str, principal: Principal) -> InflightRequest:
        """Open the books of a request for a model that is known."""
        given = http.headers
        return self.services.requests.begin(
            model=model,
            endpoint=self.ENDPOINT,
            streaming=raw.get("stream") is True,
            headers={name: given[name] for name in _BOOKED if name in given},
            principal=principal,
        )

    def find(self, name: object, principal: Principal) -> ServedModel | DynamoError:
        """Return the model that a body names, or why it cannot be had.

        One that the caller's key is not for is not there.
        """
        try:
            return self.services.models.get(name if isinstance(name, str) and principal.allows(name) else "")
        except DynamoError as error:
            # The frames of its traceback and the caller, which keeps it, would hold the body until the next collection.
            return error.with_traceback(None)

    async def _check(self, http: web.Request, body: Body) -> ParsedT:
        """Return what `check` makes of a body. A large one may have as many parts as would hold the event loop."""
        return await self.off_loop(http, body, self.check)

    async def off_loop(self, http: web.Request, body: Body, check: Callable[[dict[str, Any]], T]) -> T:
        """Return what `check` makes of the known fields of a body, in a thread if it is large."""
        if self._ignored.unknown:
            self._ignored.strip(http, body.raw, {*self.BODY.__struct_fields__, *self.PASSIVE}, self.ENDPOINT)
        return await body.run(check, body.raw)

    async def _refuse(self, http: web.Request, body: Body, missing: DynamoError, principal: Principal) -> web.Response:
        """Return the answer for a model that is not there.

        The books are kept by model, so only one that is known is in them. What is wrong with the body itself is told
        first.
        """
        try:
            await self._check(http, body)
        except DynamoError as error:
            return self._reject(error)
        name = body.raw.get("model")
        if (
            isinstance(missing, Unavailable)
            and isinstance(name, str)
            and principal.allows(name)
            and name in self.services.models.readiness()
        ):
            with self._begin(http, body.raw, name, principal) as inflight:
                set_request_id(http, inflight.request_id)
                problem = self.services.problem_of(missing)
                inflight.fail(problem.metric, problem.status, missing)
                return self.respond_error(problem)
        if isinstance(missing, ModelNotFound):
            names = sorted(model.name for model in self.services.models.list() if principal.allows(model.name))
            served = f" (served: {', '.join(names[:_NAMED])}{', …' if len(names) > _NAMED else ''})" if names else ""
            missing = ModelNotFound(self.not_found(truncated(str(name)), served), cause=missing)
        return self._reject(missing)

    def _reject(self, error: Exception) -> web.Response:
        """Return the answer to a request that failed before it was known for which model it is."""
        problem = self.services.problem_of(error)
        self.services.requests.refused(problem.metric)
        return self.respond_error(problem)

    def not_found(self, name: str, served: str) -> str:
        """Return what is said of a model that is not there; `served` names others, in brackets, if there are any."""
        return f"Model not found: '{name}'{served}"

    def respond_error(self, problem: Problem) -> web.Response:
        """Return an error as this API words it."""
        return error_response(problem)

    def last_event(self, exchange: Exchange, problem: Problem, error: Exception) -> bytes:
        """Return the last item of a stream that broke, as this API words it."""
        return error_event(problem) if exchange.broken is None else exchange.broken(problem)

    async def _answer(self, exchange: Exchange) -> web.StreamResponse:
        inflight = exchange.inflight
        try:
            parsed = await self._check(exchange.http, exchange.body)
            self.check_model(exchange.model)
            return await self.serve(exchange, parsed)
        except asyncio.CancelledError:
            exchange.ctx.kill()
            self._cut_off(exchange)
            raise
        except ClientGone:
            inflight.disconnected()
            response = None if exchange.out is None else exchange.out.response
            return response or web.Response(status=CLIENT_CLOSED_REQUEST)
        except (ServiceOverloaded, RateLimited, QuotaExceeded) as error:
            # There may be very many of these, just when there is no time for them.
            return await self._respond_refused(exchange.http, self._fail(exchange, error))
        except Exception as error:
            return self._fail(exchange, error)

    async def _respond_refused(self, http: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """Write a refusal by hand if that can be done, else leave it to aiohttp."""
        if not isinstance(response, web.Response) or response.prepared or not isinstance(response.body, bytes):
            return response
        body = response.body
        if not raw_response.fast_path(http) or not raw_response.has_room(http, len(body)):
            return response
        try:
            await http.writer.write_eof(raw_response.refusal(http, response, body))
        except ConnectionError:
            return response
        return raw_response.sent()

    def _cut_off(self, exchange: Exchange) -> None:
        """Handle a cancellation: the client left, or the server ends and the client is told."""
        transport = exchange.http.transport
        if transport is None or transport.is_closing():
            exchange.inflight.disconnected()
            return
        error = Unavailable("the server is shutting down")
        problem = self.services.problem_of(error)
        exchange.inflight.fail(problem.metric, problem.status, error)
        if exchange.out is not None and exchange.out.response is not None:
            exchange.out.cut(self.last_event(exchange, problem, error))

    def _fail(self, exchange: Exchange, error: Exception) -> web.StreamResponse:
        problem = self.services.problem_of(error)
        report(problem, error, exchange.inflight.request_id)
        exchange.inflight.fail(problem.metric, problem.status, error)
        out = exchange.out
        if out is None or out.response is None:
            return self.respond_error(problem)
        out.cut(self.last_event(exchange, problem, error))
        return out.response

    async def send(self, exchange: Exchange, body: list[bytes]) -> web.StreamResponse:
        """Give the client a whole answer, which is in pieces; the list may be empty afterwards.

        Raises:
            ClientGone: it left, or does not read it in time.
        """
        http = exchange.http
        size = sum(map(len, body))
        try:
            if raw_response.fast_path(http) and raw_response.has_room(http, size):
                await http.writer.write_eof(raw_response.json_answer(http, b"".join(body)))
                return raw_response.sent()
            if size > AT_ONCE:
                return await self._send_large(http, body, size)
            response = web.Response(body=b"".join(body), content_type="application/json", headers=headers_of(http))
            async with asyncio.timeout(self.services.write_stall):
                await response.prepare(http)
                await response.write_eof()
        except (TimeoutError, ConnectionError) as error:
            if http.transport is not None:
                http.transport.abort()
            raise ClientGone from error
        return response

    async def send_in_pieces(self, exchange: Exchange, pieces: Iterable[bytes]) -> web.StreamResponse:
        """Give the client a large answer that is made while the client reads it, and never there as a whole.

        Raises:
            ClientGone: it left, or does not read it in time.
        """
        http = exchange.http
        response = web.StreamResponse(headers=headers_of(http))
        response.content_type = "application/json"
        waiting = bytearray()
        try:
            await response.prepare(http)
            for piece in pieces:
                waiting += piece
                if len(waiting) >= AT_ONCE:
                    await response.write(bytes(waiting))
                    waiting.clear()
                # Others have their turn after each.
                await asyncio.sleep(0)
            await response.write(bytes(waiting))
            await response.write_eof()
        except ConnectionError as error:
            raise ClientGone from error
        return response

    async def _send_large(self, http: web.Request, body: list[bytes], size: int) -> web.StreamResponse:
        """Write a large answer as fast as the client reads it, and let go of what has been written.

        The listener closes the connection of a client that does not read.
        """
        response = web.StreamResponse(headers=headers_of(http))
        response.content_type = "application/json"
        response.content_length = size
        await response.prepare(http)
        body.reverse()
        while body:
            waiting = [body.pop()]
            left = AT_ONCE - len(waiting[0])
            while body and left > 0:
                waiting.append(body.pop())
                left -= len(waiting[-1])
            await response.write(b"".join(waiting))
        await response.write_eof()
        return response
