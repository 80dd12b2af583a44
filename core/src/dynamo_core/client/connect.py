"""From a request to a call that a worker has accepted: route, call, and try another worker if one refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynamo_core.client.alarms import Alarms
from dynamo_core.client.attempts import Deadlines, Leg
from dynamo_core.client.board import LoadBoard, Ticket
from dynamo_core.client.route_span import route_span
from dynamo_core.client.side import Side
from dynamo_core.contracts.call import Endpoint, Source
from dynamo_core.contracts.context import EngineContext
from dynamo_core.contracts.router import Phase, Route, RoutingRequest
from dynamo_core.contracts.transport import Transport
from dynamo_core.errors import (
    BackendError,
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoError,
    EngineShutdown,
    InvalidArgument,
    ResponseTimeout,
    ServiceOverloaded,
    StreamIncomplete,
    Unavailable,
    WorkerOverloaded,
    chain_has,
)
from dynamo_core.protocol.records import AGGREGATED, DECODE, PREFILL, ModelCard
from dynamo_core.telemetry.stages import DISPATCH, ROUTE, Stages

#: Failures after which another worker may do the same request.
RETRYABLE = (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    EngineShutdown,
    ResponseTimeout,
    StreamIncomplete,
    WorkerOverloaded,
)

#: Failures after which a worker is left alone for a while.
DOWN = (CannotConnect, ConnectionTimeout, Disconnected, EngineShutdown, ResponseTimeout)

ROLES = (AGGREGATED, PREFILL, DECODE)

#: Makes what a chosen worker is sent.
Prepare = Callable[[Route, ModelCard], Any]


class Connector:
    """Places calls. Holds no state of a single request."""

    def __init__(self, *, transport: Transport, board: LoadBoard, deadlines: Deadlines, stages: Stages) -> None:
        self._transport = transport
        self._stages = {role: (stages.stage(ROUTE, role), stages.stage(DISPATCH, role)) for role in ROLES}
        self._board = board
        self._deadlines = deadlines
        self._accept = Alarms(deadlines.accept)
        #: How many workers are asked at most.
        self.tries = deadlines.retries + 1

    async def connect(
        self,
        leg: Leg,
        endpoint: Endpoint,
        payload: Any,
        routing: RoutingRequest,
        ctx: EngineContext,
        side: Side,
        *,
        prepare: Prepare | None = None,
        last: DynamoError | None = None,
    ) -> Source:
        """Calls `endpoint` of a worker of `side`; returns once it has accepted. The leg's stream is then fed.

        The worker is sent `payload`, or what `prepare` makes once it is known. Workers that refuse are added to
        ``routing.excluded``. `last` is why one failed that was asked before; those count.

        Raises:
            ServiceOverloaded: every worker that was asked is at capacity.
            Unavailable: there is no worker, or none that was not asked, or none could be reached.
            Cancelled: `ctx` was stopped; no worker has been asked since.
            DynamoError: the worker's own refusal, or why the leg's stream has ended meanwhile.
        """
        stream = leg.stream
        routed, dispatched = self._stages[side.pool.role]
        while leg.tried < self.tries:
            if ctx.is_stopped():
                raise Cancelled("the request was stopped before a worker accepted it", cause=last)
            number = leg.asked
            span = route_span(
                ctx,
                side.router.NAME,
                number,
                tokens_completed=leg.completed,
                last=last,
                from_worker=leg.moved_from,
            )
            begun = routed.enter()
            try:
                route = await side.router.route(routing, side.pool)
            except BaseException as error:
                if span is not None:
                    span.end(error if isinstance(error, DynamoError) else Cancelled("the routing was given up"))
                if (
                    isinstance(error, ServiceOverloaded | Unavailable)
                    and last is not None
                    and _asked_all(routing, side)
                ):
                    break
                raise
            finally:
                routed.leave(begun)
            if leg.over is not None:
                # A deadline of the whole request passed meanwhile, or what this one builds on has failed.
                if span is not None:
                    span.end(leg.over)
                raise leg.over
            leg.tried += 1
            leg.asked += 1
            instance_id = route.instance.instance_id
            card = side.pool.cards.get(instance_id)
            if card is None:
                last = CannotConnect(f"worker {instance_id:x} left while the request was routed")
                if span is not None:
                    span.end(last)
                routing.excluded |= {instance_id}
                continue
            attempt_ctx = EngineContext(ctx.id, attempt_id=f"{ctx.id}-{leg.label}{number}", metadata=ctx.metadata)
            attempt_ctx.gather = ctx.gather
            if span is not None:
                span.chosen(instance_id, attempt_ctx)
            ctx.link_child(attempt_ctx)
            if prepare is not None:
                payload = prepare(route, card)
            leg.enter(self._ticket(route, attempt_ctx, routing, card), span)
            begun = dispatched.enter()
            try:
                with self._accept.within():
                    source = await self._transport.call(route.instance, endpoint, payload, attempt_ctx, leg.sink())
            except TimeoutError as error:
                last = ConnectionTimeout(
                    f"worker {instance_id:x} did not accept within {self._deadlines.accept} s", cause=error
                )
            except DynamoError as error:
                if not retryable(error):
                    leg.leave(error)
                    raise
                last = error
            else:
                stream.attach(source, instance_id)
                side.pool.report_up(instance_id)
                if stream.ended and stream.error is not None and not stream.started:
                    raise stream.error
                return source
            finally:
                dispatched.leave(begun)
            routing.excluded |= {instance_id}
            if down(last):
                side.pool.report_down(instance_id)
            leg.leave(last)
            leg.moved_from = instance_id
            if leg.over is not None:
                raise leg.over
        raise exhausted(last)

    def _ticket(self, route: Route, ctx: EngineContext, routing: RoutingRequest, card: ModelCard) -> Ticket:
        # A decode worker is brought the KV cache of the prompt; it has nothing to prefill.
        prompt_tokens = 0 if routing.phase is Phase.DECODE else len(routing.request.token_ids)
        return self._board.enter(
            route,
            ctx.attempt_id,
            prompt_tokens=prompt_tokens,
            block_size=card.kv_cache_block_size,
            hashes=routing.known_hashes(card.kv_cache_block_size),
        )


def _asked_all(routing: RoutingRequest, side: Side) -> bool:
    """Whether no worker is left that has not failed or refused, however busy."""
    return all(instance_id in routing.excluded for instance_id in side.pool.instances)


def down(error: DynamoError) -> bool:
    """Whether a failure says that its worker will not do for others either, rather than for this request."""
    return isinstance(error, DOWN) and (not isinstance(error, BackendError) or isinstance(error, EngineShutdown))


def retryable(error: DynamoError) -> bool:
    """Whether another worker may do what this one refused or failed to do."""
    return isinstance(error, RETRYABLE) and not chain_has(error, InvalidArgument, Cancelled)


def exhausted(last: DynamoError | None) -> DynamoError:
    """What the client is told when no worker is left to be asked, from why the last one failed."""
    if isinstance(last, WorkerOverloaded):
        return ServiceOverloaded(cause=last)
    if isinstance(last, RETRYABLE):
        return Unavailable("no worker could be reached", cause=last)
    return last or Unavailable("no worker could be tried")
