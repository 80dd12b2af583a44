"""From an admitted request to a stream: route, call, and try another worker while nothing has been said yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_core.client.alarms import Alarms
from dynamo_core.client.board import LoadBoard, Ticket
from dynamo_core.client.flush import FlushQueue
from dynamo_core.client.pool import Pool
from dynamo_core.client.stream import ResponseStream
from dynamo_core.contracts.admission import Admission, Permit, Principal
from dynamo_core.contracts.call import Endpoint
from dynamo_core.contracts.context import EngineContext
from dynamo_core.contracts.endpoints import GENERATE
from dynamo_core.contracts.router import Route, Router, RoutingRequest
from dynamo_core.contracts.transport import Transport
from dynamo_core.errors import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoError,
    EngineShutdown,
    InvalidArgument,
    ResponseTimeout,
    ServiceOverloaded,
    Unavailable,
    WorkerOverloaded,
    chain_has,
)
from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_core.protocol.records import ModelCard
from dynamo_core.protocol.request import PreprocessedRequest

#: Refusals after which another worker may accept the same request.
RETRYABLE = (CannotConnect, ConnectionTimeout, Disconnected, EngineShutdown, WorkerOverloaded)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Bounds of one request, in seconds, and how many more workers are tried after a refusal."""

    retries: int = 2
    accept: float = 5.0
    first_item: float = 300.0
    total: float = 590.0


class Pipeline:
    """The way of every request in this process. Holds no state of a single request."""

    def __init__(self, *, transport: Transport, admission: Admission, board: LoadBoard, deadlines: Deadlines) -> None:
        self._transport = transport
        self._admission = admission
        self._board = board
        self._deadlines = deadlines
        self._alarms = _RequestAlarms(deadlines)
        self._flush = FlushQueue()

    @property
    def admission(self) -> Admission:
        """The policy that lets requests in."""
        return self._admission

    async def generate(
        self, request: PreprocessedRequest, ctx: EngineContext, principal: Principal, pool: Pool, router: Router
    ) -> ResponseStream:
        """Admits the request and returns its stream once a worker has accepted it.

        Raises:
            ServiceOverloaded: admission refused it, or every worker that was tried is at capacity.
            Unavailable: there is no worker.
            DynamoError: the worker's own refusal, or the last reason why no worker could be reached.
        """
        permit = await self._admission.admit(request, principal, [pool])
        return await self.open(GENERATE, request, request, ctx, pool, router, permit)

    async def open(
        self,
        endpoint: Endpoint,
        payload: Any,
        request: PreprocessedRequest,
        ctx: EngineContext,
        pool: Pool,
        router: Router,
        permit: Permit,
    ) -> ResponseStream:
        """Routes by `request` and calls `endpoint` with `payload`. The permit is released when the stream is closed."""
        attempt = _Attempts(self._flush, endpoint, permit, self._alarms)
        try:
            return await self._open(attempt, endpoint, payload, request, ctx, pool, router)
        except BaseException:
            await attempt.stream.aclose()
            raise

    async def _open(
        self,
        attempts: _Attempts,
        endpoint: Endpoint,
        payload: Any,
        request: PreprocessedRequest,
        ctx: EngineContext,
        pool: Pool,
        router: Router,
    ) -> ResponseStream:
        routing = RoutingRequest(request, ctx.id)
        stream = attempts.stream
        last: DynamoError | None = None
        for number in range(self._deadlines.retries + 1):
            if ctx.is_stopped():
                raise Cancelled("the request was stopped before a worker accepted it", cause=last)
            try:
                route = await router.route(routing, pool)
            except (ServiceOverloaded, Unavailable):
                if last is None:
                    raise
                break
            instance_id = route.instance.instance_id
            card = pool.cards.get(instance_id)
            if card is None:
                last = CannotConnect(f"worker {instance_id:x} left while the request was routed")
                routing.excluded |= {instance_id}
                continue
            attempt_ctx = EngineContext(ctx.id, attempt_id=f"{ctx.id}-{number}", metadata=ctx.metadata)
            attempt_ctx.gather = ctx.gather
            ctx.link_child(attempt_ctx)
            attempts.enter(self._ticket(route, attempt_ctx, routing, card))
            try:
                with self._alarms.accept.within():
                    source = await self._transport.call(route.instance, endpoint, payload, attempt_ctx, attempts.sink())
            except TimeoutError as error:
                last = ConnectionTimeout(
                    f"worker {instance_id:x} did not accept within {self._deadlines.accept} s", cause=error
                )
            except DynamoError as error:
                if not isinstance(error, RETRYABLE) or chain_has(error, InvalidArgument, Cancelled):
                    raise
                last = error
            else:
                stream.attach(source, instance_id)
                if stream.ended and stream.error is not None and not stream.started:
                    raise stream.error
                return stream
            routing.excluded |= {instance_id}
            attempts.leave()
            if stream.ended:
                # A deadline of the whole request passed meanwhile.
                raise stream.error or last
        raise _exhausted(last)

    def _ticket(self, route: Route, ctx: EngineContext, routing: RoutingRequest, card: ModelCard) -> Ticket:
        return self._board.enter(
            route,
            ctx.attempt_id,
            prompt_tokens=len(routing.request.token_ids),
            block_size=card.kv_cache_block_size,
            hashes=routing.known_hashes(card.kv_cache_block_size),
        )


class _RequestAlarms:
    """The deadlines of all requests of a pipeline."""

    __slots__ = ("accept", "deadlines", "first", "rest")

    def __init__(self, deadlines: Deadlines) -> None:
        first = min(deadlines.first_item, deadlines.total)
        self.deadlines = deadlines
        self.accept = Alarms(deadlines.accept)
        #: Until the first item.
        self.first = Alarms(first)
        #: From then on.
        self.rest = Alarms(deadlines.total - first)


class _Attempts:
    """What one request holds: its stream, its place on the load board, its permit, its deadline."""

    __slots__ = ("_alarm", "_alarms", "_output_tokens", "_permit", "_running", "_ticket", "stream")

    def __init__(self, flush: FlushQueue, endpoint: Endpoint, permit: Permit, alarms: _RequestAlarms) -> None:
        self._permit = permit
        self._alarms = alarms
        self._ticket: Ticket | None = None
        self._output_tokens = 0
        self._running = alarms.first
        self._alarm = alarms.first.set(self._first_due)
        observers = (self._count,) if endpoint is GENERATE else ()
        self.stream = ResponseStream(
            endpoint.merge, flush, observers=observers, on_end=self._ended, on_close=self._closed
        )

    def enter(self, ticket: Ticket) -> None:
        """A worker was chosen."""
        if self.stream.ended:
            ticket.leave()
        else:
            self._ticket = ticket

    def leave(self) -> None:
        """The worker did not take the request, or has finished it."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.leave()

    def sink(self) -> Any:
        """The sink for the chosen worker."""
        on_first: Callable[[], None] | None = self._ticket.first_item if self._ticket is not None else None
        return self.stream.begin(on_first)

    def _ended(self) -> None:
        self._running.cancel(self._alarm)
        self.leave()

    def _closed(self) -> None:
        self._permit.release(self._output_tokens)

    def _count(self, batch: Sequence[LLMEngineOutput]) -> None:
        for item in batch:
            self._output_tokens += len(item.token_ids)

    def _first_due(self) -> None:
        deadlines = self._alarms.deadlines
        if not self.stream.started and deadlines.first_item < deadlines.total:
            self.stream.fail(ResponseTimeout(f"no answer began within {deadlines.first_item} s"))
        elif deadlines.first_item < deadlines.total:
            self._running = self._alarms.rest
            self._alarm = self._running.set(self._last_due)
        else:
            self._last_due()

    def _last_due(self) -> None:
        self.stream.fail(ResponseTimeout(f"the answer took longer than {self._alarms.deadlines.total} s"))


def _exhausted(last: DynamoError | None) -> DynamoError:
    if isinstance(last, WorkerOverloaded):
        return ServiceOverloaded(cause=last)
    if isinstance(last, RETRYABLE):
        return Unavailable("no worker could be reached", cause=last)
    return last or Unavailable("no worker could be tried")
