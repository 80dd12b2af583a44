"""The plan of a request: admit it, run the prefill hop if its model has one, and call a worker that answers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from dynamo_core.contracts.admission import Admission, Permit
from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.contracts.requests.request_events import RequestAdmitted, RequestRefused
from dynamo_core.contracts.router import PoolView, RoutingRequest
from dynamo_core.contracts.transports.call import Endpoint
from dynamo_core.contracts.transports.transport import Transport
from dynamo_core.errors import DynamoError, ServiceOverloaded
from dynamo_core.protocol.decoding import truncated
from dynamo_core.protocol.request import PreprocessedRequest, RoutingHints
from dynamo_core.resources import AsyncResource
from dynamo_telemetry import logs
from dynamo_telemetry.metrics import Metrics

from dynamo_runtime.dispatch.execution.connect import Connector, WorkerCall
from dynamo_runtime.dispatch.execution.execution import Deadlines, RequestExecution, RequestTimeouts
from dynamo_runtime.dispatch.execution.migrate import Migrator
from dynamo_runtime.dispatch.execution.prefill import PrefillStep
from dynamo_runtime.dispatch.execution.response_stream import FlushQueue, ResponseStream
from dynamo_runtime.dispatch.load.tracker import LoadTracker
from dynamo_runtime.dispatch.pools.worker_group import RoutePlan, RoutePlanner
from dynamo_runtime.dispatch.unread_answers import UnreadAnswers
from dynamo_runtime.telemetry.request_events import RequestEventHub
from dynamo_runtime.telemetry.stages import Stages

__all__ = ["Deadlines", "Pipeline"]


class Pipeline(AsyncResource):
    """The plan of every request in this process. Holds no state of a single request."""

    def __init__(
        self,
        *,
        transport: Transport,
        admission: Admission,
        tracker: LoadTracker,
        deadlines: Deadlines,
        metrics: Metrics,
        prefix: str = "dynamo_frontend",
        retry_after: Callable[[str], float] = lambda model: 1.0,
        forward_identity: bool = False,
        events: RequestEventHub | None = None,
        unread: UnreadAnswers | None = None,
    ) -> None:
        """Tell workers who asks if `forward_identity` is set. `unread` gathers what slow clients have not read."""
        self._forward_identity = forward_identity
        self._admission = admission
        self._retry_after = retry_after
        self._timeouts = RequestTimeouts(deadlines)
        self._flush = FlushQueue()
        self._events = events = events or RequestEventHub()
        stages = Stages(metrics, prefix)
        self._connector = Connector(
            transport=transport, tracker=tracker, deadlines=deadlines, stages=stages, events=events
        )
        self._prefill = PrefillStep(self._connector, self._flush, deadlines, events)
        self._migrator = Migrator(self._place, deadlines, metrics, prefix, events)
        self._execution = partial(
            RequestExecution, flush=self._flush, timeouts=self._timeouts, policy=self._migrator, unread=unread
        )
        #: What every worker is doing, as far as this process has it do it.
        self.tracker = tracker

    def precheck(self, model: str, principal: Principal, pools: Sequence[PoolView]) -> None:
        """Check admission quickly before any work is done for a request; raise as `Admission.precheck`."""
        try:
            self._admission.precheck(model, principal, pools)
        except DynamoError as error:
            current = logs.context.get()
            if self._events.active and current is not None:
                self._publish_refused(current.request_id, model, "precheck", error)
            raise

    async def generate(
        self,
        request: PreprocessedRequest,
        ctx: EngineContext,
        principal: Principal,
        planner: RoutePlanner,
        permit: Permit | None = None,
    ) -> ResponseStream:
        """Admit the request and return its stream once a worker has accepted it, or both of a plan with two groups.

        Should the worker fail, another one is sought for as long as the stream is open. With `permit` it has been let
        in before, as a part of what a client asked.

        Raises:
            ServiceOverloaded: admission refused it, or every worker that was tried is at capacity.
            Unavailable: there is no worker, or a role is missing.
            RateLimited, QuotaExceeded: admission refused it, for the client.
            DynamoError: the worker's own refusal, or the last reason why no worker could be reached.
        """
        if self._forward_identity:
            request = with_identity(request, principal)
        plan = planner.plan()
        patient = permit is not None
        if permit is None:
            permit = await self._admit(request, ctx.root_id, ctx.id, principal, plan)
        if self._timeouts.stall is not None:
            # What is held back at the worker cannot be told from silence.
            ctx.coalesce = 1
        log = self._migrator.token_log_for(request, planner.card)
        execution = self._execution(request, ctx, planner, plan, permit, principal=principal, log=log, patient=patient)
        return await self._open(execution)

    async def admit(self, request: PreprocessedRequest, principal: Principal, planner: RoutePlanner) -> Permit:
        """Let in a request that is made of several calls; see `generate`."""
        current = logs.context.get()
        request_id = "" if current is None else current.request_id
        return await self._admit(request, request_id, request_id, principal, planner.plan())

    async def call(
        self,
        endpoint: Endpoint,
        payload: Any,
        request: PreprocessedRequest,
        ctx: EngineContext,
        principal: Principal,
        planner: RoutePlanner,
    ) -> ResponseStream:
        """Call another endpoint like `generate`: route by `request`, and send `payload` to one worker."""
        plan = planner.plan()
        permit = await self._admit(request, ctx.root_id, ctx.id, principal, plan)
        execution = self._execution(
            request, ctx, planner, plan, permit, principal=principal, endpoint=endpoint, payload=payload
        )
        return await self._open(execution)

    async def aclose(self) -> None:
        """End what is still being moved, or cleaned up after requests that were given up."""
        await self._migrator.aclose()
        await self._prefill.aclose()

    def _admit(
        self, request: PreprocessedRequest, request_id: str, call_id: str, principal: Principal, plan: RoutePlan
    ) -> Awaitable[Permit]:
        """Return what admission says to a request."""
        admitting = self._admission.admit(request, principal, [group.pool for group in plan])
        if not self._events.active:
            return admitting
        return self._watch(admitting, request_id, call_id, plan[0].pool.model, len(request.token_ids))

    async def _watch(
        self, admitting: Awaitable[Permit], request_id: str, call_id: str, model: str, tokens: int
    ) -> Permit:
        """Await what admission says, and tell it."""
        begun = time.monotonic()
        try:
            permit = await admitting
        except DynamoError as error:
            self._publish_refused(request_id, model, "admit", error, begun)
            raise
        now = time.monotonic()
        self._events.publish(RequestAdmitted(request_id, now, call_id, model, tokens, now - begun))
        return permit

    def _publish_refused(
        self, request_id: str, model: str, stage: str, error: DynamoError, begun: float | None = None
    ) -> None:
        now = time.monotonic()
        retry_after = getattr(error, "retry_after", None)
        waited = 0.0 if begun is None else now - begun
        reason = truncated(error.message)
        plugin = error.plugin or self._admission.NAME
        self._events.publish(
            RequestRefused(request_id, now, model, stage, error.kind, reason, retry_after, waited, plugin)
        )

    async def _open(self, execution: RequestExecution) -> ResponseStream:
        """Place the request for the first time."""
        stream = execution.stream
        execution.start_routing()
        try:
            try:
                await self._place(execution, execution.plan, execution.request, frozenset(), None)
            except DynamoError as error:
                if not execution.failed_after_acceptance(error):
                    raise
            execution.placement_done()
            if stream.error is not None and not stream.begun:
                raise stream.error
        except BaseException as error:
            await stream.aclose()
            if isinstance(error, ServiceOverloaded):
                # Routers and workers do not know how fast requests end.
                error.retry_after = self._retry_after(execution.plan[0].pool.model)
            raise
        return stream

    def _place(
        self,
        execution: RequestExecution,
        plan: RoutePlan,
        request: PreprocessedRequest,
        excluded: frozenset[int],
        last: DynamoError | None,
    ) -> Awaitable[object]:
        """Await until workers of `plan` have accepted; see `migrate.PlaceRequest`."""
        if len(plan) > 1:
            return self._prefill.run(execution, request, *plan, excluded=excluded, last=last)
        ctx = execution.ctx
        sent = request if execution.payload is None else execution.payload
        routing = RoutingRequest(request, ctx.id, excluded, principal=execution.principal)
        call = WorkerCall(execution.endpoint, sent, routing, ctx, plan[0])
        return self._connector.connect(execution.answer, call, last)


def with_identity(request: PreprocessedRequest, principal: Principal) -> PreprocessedRequest:
    """Return the request as workers get it that are told who asks."""
    hints = request.routing or RoutingHints()
    told = msgspec.structs.replace(
        hints,
        tenant=principal.tenant,
        user=principal.user or None,
        session_id=principal.session or hints.session_id,
        headers=dict(principal.headers) or None,
    )
    return msgspec.structs.replace(request, routing=told)
