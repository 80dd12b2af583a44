"""Between a served call and the engine: a place in the gate, cancellation, and a stream that keeps its promises."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

from dynamo_core.contracts.call import ServedContext
from dynamo_core.contracts.context import GenerateContext
from dynamo_core.contracts.engine import MULTI_CHOICE, EngineConfig, LLMEngine
from dynamo_core.errors import DynamoError, EngineShutdown, StreamIncomplete, as_backend_error
from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_core.protocol.request import EmbedOutput, EmbedRequest, PreprocessedRequest
from dynamo_core.tasks import TaskSet
from dynamo_core.worker.gate import CapacityGate, Ticket
from dynamo_core.worker.metrics import WorkerMetrics
from dynamo_core.worker.validate import ContractViolation, validated, validator_enabled

log = logging.getLogger(__name__)


class EngineAdapter:
    """The handlers of one engine's endpoints."""

    def __init__(
        self,
        engine: LLMEngine,
        engine_config: EngineConfig,
        gate: CapacityGate,
        metrics: WorkerMetrics,
        *,
        worker: str,
    ) -> None:
        self._engine = engine
        self._worker = worker
        self._many_choices = engine_config.model_input == "text" or MULTI_CHOICE in engine_config.capabilities
        self._gate = gate
        self._metrics = metrics
        self._aborts = TaskSet()
        self._closed = False
        self._validate = validator_enabled()

    async def generate(self, request: PreprocessedRequest, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
        """The handler of ``generate``: refuses, or takes a place that is given back when the call has ended."""
        ticket = self._enter(ctx)
        return self._generate(request, ctx, ticket)

    async def embed(self, request: EmbedRequest, ctx: ServedContext) -> AsyncGenerator[EmbedOutput, None]:
        """The handler of ``embed``."""
        ticket = self._enter(ctx)
        return self._embed(request, ctx, ticket)

    async def aclose(self) -> None:
        """Refuses new calls and waits for `abort` calls under way to end, cancelling them."""
        self._closed = True
        await self._aborts.aclose()

    def _enter(self, ctx: ServedContext) -> Ticket:
        if self._closed:
            raise EngineShutdown("the worker is being stopped")
        ticket = self._gate.enter()
        ctx.defer(ticket.leave)
        ctx.defer(self._metrics.request())
        return ticket

    async def _generate(
        self, request: PreprocessedRequest, ctx: ServedContext, ticket: Ticket
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        if not ticket.in_engine and not await self._place(ctx, ticket):
            yield LLMEngineOutput.cancelled()
            return
        keep = ctx.on_stop(lambda: self._abort(ctx))
        items: Any = None
        # One terminal, or one per choice for an engine that makes the choices itself.
        left = (request.sampling_options.n or 1) if self._many_choices else 1
        try:
            items = self._engine.generate(request, GenerateContext(ctx))
            if self._validate:
                items = validated(items, left)
            async for item in items:
                if item.finish_reason is not None:
                    left -= 1
                    if not left:
                        keep()
                yield item
                if not left and not self._validate:
                    # Nothing may follow, so nothing that follows is asked for.
                    return
            if left:
                raise StreamIncomplete("the engine ended the stream without a terminal item")
        except DynamoError as error:
            self._metrics.error("generate")
            if isinstance(error, ContractViolation):
                log.error("engine %s of worker %s: %s", self._engine.NAME, self._worker, error)
            raise
        except Exception as error:
            self._metrics.error("generate")
            log.exception("engine %s of worker %s failed on request %s", self._engine.NAME, self._worker, ctx.id)
            raise as_backend_error(error) from error
        finally:
            keep()
            # A generator that is left in the middle runs its `finally` only when it is closed.
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

    async def _embed(
        self, request: EmbedRequest, ctx: ServedContext, ticket: Ticket
    ) -> AsyncGenerator[EmbedOutput, None]:
        if not ticket.in_engine and not await self._place(ctx, ticket):
            return
        try:
            yield await self._engine.embed(request, GenerateContext(ctx))
        except DynamoError:
            raise
        except Exception as error:
            log.exception("engine %s of worker %s failed to embed %s", self._engine.NAME, self._worker, ctx.id)
            raise as_backend_error(error) from error

    async def _place(self, ctx: ServedContext, ticket: Ticket) -> bool:
        """Waits for a place in the engine; False if the caller gave up before."""
        forget = ctx.on_stop(ticket.wake)
        try:
            await ticket.ready()
        finally:
            forget()
        return ticket.in_engine and not ctx.is_stopped()

    def _abort(self, ctx: ServedContext) -> None:
        self._metrics.cancelled()
        if type(self._engine).abort is not LLMEngine.abort:
            self._aborts.spawn(self._engine.abort(ctx), name=f"abort-{ctx.attempt_id}")
