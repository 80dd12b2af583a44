"""Placement of a request: route, call, and try another worker if one refuses."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from dynamo_core.backoff import Backoff
from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.requests.request_events import RequestAttempted, RequestRouted
from dynamo_core.contracts.router import Phase, Route, RoutingRequest
from dynamo_core.contracts.transports.call import Endpoint, Source
from dynamo_core.contracts.transports.transport import Transport
from dynamo_core.errors import (
    LOST_WORKER,
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    DynamoError,
    ResponseTimeout,
    ServiceOverloaded,
    Unavailable,
    WorkerOverloaded,
    blames_worker,
    retryable,
)
from dynamo_core.protocol.decoding import truncated
from dynamo_core.protocol.records import AGGREGATED, DECODE, PREFILL, ModelCard
from dynamo_core.protocol.request import PreprocessedRequest, RoutingHints

from dynamo_runtime.dispatch.execution.execution import Deadlines, Hop
from dynamo_runtime.dispatch.load.tracker import LoadTracker, Reservation
from dynamo_runtime.dispatch.pools.worker_group import WorkerGroup
from dynamo_runtime.dispatch.timeouts import FixedTimeouts
from dynamo_runtime.telemetry.request_events import RequestEventHub
from dynamo_runtime.telemetry.route_span import RouteSpan, route_span
from dynamo_runtime.telemetry.stages import DISPATCH, ROUTE, Stages

ROLES = (AGGREGATED, PREFILL, DECODE)

#: Makes of a payload what a chosen worker is sent.
Prepare: TypeAlias = Callable[[Any, Route, ModelCard], Any]


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """A call that one worker of a group is to accept: what it is sent, and how it is chosen."""

    endpoint: Endpoint
    payload: Any
    routing: RoutingRequest
    ctx: EngineContext
    group: WorkerGroup
    #: Makes of the payload what the chosen worker is sent; None: only a rank is added.
    prepare: Prepare | None = None


class _WorkerRefused(Exception):
    """Raised when a worker has not accepted a call, and another one may be asked."""

    def __init__(self, error: DynamoError) -> None:
        super().__init__(error)
        self.error = error


class Connector:
    """The step *connect*: finds a worker that accepts a call. Holds no state of a single request."""

    def __init__(
        self,
        *,
        transport: Transport,
        tracker: LoadTracker,
        deadlines: Deadlines,
        stages: Stages,
        events: RequestEventHub,
    ) -> None:
        self._transport = transport
        self._events = events
        self._stages = {role: (stages.stage(ROUTE, role), stages.stage(DISPATCH, role)) for role in ROLES}
        self._tracker = tracker
        self._deadlines = deadlines
        self._accept = FixedTimeouts(deadlines.accept)
        #: How many workers are asked at most for one hop.
        self.tries = deadlines.retries + 1

    async def connect(self, hop: Hop, call: WorkerCall, last: DynamoError | None = None) -> Source:
        """Return once a worker has accepted the call; the hop's stream is then fed.

        Workers that refuse are added to ``routing.excluded``. Those in ``hop.workers`` were asked before and count:
        once as many were asked as allowed, only they may be asked again. `last` is why the one before failed.

        Raises:
            ServiceOverloaded: every worker is busy, or at capacity.
            Unavailable: there is no worker, or none that was not asked, or none could be reached.
            Cancelled: the call's context was stopped; no worker has been asked since.
            DynamoError: the worker's own refusal, or why the hop's stream has ended meanwhile.
        """
        router = call.group.router
        backoff = Backoff(self._deadlines.migration_wait, started=False)
        call.routing.wants_candidates = self._events.candidates
        while self._may_ask(hop, call, last):
            span = route_span(
                call.ctx, router.NAME, hop.calls, tokens_completed=hop.completed, last=last, from_worker=hop.moved_from
            )
            begun = time.perf_counter()
            try:
                route = await self._choose(hop, call, last, backoff)
            except BaseException as error:
                if span is not None:
                    span.end(error if isinstance(error, DynamoError) else Cancelled("the routing was given up"))
                if isinstance(error, ServiceOverloaded | Unavailable) and _none_left(last, call):
                    break
                raise
            asking = self._ask(hop, call, route, span)
            if self._events.active:
                asking = self._watch(asking, _routed(hop, call, route, last, begun))
            try:
                return await asking
            except _WorkerRefused as refused:
                last = refused.error
        raise no_worker_error(last)

    async def _choose(self, hop: Hop, call: WorkerCall, last: DynamoError | None, backoff: Backoff) -> Route:
        """Have the router choose a worker; wait for one where the request has been let in already.

        Raises:
            DynamoError: no worker may be asked, or the request is over.
        """
        stage, _ = self._stages[call.group.pool.role]
        while True:
            if call.ctx.is_stopped():
                raise Cancelled("the request was stopped before a worker accepted it", cause=last)
            begun = stage.enter()
            try:
                route = await call.group.router.route(call.routing, call.group.pool)
            except ServiceOverloaded:
                # A request that was let in is not refused for load later: it waits for a worker that is not busy.
                waits = (hop.patient or last is not None) and not _none_left(last, call)
                if not waits or hop.over is not None or not await backoff.pause():
                    raise
                continue
            finally:
                stage.leave(begun)
            if hop.over is not None:
                # A deadline of the whole request passed meanwhile, or what this one builds on has failed.
                raise hop.over
            return route

    async def _ask(self, hop: Hop, call: WorkerCall, route: Route, span: RouteSpan | None) -> Source:
        """Ask the chosen worker.

        Raises:
            _WorkerRefused: another one may be asked.
            DynamoError: the request is over.
        """
        instance_id = route.instance.instance_id
        number = hop.ask(instance_id)
        card = call.group.pool.cards.get(instance_id)
        error: DynamoError
        if card is None:
            error = CannotConnect(f"worker {instance_id:016x} left while the request was routed")
            if span is not None:
                span.end(error)
            call.routing.excluded |= {instance_id}
            raise _WorkerRefused(error)
        ctx = EngineContext(call.ctx.id, attempt_id=hop.attempt_id(call.ctx, number), metadata=call.ctx.metadata)
        ctx.coalesce = call.ctx.coalesce
        if span is not None:
            span.chosen(instance_id, ctx)
        call.ctx.link_child(ctx)
        sent = (call.prepare or _for_rank)(call.payload, route, card)
        sink = hop.begin(self._reserve(route, ctx, call.routing, card), span)
        _, stage = self._stages[call.group.pool.role]
        begun = stage.enter()
        try:
            with self._accept.timeout():
                source = await self._transport.call(route.instance, call.endpoint, sent, ctx, sink)
        except TimeoutError as late:
            error = ConnectionTimeout(
                f"worker {instance_id:016x} did not accept within {self._deadlines.accept} s", cause=late
            )
        except DynamoError as refusal:
            if not retryable(refusal):
                hop.stream.release_attempt(refusal)
                raise
            error = refusal
        else:
            hop.stream.attach(source, instance_id)
            call.group.pool.report_up(instance_id)
            if hop.stream.error is not None and not hop.stream.started:
                raise hop.stream.error
            return source
        finally:
            stage.leave(begun)
        self._note_refusal(hop, call, instance_id, error)
        raise hop.over or _WorkerRefused(error)

    async def _watch(self, asking: Coroutine[Any, Any, Source], routed: RequestRouted) -> Source:
        """Await the answer of one worker, and publish the choice and the outcome."""
        self._events.publish(routed)
        outcome: DynamoError | None = Cancelled("the call was given up")
        try:
            source = await asking
            outcome = None
            return source
        except _WorkerRefused as refused:
            outcome = refused.error
            raise
        except DynamoError as error:
            outcome = error
            raise
        finally:
            why = ("", "") if outcome is None else (outcome.kind, truncated(outcome.message))
            self._events.publish(
                RequestAttempted(routed.request_id, time.monotonic(), routed.attempt_id, routed.instance_id, *why)
            )

    def _note_refusal(self, hop: Hop, call: WorkerCall, instance_id: int, error: DynamoError) -> None:
        call.routing.excluded |= {instance_id}
        hop.refused(instance_id, error)
        if blames_worker(error):
            call.group.pool.report_down(instance_id)
        elif isinstance(error, WorkerOverloaded):
            call.group.pool.report_full(instance_id)

    def _may_ask(self, hop: Hop, call: WorkerCall, last: DynamoError | None) -> bool:
        """Return whether a worker may be asked; exclude from routing the workers that must not be."""
        if len(hop.workers) >= self.tries:
            call.routing.excluded |= call.group.pool.instances.keys() - hop.workers
        elif last is None:
            # With no worker at all, the router says why.
            return True
        return not _asked_all(call)

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


def _routed(hop: Hop, call: WorkerCall, route: Route, last: DynamoError | None, begun: float) -> RequestRouted:
    """Return the event of a choice that took since `begun`, just before its worker is called."""
    return RequestRouted(
        call.ctx.root_id,
        time.monotonic(),
        call.ctx.id,
        hop.attempt_id(call.ctx, hop.calls),
        call.group.pool.model,
        call.group.pool.role,
        call.group.router.NAME,
        route.instance.instance_id,
        route.dp_rank,
        route.overlap,
        "" if last is None else last.kind,
        time.perf_counter() - begun,
        route.candidates,
    )


def _for_rank(payload: Any, route: Route, card: ModelCard) -> Any:
    """Return the request for a worker with several ranks: with the chosen rank, unless the caller named one."""
    if card.runtime_config.data_parallel_size == 1 or not isinstance(payload, PreprocessedRequest):
        return payload
    hints = payload.routing or RoutingHints()
    if hints.dp_rank is not None:
        return payload
    return msgspec.structs.replace(payload, routing=msgspec.structs.replace(hints, dp_rank=route.dp_rank))


def _asked_all(call: WorkerCall) -> bool:
    """Return whether no worker in service is left that has not failed or refused, however busy."""
    return call.group.pool.in_service <= call.routing.excluded


def _none_left(last: DynamoError | None, call: WorkerCall) -> bool:
    """Return whether the failure of the worker before is the reason that the client is told."""
    return isinstance(last, WorkerOverloaded) or (last is not None and _asked_all(call))


def no_worker_error(last: DynamoError | None) -> DynamoError:
    """Return what the client is told when no worker is left to be asked, from why the last one failed."""
    if isinstance(last, WorkerOverloaded):
        return ServiceOverloaded(cause=last)
    if isinstance(last, LOST_WORKER):
        return Unavailable(_why_unavailable(last), cause=last)
    return last or Unavailable("no worker could be tried")


def _why_unavailable(last: DynamoError) -> str:
    if isinstance(last, CannotConnect | ConnectionTimeout):
        return "no worker could be reached"
    if isinstance(last, ResponseTimeout):
        return "no worker answered in time"
    return "the workers that took the request were lost"
