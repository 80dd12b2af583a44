"""The adapter between a served call and the engine: capacity gate, cancellation, spans, validation."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import msgspec
from dynamo_core.contracts.engine import MULTI_CHOICE, DisaggregationMode, EngineConfig, LLMEngine, WorkerConfig
from dynamo_core.contracts.engine_boundary import (
    ContractViolation,
    call_async,
    check_stream,
    content_fault,
    defined_at,
    engine_name,
    expect_type,
    item_fault,
    location,
    qualname,
    suspended_at,
)
from dynamo_core.contracts.requests.context import GenerateContext
from dynamo_core.contracts.transports.call import ServedContext
from dynamo_core.errors import (
    BackendError,
    Cancelled,
    DynamoError,
    EngineShutdown,
    InvalidArgument,
    NotSupported,
    WorkerOverloaded,
    as_backend_error,
)
from dynamo_core.protocol.output import FinishReason, LLMEngineOutput
from dynamo_core.protocol.request import EmbedOutput, EmbedRequest, PreprocessedRequest, ScoreOutput, ScoreRequest
from dynamo_core.resources import AsyncResource
from dynamo_core.spans import Span, start_span
from dynamo_core.tasks import TaskSet
from dynamo_core.tracing import TraceContext
from dynamo_telemetry import logs

from dynamo_runtime.worker.caller_progress_reports import ProgressReporter
from dynamo_runtime.worker.capacity_gate import CapacityGate, Ticket
from dynamo_runtime.worker.generate_span import NO_REASON, GenerateSpan, not_empty
from dynamo_runtime.worker.metrics import WorkerMetrics
from dynamo_runtime.worker.stream_validator import StreamRules, validated, validator_enabled

log = logging.getLogger(__name__)

#: Seconds for which a kind of error that the engine raises is not warned of again.
QUIET = 60.0
#: What says nothing of the engine: the request was wrong or is over, or there is no room.
_NO_NEWS = (InvalidArgument, Cancelled, NotSupported, WorkerOverloaded)
#: Where no item has come.
_NONE = object()

OutputT = TypeVar("OutputT", EmbedOutput, ScoreOutput)


class EngineAdapter(AsyncResource):
    """The handlers of one engine's endpoints."""

    def __init__(
        self,
        engine: LLMEngine,
        engine_config: EngineConfig,
        gate: CapacityGate,
        metrics: WorkerMetrics,
        *,
        config: WorkerConfig,
        worker_id: int,
        progress: ProgressReporter | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """`vocabulary` is the number of the model's token ids, for the validator; None: not known."""
        self._engine = engine
        self._name = engine_name(engine)
        self._vocabulary = vocabulary
        self._text = engine_config.model_input == "text"
        self._progress = progress
        self._worker = config.worker
        self._mode = config.disaggregation_mode
        self._endpoint = config.endpoint
        #: Attributes of spans. Ids are 64 bits, more than collectors take for a number.
        self._identity = {
            "component": config.component,
            "namespace": config.namespace,
            "instance_id": f"{worker_id:016x}",
        }
        self._many_choices = engine_config.model_input == "text" or MULTI_CHOICE in engine_config.capabilities
        self._gate = gate
        self._metrics = metrics
        self._aborts = TaskSet()
        self._closed = False
        #: Until when a kind of error from a line of the engine is not warned of again.
        self._quiet_until: dict[tuple[str, str], float] = {}
        self._validate = validator_enabled()

    async def generate(self, request: PreprocessedRequest, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
        """Return the handler of ``generate``: refuses, or takes a place that is given back when the call has ended."""
        ticket = self._enter(ctx)
        return self._generate(request, ctx, ticket)

    async def embed(self, request: EmbedRequest, ctx: ServedContext) -> AsyncGenerator[EmbedOutput, None]:
        """Return the handler of ``embed``."""
        ticket = self._enter(ctx)
        return self._whole("embed", request, EmbedOutput, "an EmbedOutput", ctx, ticket)

    async def score(self, request: ScoreRequest, ctx: ServedContext) -> AsyncGenerator[ScoreOutput, None]:
        """Return the handler of ``score``."""
        ticket = self._enter(ctx)
        return self._whole("score", request, ScoreOutput, "a ScoreOutput", ctx, ticket)

    async def aclose(self) -> None:
        """Refuse new calls and wait for `abort` calls under way to end, cancelling them."""
        self._closed = True
        await self._aborts.aclose()

    def _enter(self, ctx: ServedContext) -> Ticket:
        if self._closed:
            raise EngineShutdown("the worker is being stopped")
        try:
            ticket = self._gate.enter()
        except WorkerOverloaded:
            if self._is_news(WorkerOverloaded.kind, ""):
                log.warning(
                    "worker %s is at capacity and refuses requests: its engine has %d, and %d wait "
                    "(engine_request_limit and request_queue_limit are the bounds)",
                    self._worker,
                    self._gate.active,
                    self._gate.queued,
                )
            raise
        ctx.defer(ticket.leave)
        ctx.defer(self._metrics.request())
        if self._progress is not None:
            self._progress.follow(ctx)
        return ticket

    async def _generate(
        self, request: PreprocessedRequest, ctx: ServedContext, ticket: Ticket
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        with self._scope(ctx), self._payload_span(ctx, self._endpoint) as payload:
            if not ticket.in_engine and not await self._place(ctx, ticket):
                yield LLMEngineOutput.cancelled()
                return
            with start_span("engine.generate") as span:
                log.debug("a request goes to engine %s of worker %s", self._name, self._worker)
                # Without a span that is recorded the clock is not read, and nothing is counted per item.
                watch = GenerateSpan(span, request, self._mode.value, ctx) if span.recording else None
                abort = _Abort(self, ctx, held=self._mode is DisaggregationMode.DECODE)
                items: Any = None
                stream: Any = None
                item: Any = _NONE
                # Until the first part of the answer: what happens with it happens once, and later items pay nothing.
                first = True
                # One terminal, or one per choice for an engine that makes the choices itself.
                left = (request.sampling_options.n or 1) if self._many_choices else 1
                try:
                    stream = self._engine.generate(request, GenerateContext(ctx, abort.first_token))
                    items = self._watched(stream, request, ctx, left)
                    async for item in items:
                        if item.finish_reason is not None:
                            self._check_end(item, stream, payload, ctx)
                            left -= 1
                            if not left:
                                abort.forget()
                        if first and (not_empty(item) or (not left and self._mode is DisaggregationMode.PREFILL)):
                            first = False
                            item = _linked(item, span)
                            abort.first_token()
                        if watch is not None:
                            watch.item(item)
                        yield item
                        if not left and not self._validate:
                            # Nothing may follow, so nothing that follows is asked for.
                            return
                    if left:
                        raise BackendError.StreamIncomplete(
                            "the engine ended the stream without a terminal item" + defined_at(self._engine, "generate")
                        )
                except Exception as error:
                    failure = self._failure(self._misuse(error, stream, item), ctx)
                    if watch is not None:
                        watch.failed(failure, setup=items is None)
                    if failure is error:
                        raise
                    raise failure from error
                finally:
                    abort.forget()
                    if watch is not None:
                        watch.ended()
                    # A generator that is left in the middle runs its `finally` only when it is closed.
                    close = getattr(items, "aclose", None)
                    if close is not None:
                        await close()

    def _check_end(self, item: LLMEngineOutput, stream: Any, payload: Span, ctx: ServedContext) -> None:
        """Check how an answer has ended; tell of an end that is an error.

        Raises:
            ContractViolation: the reason is none that there is.
        """
        if not isinstance(item.finish_reason, FinishReason):
            raise ContractViolation(
                f"{qualname(self._engine, 'generate')}: {content_fault(item, None)}{suspended_at(stream)}"
            )
        if item.finish_reason is FinishReason.ERROR:
            payload.set_error(item.error_message or NO_REASON)
            self._warn("error", item.error_message or "without a message", ctx)

    def _watched(self, stream: Any, request: PreprocessedRequest, ctx: ServedContext, terminals: int) -> Any:
        """Return the items of a stream, checked and followed where that is wanted."""
        check_stream(self._engine, stream)
        items = stream
        if self._validate:
            rules = StreamRules(request, terminals, vocabulary=self._vocabulary, text=self._text)
            items = validated(self._engine, stream, rules)
        return items if self._progress is None else self._progress.watch(ctx, items)

    async def _whole(
        self,
        method: str,
        request: EmbedRequest | ScoreRequest,
        kind: type[OutputT],
        expected: str,
        ctx: ServedContext,
        ticket: Ticket,
    ) -> AsyncGenerator[OutputT, None]:
        """Yield the answer of a method of the engine that gives a single output."""
        with self._scope(ctx), self._payload_span(ctx, method):
            if not ticket.in_engine and not await self._place(ctx, ticket):
                return
            try:
                output = await call_async(self._engine, method, request, GenerateContext(ctx))
                expect_type(self._engine, method, output, kind, expected)
                yield output
            except ContractViolation as error:
                log.error("engine %s of worker %s: %s", self._name, self._worker, error)
                raise
            except DynamoError:
                raise
            except Exception as error:
                log.exception("engine %s of worker %s failed to %s %s", self._name, self._worker, method, ctx.id)
                raise as_backend_error(error) from error

    def _misuse(self, error: Exception, stream: Any, item: Any) -> Exception:
        """Return what went wrong, by its right name if the last item was of a wrong type.

        Looked at when something has failed: in service the type of an item that passes is not looked at.
        """
        wrong = item is not _NONE and not isinstance(item, LLMEngineOutput)
        if wrong and isinstance(error, AttributeError | TypeError):
            return ContractViolation(item_fault(self._engine, stream, item))
        return error

    def _failure(self, error: Exception, ctx: ServedContext) -> DynamoError:
        """Count what the engine raised, tell of it, and make it one of our errors."""
        self._metrics.error("generate")
        if isinstance(error, ContractViolation):
            log.error("engine %s of worker %s: %s", self._name, self._worker, error)
        elif not isinstance(error, DynamoError):
            log.exception("engine %s of worker %s failed on request %s", self._name, self._worker, ctx.id)
        elif not isinstance(error, _NO_NEWS):
            self._warn(error.kind, error, ctx, _raised_at(error))
        return as_backend_error(error)

    def _warn(self, kind: str, text: object, ctx: ServedContext, place: str = "") -> None:
        """Tell of a failure that the engine told on purpose: of each kind and line once in a while."""
        if not self._is_news(kind, place):
            return
        log.warning(
            "engine %s of worker %s failed on request %s: %s: %s%s", self._name, self._worker, ctx.id, kind, text, place
        )

    def _is_news(self, kind: str, place: str) -> bool:
        """Return whether a kind of failure was not told of lately; it has been, from now on."""
        now = time.monotonic()
        if self._quiet_until.get((kind, place), 0.0) > now:
            return False
        self._quiet_until[kind, place] = now + QUIET
        return True

    @staticmethod
    def _scope(ctx: ServedContext) -> logs.RequestScope:
        return logs.RequestScope(ctx.id, ctx.metadata.get("x-request-id"))

    def _payload_span(self, ctx: ServedContext, endpoint: str) -> Span:
        """Return the worker's own span of a call, below the caller's that `ctx.metadata` names."""
        span = start_span("handle_payload", kind="server", parent=TraceContext.from_headers(ctx.metadata))
        if span.recording:
            span.set_attributes({**self._identity, "endpoint": endpoint, "request_id": ctx.id})
        return span

    async def _place(self, ctx: ServedContext, ticket: Ticket) -> bool:
        """Wait for a place in the engine; False if the caller gave up before."""
        forget = ctx.on_stop(ticket.wake)
        try:
            await ticket.ready()
        finally:
            forget()
        return ticket.in_engine and not ctx.is_stopped()

    def _cancelled(self) -> None:
        self._metrics.cancelled()

    def _abort(self, ctx: ServedContext) -> None:
        if type(self._engine).abort is not LLMEngine.abort:
            self._aborts.spawn(self._call_abort(ctx), name=f"abort-{ctx.attempt_id}")

    async def _call_abort(self, ctx: ServedContext) -> None:
        try:
            await self._engine.abort(ctx)
        except Exception:
            log.exception("engine %s of worker %s failed to abort request %s", self._name, self._worker, ctx.id)


class _Abort:
    """The abort of a request at the engine: at once, or, `held`, not before the first token.

    A decode worker's engine may still be receiving the KV cache from the prefill worker; to abort it then would leave
    the transfer without an end. If the stream ends first, the engine is never told.
    """

    __slots__ = ("_adapter", "_ctx", "_forget", "_held", "_wanted")

    def __init__(self, adapter: EngineAdapter, ctx: ServedContext, *, held: bool) -> None:
        self._adapter = adapter
        self._ctx = ctx
        self._held = held
        self._wanted = False
        self._forget = ctx.on_stop(self._stopped)

    def first_token(self) -> None:
        """Record the first token. Repeating it does nothing."""
        self._held = False
        if self._wanted:
            self._wanted = False
            self._adapter._abort(self._ctx)

    def forget(self) -> None:
        """Forget a stream that has ended: nothing is left to abort."""
        self._wanted = False
        # Let go of, too: it knows this object.
        forget, self._forget = self._forget, _nothing
        forget()

    def _stopped(self) -> None:
        self._adapter._cancelled()
        if self._held:
            self._wanted = True
        else:
            self._adapter._abort(self._ctx)


def _raised_at(error: Exception) -> str:
    """Return the line that raised an error, in brackets; empty if it is the framework's own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_globals.get("__name__") == __name__:
        return ""
    return location(trace.tb_frame.f_code.co_filename, trace.tb_lineno)


def _linked(item: LLMEngineOutput, span: Span) -> LLMEngineOutput:
    """Return the item with the place of the span in it; a copy, for engines may yield the same object to many."""
    return msgspec.structs.replace(item, worker_trace_link=span.link)


def _nothing() -> None:
    return None
