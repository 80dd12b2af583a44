"""From a request to a call that a worker has accepted: route, call, and try another worker if one refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from dynamo_core.contracts.call import Endpoint, Source
from dynamo_core.contracts.context import EngineContext
from dynamo_core.contracts.router import Phase, Route, RoutingRequest
from dynamo_core.contracts.transport import Transport
from dynamo_core.dispatch.execution.execution import Deadlines, Leg
from dynamo_core.dispatch.execution.route_span import route_span
from dynamo_core.dispatch.execution.timeouts import FixedTimeouts
from dynamo_core.dispatch.load.tracker import LoadTracker, Reservation
from dynamo_core.dispatch.pools.worker_group import WorkerGroup
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
from dynamo_core.protocol.request import PreprocessedRequest, RoutingHints
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

#: Failures of the wire to a worker. They say nothing of the worker itself: once it is reached again it may go on.
WIRE = (CannotConnect, ConnectionTimeout, Disconnected, StreamIncomplete)

#: Failures after which a worker is left alone for a while.
DOWN = (CannotConnect, ConnectionTimeout, Disconnected, EngineShutdown, ResponseTimeout)

ROLES = (AGGREGATED, PREFILL, DECODE)

#: Seconds between two looks for a worker that is not busy; doubled each time, up to the second.
FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0

#: Makes what a chosen worker is sent.
Prepare = Callable[[Route, ModelCard], Any]


class Patience:
    """Waits for workers that are busy, longer each time, up to so many seconds in all."""

    __slots__ = ("_pause", "_until")

    def __init__(self, seconds: float) -> None:
        self._until = asyncio.get_running_loop().time() + seconds
        self._pause = FIRST_PAUSE

    async def pause(self) -> bool:
        """Waits a while; False at once if that would be too long."""
        if asyncio.get_running_loop().time() + self._pause > self._until:
            return False
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, LAST_PAUSE)
        return True


class Connector:
    """Places calls. Holds no state of a single request."""

    def __init__(self, *, transport: Transport, tracker: LoadTracker, deadlines: Deadlines, stages: Stages) -> None:
        self._transport = transport
        self._stages = {role: (stages.stage(ROUTE, role), stages.stage(DISPATCH, role)) for role in ROLES}
        self._tracker = tracker
        self._deadlines = deadlines
        self._accept = FixedTimeouts(deadlines.accept)
        #: How many workers are asked at most for one leg.
        self.tries = deadlines.retries + 1

    async def connect(
        self,
        leg: Leg,
        endpoint: Endpoint,
        payload: Any,
        routing: RoutingRequest,
        ctx: EngineContext,
        group: WorkerGroup,
        *,
        prepare: Prepare | None = None,
        last: DynamoError | None = None,
    ) -> Source:
        """Calls `endpoint` of a worker of `group`; returns once it has accepted. The leg's stream is then fed.

        The worker is sent `payload`, or what `prepare` makes once it is known. Workers that refuse are added to
        ``routing.excluded``. Those in ``leg.workers`` were asked before and count: once as many were asked as allowed,
        only they may be asked again. `last` is why the one before failed.

        Raises:
            ServiceOverloaded: every worker is busy, or at capacity.
            Unavailable: there is no worker, or none that was not asked, or none could be reached.
            Cancelled: `ctx` was stopped; no worker has been asked since.
            DynamoError: the worker's own refusal, or why the leg's stream has ended meanwhile.
        """
        stream = leg.stream
        routed, dispatched = self._stages[group.pool.role]
        patience: Patience | None = None
        while self._may_ask(leg, routing, group):
            if ctx.is_stopped():
                raise Cancelled("the request was stopped before a worker accepted it", cause=last)
            number = leg.asked
            span = route_span(
                ctx,
                group.router.NAME,
                number,
                tokens_completed=leg.completed,
                last=last,
                from_worker=leg.moved_from,
            )
            begun = routed.enter()
            try:
                route = await group.router.route(routing, group.pool)
            except BaseException as error:
                if span is not None:
                    span.end(error if isinstance(error, DynamoError) else Cancelled("the routing was given up"))
                if not isinstance(error, ServiceOverloaded | Unavailable):
                    raise
                if last is not None and (isinstance(last, WorkerOverloaded) or _asked_all(routing, group)):
                    break
                # One that was let in is not refused for load later: it waits for a worker that is not busy.
                if isinstance(error, Unavailable) or not (leg.patient or last is not None):
                    raise
                patience = patience or Patience(self._deadlines.migration_wait)
                if leg.over is not None or not await patience.pause():
                    raise
                continue
            finally:
                routed.leave(begun)
            if leg.over is not None:
                # A deadline of the whole request passed meanwhile, or what this one builds on has failed.
                if span is not None:
                    span.end(leg.over)
                raise leg.over
            instance_id = route.instance.instance_id
            leg.workers.add(instance_id)
            leg.asked += 1
            card = group.pool.cards.get(instance_id)
            if card is None:
                last = CannotConnect(f"worker {instance_id:016x} left while the request was routed")
                if span is not None:
                    span.end(last)
                routing.excluded |= {instance_id}
                continue
            attempt_ctx = EngineContext(ctx.id, attempt_id=f"{ctx.id}-{leg.label}{number}", metadata=ctx.metadata)
            attempt_ctx.gather = ctx.gather
            if span is not None:
                span.chosen(instance_id, attempt_ctx)
            ctx.link_child(attempt_ctx)
            sent = prepare(route, card) if prepare is not None else _for_rank(payload, route, card)
            leg.enter(self._reserve(route, attempt_ctx, routing, card), span)
            begun = dispatched.enter()
            try:
                with self._accept.timeout():
                    source = await self._transport.call(route.instance, endpoint, sent, attempt_ctx, leg.sink())
            except TimeoutError as error:
                last = ConnectionTimeout(
                    f"worker {instance_id:016x} did not accept within {self._deadlines.accept} s", cause=error
                )
            except DynamoError as error:
                if not retryable(error):
                    leg.leave(error)
                    raise
                last = error
            else:
                stream.attach(source, instance_id)
                group.pool.report_up(instance_id)
                if stream.ended and stream.error is not None and not stream.started:
                    raise stream.error
                return source
            finally:
                dispatched.leave(begun)
            routing.excluded |= {instance_id}
            leg.leave(last)
            if down(last):
                group.pool.report_down(instance_id)
            elif isinstance(last, WorkerOverloaded):
                # Not counted: as long as another one may have room it is asked, and who is full is not asked again.
                leg.workers.discard(instance_id)
                group.pool.report_full(instance_id)
            leg.moved_from = instance_id
            if leg.over is not None:
                raise leg.over
        raise exhausted(last)

    def _may_ask(self, leg: Leg, routing: RoutingRequest, group: WorkerGroup) -> bool:
        """Whether a worker may be asked at all; one that must not be is excluded from routing."""
        if len(leg.workers) < self.tries:
            return True
        known = group.pool.instances.keys()
        routing.excluded |= known - leg.workers
        return not known <= routing.excluded

    def _reserve(self, route: Route, ctx: EngineContext, routing: RoutingRequest, card: ModelCard) -> Reservation:
        # A decode worker is brought the KV cache of the prompt; it has nothing to prefill.
        prefills = route.prefill and routing.phase is not Phase.DECODE
        blocks = route.blocks
        return self._tracker.reserve(
            route,
            ctx.attempt_id,
            prompt_tokens=len(routing.request.token_ids) if prefills else 0,
            block_size=card.kv_cache_block_size,
            hashes=blocks if blocks is not None else routing.known_hashes(card.kv_cache_block_size),
            held_tokens=len(routing.request.token_ids),
        )


def _for_rank(payload: Any, route: Route, card: ModelCard) -> Any:
    """What a worker with several ranks is sent: it is told which one was chosen, unless the caller has named one."""
    if card.runtime_config.data_parallel_size == 1 or not isinstance(payload, PreprocessedRequest):
        return payload
    hints = payload.routing or RoutingHints()
    if hints.dp_rank is not None:
        return payload
    return msgspec.structs.replace(payload, routing=msgspec.structs.replace(hints, dp_rank=route.dp_rank))


def _asked_all(routing: RoutingRequest, group: WorkerGroup) -> bool:
    """Whether no worker is left that has not failed or refused, however busy."""
    return all(instance_id in routing.excluded for instance_id in group.pool.instances)


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
        return Unavailable(_why_unavailable(last), cause=last)
    return last or Unavailable("no worker could be tried")


def lost_on_the_wire(error: DynamoError) -> bool:
    """Whether a failure is one of the wire to a worker, so that the same worker may do once it is reached again."""
    return isinstance(error, WIRE) and not isinstance(error, BackendError)


def _why_unavailable(last: DynamoError) -> str:
    if isinstance(last, CannotConnect | ConnectionTimeout):
        return "no worker could be reached"
    if isinstance(last, ResponseTimeout):
        return "no worker answered in time"
    return "the workers that took the request were lost"
