"""From a request to a call that a worker has accepted: route, call, and try another worker if one refuses."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import msgspec
from dynamo_core.backoff import Backoff
from dynamo_core.contracts.call import Endpoint, Source
from dynamo_core.contracts.context import EngineContext
from dynamo_core.contracts.request_events import RequestAttempted, RequestRouted
from dynamo_core.contracts.router import Phase, Route, RoutingRequest
from dynamo_core.contracts.transport import Transport
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
from dynamo_core.protocol.reading import shown
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

    async def connect(
        self,
        hop: Hop,
        endpoint: Endpoint,
        payload: Any,
        routing: RoutingRequest,
        ctx: EngineContext,
        group: WorkerGroup,
        *,
        prepare: Prepare | None = None,
        last: DynamoError | None = None,
    ) -> Source:
        """Calls `endpoint` of a worker of `group`; returns once it has accepted. The hop's stream is then fed.

        The worker is sent `payload`, as `prepare` makes it once it is known. Workers that refuse are added to
        ``routing.excluded``. Those in ``hop.workers`` were asked before and count: once as many were asked as allowed,
        only they may be asked again. `last` is why the one before failed.

        Raises:
            ServiceOverloaded: every worker is busy, or at capacity.
            Unavailable: there is no worker, or none that was not asked, or none could be reached.
            Cancelled: `ctx` was stopped; no worker has been asked since.
            DynamoError: the worker's own refusal, or why the hop's stream has ended meanwhile.
        """
        router = group.router
        backoff = Backoff(self._deadlines.migration_wait, started=False)
        routing.wants_candidates = self._events.candidates
        while self._may_ask(hop, routing, group, last):
            span = route_span(
                ctx, router.NAME, hop.calls, tokens_completed=hop.completed, last=last, from_worker=hop.moved_from
            )
            begun = time.perf_counter()
            try:
                route = await self._choose(hop, routing, ctx, group, last, backoff)
            except BaseException as error:
                if span is not None:
                    span.end(error if isinstance(error, DynamoError) else Cancelled("the routing was given up"))
                if isinstance(error, ServiceOverloaded | Unavailable) and _none_left(last, routing, group):
                    break
                raise
            calling = self._call(hop, endpoint, payload, route, routing, ctx, group, span, prepare)
            if self._events.active:
                calling = self._watch(calling, _routed(hop, ctx, route, group, last, begun))
            answer = await calling
            if not isinstance(answer, DynamoError):
                return answer
            last = answer
        raise exhausted(last)

    async def _choose(
        self,
        hop: Hop,
        routing: RoutingRequest,
        ctx: EngineContext,
        group: WorkerGroup,
        last: DynamoError | None,
        backoff: Backoff,
    ) -> Route:
        """Have the router choose a worker; wait for one where the request has been let in already.

        Raises:
            DynamoError: no worker may be asked, or the request is over.
        """
        stage, _ = self._stages[group.pool.role]
        while True:
            if ctx.is_stopped():
                raise Cancelled("the request was stopped before a worker accepted it", cause=last)
            begun = stage.enter()
            try:
                route = await group.router.route(routing, group.pool)
            except ServiceOverloaded:
                # A request that was let in is not refused for load later: it waits for a worker that is not busy.
                waits = (hop.patient or last is not None) and not _none_left(last, routing, group)
                if not waits or hop.over is not None or not await backoff.pause():
                    raise
                continue
            finally:
                stage.leave(begun)
            if hop.over is not None:
                # A deadline of the whole request passed meanwhile, or what this one builds on has failed.
                raise hop.over
            return route

    async def _call(
        self,
        hop: Hop,
        endpoint: Endpoint,
        payload: Any,
        route: Route,
        routing: RoutingRequest,
        ctx: EngineContext,
        group: WorkerGroup,
        span: RouteSpan | None,
        prepare: Prepare | None,
    ) -> Source | DynamoError:
        """Asks one worker. What it returns instead of raising is a reason to ask another one."""
        instance_id = route.instance.instance_id
        number = hop.ask(instance_id)
        card = group.pool.cards.get(instance_id)
        error: DynamoError
        if card is None:
            error = CannotConnect(f"worker {instance_id:016x} left while the request was routed")
            if span is not None:
                span.end(error)
            routing.excluded |= {instance_id}
            return error
        attempt_ctx = EngineContext(ctx.id, attempt_id=hop.attempt_id(ctx, number), metadata=ctx.metadata)
        attempt_ctx.coalesce = ctx.coalesce
        if span is not None:
            span.chosen(instance_id, attempt_ctx)
        ctx.link_child(attempt_ctx)
        sent = (prepare or _for_rank)(payload, route, card)
        sink = hop.begin(self._reserve(route, attempt_ctx, routing, card), span)
        _, stage = self._stages[group.pool.role]
        begun = stage.enter()
        try:
            with self._accept.timeout():
                source = await self._transport.call(route.instance, endpoint, sent, attempt_ctx, sink)
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
            group.pool.report_up(instance_id)
            if hop.stream.error is not None and not hop.stream.started:
                raise hop.stream.error
            return source
        finally:
            stage.leave(begun)
        self._refused(hop, error, routing, group, instance_id)
        return error

    async def _watch(
        self, calling: Coroutine[Any, Any, Source | DynamoError], routed: RequestRouted
    ) -> Source | DynamoError:
        """Awaits the call of one worker, and tells what becomes of it."""
        self._events.publish(routed)
        outcome: Source | DynamoError = Cancelled("the call was given up")
        try:
            outcome = await calling
        except DynamoError as error:
            outcome = error
            raise
        finally:
            why = (outcome.kind, shown(outcome.message)) if isinstance(outcome, DynamoError) else ("", "")
            self._events.publish(
                RequestAttempted(routed.request_id, time.monotonic(), routed.attempt_id, routed.instance_id, *why)
            )
        return outcome

    def _refused(
        self, hop: Hop, error: DynamoError, routing: RoutingRequest, group: WorkerGroup, instance_id: int
    ) -> None:
        routing.excluded |= {instance_id}
        hop.refused(instance_id, error)
        if blames_worker(error):
            group.pool.report_down(instance_id)
        elif isinstance(error, WorkerOverloaded):
            group.pool.report_full(instance_id)
        if hop.over is not None:
            raise hop.over

    def _may_ask(self, hop: Hop, routing: RoutingRequest, group: WorkerGroup, last: DynamoError | None) -> bool:
        """Return whether a worker may be asked; exclude from routing the workers that must not be."""
        if len(hop.workers) >= self.tries:
            routing.excluded |= group.pool.instances.keys() - hop.workers
        elif last is None:
            # With no worker at all, the router says why.
            return True
        return not _asked_all(routing, group)

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


def _routed(
    hop: Hop, ctx: EngineContext, route: Route, group: WorkerGroup, last: DynamoError | None, begun: float
) -> RequestRouted:
    """The event of a choice that took since `begun`, just before its worker is called."""
    return RequestRouted(
        ctx.root_id,
        time.monotonic(),
        ctx.id,
        hop.attempt_id(ctx, hop.calls),
        group.pool.model,
        group.pool.role,
        group.router.NAME,
        route.instance.instance_id,
        route.dp_rank,
        route.overlap,
        "" if last is None else last.kind,
        time.perf_counter() - begun,
        route.candidates,
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
    """Whether no worker in service is left that has not failed or refused, however busy."""
    return group.pool.in_service <= routing.excluded


def _none_left(last: DynamoError | None, routing: RoutingRequest, group: WorkerGroup) -> bool:
    """Return whether the failure of the worker before is the reason that the client is told."""
    return isinstance(last, WorkerOverloaded) or (last is not None and _asked_all(routing, group))


def exhausted(last: DynamoError | None) -> DynamoError:
    """What the client is told when no worker is left to be asked, from why the last one failed."""
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
