"""The span of one attempt, from the choice of a worker to the end of its stream. Made only if it is recorded."""

from __future__ import annotations

from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.errors import LOST_WORKER, Cancelled, DynamoError, chain_has
from dynamo_core.spans import Span, Value, describe, recorded, start_span
from dynamo_core.tracing import TraceContext


class RouteSpan:
    """The span ``router.route_request`` of one attempt."""

    __slots__ = ("_ctx", "_span")

    def __init__(self, span: Span, ctx: EngineContext) -> None:
        self._span = span
        self._ctx = ctx

    def chosen(self, instance_id: int, ctx: EngineContext) -> None:
        """Record the router's choice; `ctx` is the attempt's, which puts the worker's spans below this one."""
        # Ids are 64 bits, more than collectors take for a number.
        self._span.set_attribute("worker_id", f"{instance_id:016x}")
        ctx.metadata.update(self._span.context.to_headers())

    def end(self, error: DynamoError | None) -> None:
        """End the span of the attempt; `error` says why it failed, if it did."""
        span = self._span
        if self._ctx.is_stopped() or (error is not None and chain_has(error, Cancelled)):
            # Cancelling is not an error.
            span.set_attribute("request.outcome", "cancelled")
        elif error is None:
            span.set_attribute("request.outcome", "success")
        else:
            if isinstance(error, LOST_WORKER):
                span.set_attribute("request.outcome", "worker_disconnected")
            span.set_error(describe(error))
        span.end()


def route_span(
    ctx: EngineContext,
    router_mode: str,
    attempt: int,
    *,
    tokens_completed: int,
    last: DynamoError | None,
    from_worker: int | None,
) -> RouteSpan | None:
    """Open the span below the one that `ctx.metadata` names; None if no spans are recorded.

    `last` is why the attempt before this one failed, `from_worker` the worker that had it.
    """
    if not recorded():
        return None
    attributes: dict[str, Value] = {
        "router_mode": router_mode,
        "request_id": ctx.id,
        "request.attempt": str(attempt),
        "migration.is_retry": attempt > 0,
        "migration.tokens_completed": tokens_completed,
    }
    if last is not None:
        attributes["migration.reason"] = last.kind
    if from_worker is not None:
        attributes["migration.from_worker_id"] = f"{from_worker:016x}"
    parent = TraceContext.from_headers(ctx.metadata)
    return RouteSpan(start_span("router.route_request", kind="client", attributes=attributes, parent=parent), ctx)
