"""The step *prefill*: one worker computes the prompt, another one answers from its KV cache.

Runs after admission and before a decode worker is chosen. There are two kinds. A prefill worker that names a place to
meet is asked in the background, and the decode worker at once: the two engines move the cache between themselves. Of
any other the answer is awaited, and its `disaggregated_params` are handed to the decode worker.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from dynamo_core.backoff import Backoff
from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.router import Phase, Route, RoutingRequest
from dynamo_core.contracts.transports.call import GENERATE, Source
from dynamo_core.errors import (
    BackendError,
    Cancelled,
    DynamoError,
    ServiceOverloaded,
    blames_worker,
    lost_on_the_wire,
    retryable,
)
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.output import FinishReason, LLMEngineOutput
from dynamo_core.protocol.records import ModelCard
from dynamo_core.protocol.request import (
    BootstrapInfo,
    PrefillResult,
    PreprocessedRequest,
    RouterConfigOverride,
    RoutingHints,
    TraceLink,
)
from dynamo_core.tasks import TaskSet

from dynamo_runtime.dispatch.execution.connect import Connector, WorkerCall
from dynamo_runtime.dispatch.execution.execution import Deadlines, Hop, RequestExecution
from dynamo_runtime.dispatch.execution.response_stream import FlushQueue, ResponseStream
from dynamo_runtime.dispatch.pools.worker_group import WorkerGroup
from dynamo_runtime.telemetry.request_events import RequestEventHub

log = logging.getLogger(__name__)

#: Rooms are numbers below this.
ROOMS = 2**63

#: Seconds that a prefill worker may take to end by itself once the answer is complete.
SETTLE = 1.0


class PrefillStep:
    """Leads requests over two workers. Holds no state of a single request."""

    def __init__(self, connector: Connector, flush: FlushQueue, deadlines: Deadlines, events: RequestEventHub) -> None:
        self._connector = connector
        self._events = events
        self._flush = flush
        self._deadlines = deadlines
        self._tasks = TaskSet()

    async def run(
        self,
        execution: RequestExecution,
        request: PreprocessedRequest,
        prefill_group: WorkerGroup,
        decode_group: WorkerGroup,
        *,
        excluded: frozenset[int] = frozenset(),
        last: DynamoError | None = None,
    ) -> None:
        """Return once a decode worker has accepted, or the prefill worker has given the whole answer.

        `excluded` are workers of either group that are not asked. `last` is why the one failed that was asked before.

        Raises:
            DynamoError: the refusal or failure of either worker. What the step held has been given back.
        """
        prefill = _Prefill(execution, request, excluded)
        try:
            await self._compute(prefill, prefill_group, last)
            if prefill.answered:
                await prefill.stream.aclose()
                prefill.answer()
            else:
                await self._decode(prefill, decode_group, last)
        except BaseException as error:
            given_up = isinstance(error, asyncio.CancelledError | Cancelled) and not execution.stream.placed
            if given_up and prefill.left_behind():
                self._tasks.spawn(self._release(prefill, decode_group), name=f"release-{execution.ctx.id}")
            await prefill.stream.aclose()
            raise

    async def aclose(self) -> None:
        """End the cleaning up after requests that were given up."""
        await self._tasks.aclose()

    async def _compute(self, prefill: _Prefill, group: WorkerGroup, last: DynamoError | None) -> None:
        """Return once the prompt has been prefilled, or once a worker with a place to meet has accepted it."""
        execution, routing = prefill.execution, prefill.routing
        call = WorkerCall(GENERATE, prefill.request, routing, execution.ctx, group, prefill.prepare)
        while True:
            stream = ResponseStream(GENERATE.merge, self._flush, stall=execution.timeouts.stall)
            hop = prefill.start(stream)
            await self._connector.connect(hop, call, last)
            if prefill.info is not None:
                stream.on_ready(prefill.watch)
                return
            try:
                await prefill.collect()
            except DynamoError as error:
                if not retryable(error) or execution.stream.ended:
                    raise
                routing.excluded |= {prefill.instance_id}
                out_of_reach = lost_on_the_wire(error) and group.pool.in_service <= routing.excluded
                if stream.started or out_of_reach:
                    # Both hops are done again, once a worker can be reached.
                    execution.blame(prefill.instance_id)
                    raise
                # It said nothing: another one may do it.
                await stream.aclose()
                if blames_worker(error):
                    group.pool.report_down(prefill.instance_id)
                execution.publish_moved(self._events, prefill.instance_id, 0, error)
                last = error
            else:
                prefill.check()
                return

    async def _decode(self, prefill: _Prefill, group: WorkerGroup, last: DynamoError | None) -> None:
        """Have a decode worker go on; wait for one while all are busy, as the prompt has been paid for."""
        execution = prefill.execution
        hop, request = execution.answer, prefill.continued()
        backoff = Backoff(self._deadlines.decode_wait)
        while True:
            call = WorkerCall(GENERATE, request, prefill.decode_routing(request), execution.ctx, group)
            try:
                source = await self._connector.connect(hop, call, last)
                break
            except ServiceOverloaded as error:
                if hop.over is not None:
                    raise hop.over from error
                if not await backoff.pause():
                    raise
            hop.forget_asked()
        execution.join(_BothCalls(source, prefill.stream, execution.stream), prefill.instance_id)

    async def _release(self, prefill: _Prefill, group: WorkerGroup) -> None:
        """Fetch the KV cache of a request that was given up, as the prefill worker keeps it until it is fetched."""
        ctx, request = prefill.execution.ctx, prefill.continued()
        stream = ResponseStream(GENERATE.merge, self._flush)
        apart = EngineContext(ctx.id, metadata=ctx.metadata, root_id=ctx.root_id)
        call = WorkerCall(GENERATE, request, prefill.decode_routing(request), apart, group)
        try:
            async with asyncio.timeout(self._deadlines.decode_wait):
                await self._connector.connect(Hop(stream, "r"), call)
                # With the first token the cache has arrived.
                await anext(stream, None)
        except (DynamoError, TimeoutError) as error:
            log.warning("request %s: the KV cache of its prompt was left to the prefill worker: %s", ctx.id, error)
        finally:
            await stream.aclose()


class _Prefill:
    """The prompt of one request at a prefill worker: the request to it, and its answer."""

    __slots__ = (
        "_asked",
        "_excluded",
        "_items",
        "_rank",
        "execution",
        "info",
        "instance_id",
        "request",
        "routing",
        "stream",
    )

    stream: ResponseStream

    def __init__(self, execution: RequestExecution, asked: PreprocessedRequest, excluded: frozenset[int]) -> None:
        self.execution = execution
        self.routing = RoutingRequest(asked, execution.ctx.id, excluded, Phase.PREFILL, principal=execution.principal)
        self._asked = asked
        self._excluded = excluded
        limits = msgspec.structs.replace(asked.stop_conditions, max_tokens=1)
        #: What a prefill worker is asked: the same, for one token.
        self.request = msgspec.structs.replace(asked, stop_conditions=limits)
        #: Everything the worker has said.
        self._items: list[LLMEngineOutput] = []
        #: The worker that was chosen last, its rank, and where it meets the decode worker, if it does.
        self.instance_id = 0
        self._rank = 0
        self.info: BootstrapInfo | None = None

    def start(self, stream: ResponseStream) -> Hop:
        """Return the hop for the next worker, over a new stream."""
        self.stream = stream
        return self.execution.start_prefill(stream)

    async def collect(self) -> None:
        """Take all that the worker says."""
        async for item in self.stream:
            self._items.append(item)

    def prepare(self, request: PreprocessedRequest, route: Route, card: ModelCard) -> PreprocessedRequest:
        """Return what the chosen worker is sent."""
        self.instance_id, self._rank = route.instance.instance_id, route.dp_rank
        facts = card.runtime_config
        size = facts.data_parallel_size
        self.info = None
        if facts.bootstrap_host is not None and facts.bootstrap_port is not None:
            self.info = BootstrapInfo(
                bootstrap_host=facts.bootstrap_host,
                bootstrap_port=facts.bootstrap_port,
                bootstrap_room=bootstrap_room(size, route.dp_rank - facts.data_parallel_start_rank),
            )
        # A wish for a rank is one about the decode worker's; this worker gets the rank that was chosen for it.
        hints = request.routing
        if hints is not None or size > 1:
            hints = msgspec.structs.replace(hints or RoutingHints(), dp_rank=route.dp_rank if size > 1 else None)
        return msgspec.structs.replace(request, routing=hints, bootstrap_info=self.info)

    def continued(self) -> PreprocessedRequest:
        """Return what a decode worker is asked."""
        asked = self._asked
        hints = msgspec.structs.replace(
            asked.routing or RoutingHints(), prefill_worker_id=self.instance_id, prefill_dp_rank=self._rank
        )
        override = decode_override(asked)
        asked = msgspec.structs.replace(asked, routing=hints, router_config_override=override)
        if self.info is not None:
            return msgspec.structs.replace(asked, bootstrap_info=self.info)
        result = PrefillResult(disaggregated_params=_params(self._items), prompt_tokens_details=self._details())
        return msgspec.structs.replace(
            asked, prefill_result=result, migration_link=_link(self._items) or asked.migration_link
        )

    def decode_routing(self, request: PreprocessedRequest) -> RoutingRequest:
        """Return the routing for the choice of a decode worker, which is sent `request`."""
        further = self.routing.in_phase(Phase.DECODE, request)
        further.excluded = self._excluded
        return further

    def check(self) -> None:
        """Check that the worker did what it was asked.

        Raises:
            BackendError: it ended with an error, or without anything to hand over.
        """
        reason = self._reason()
        if reason is FinishReason.ERROR:
            raise BackendError.Unknown(self._message())
        if not self.answered and _params(self._items) is None:
            raise BackendError.Unknown("No disaggregated params in prefill response")

    @property
    def answered(self) -> bool:
        """Whether what the worker said is the whole answer. One that only was out of its one token has handed over.

        A worker that was met elsewhere has not: there the decode worker gives the answer.
        """
        if self.info is not None:
            return False
        reason = self._reason()
        if reason is FinishReason.STOP:
            # Engines may end so whatever happened; what is handed over tells.
            return _params(self._items) is None
        return reason in (FinishReason.EOS, FinishReason.CANCELLED, FinishReason.CONTENT_FILTER)

    def answer(self) -> None:
        """Make what the worker said the client's answer, without what was meant for a decode worker."""
        sink = self.execution.answer.begin()
        self.execution.stream.answered_by(self.instance_id)
        for item in self._items:
            sink.data(msgspec.structs.replace(item, disaggregated_params=None))
        sink.event(Annotated.from_complete_final())

    def left_behind(self) -> bool:
        """Return whether the prompt has been prefilled, so that the worker keeps its KV cache for a decode worker."""
        stream = self.stream
        self._items += stream.take()
        if not stream.ended or stream.error is not None or self._reason() is FinishReason.ERROR:
            return False
        return self.info is not None or (not self.answered and _params(self._items) is not None)

    def watch(self) -> None:
        """Watch a worker that is met by the decode worker: if it fails, so does the request."""
        self._items += self.stream.take()
        reason = self._reason()
        error = self.stream.error
        if reason is FinishReason.ERROR:
            error = BackendError.Unknown(self._message())
        elif reason is FinishReason.CANCELLED:
            error = BackendError.Unknown("the prefill worker gave the request up")
        if error is not None and not self.execution.ctx.is_stopped():
            self.execution.fail_attempt(error, self.instance_id)

    def _reason(self) -> FinishReason | None:
        return self._items[-1].finish_reason if self._items else None

    def _message(self) -> str:
        return self._items[-1].error_message or "the engine gave no reason"

    def _details(self) -> dict[str, int] | None:
        usage = self._items[-1].completion_usage
        return None if usage is None or usage.cached_tokens is None else {"cached_tokens": usage.cached_tokens}


class _BothCalls(Source):
    """The source of the call of the decode worker, which ends that of the prefill worker before it as well."""

    __slots__ = ("_answer", "_decode", "_prefill")

    def __init__(self, decode: Source, prefill: ResponseStream, answer: ResponseStream) -> None:
        self._decode = decode
        self._prefill = prefill
        self._answer = answer

    async def aclose(self) -> None:
        answer, prefill = self._answer, self._prefill
        prefill.on_ready(None)
        try:
            if not answer.ended or answer.error is not None:
                # Before the first wait, so that both are told at once.
                self._stop_prefill()
            await self._decode.aclose()
            if not prefill.ended:
                # The answer is whole; what the prefill worker still says is under way.
                with suppress(DynamoError, TimeoutError):
                    async with asyncio.timeout(SETTLE):
                        async for _ in prefill:
                            pass
        finally:
            await prefill.aclose()

    def stop(self) -> None:
        self._decode.stop()
        self._stop_prefill()

    def pause(self) -> None:
        self._decode.pause()

    def resume(self) -> None:
        self._decode.resume()

    def _stop_prefill(self) -> None:
        self._prefill.on_ready(None)
        self._prefill.fail(Cancelled("the request has ended"))


def decode_override(asked: PreprocessedRequest) -> RouterConfigOverride:
    """Return how a decode worker is chosen: the cache comes from elsewhere, so that its own saves nothing."""
    return msgspec.structs.replace(
        asked.router_config_override or RouterConfigOverride(),
        overlap_score_credit=0.0,
        assume_kv_reuse=False,
        track_prefill_tokens=False,
    )


def bootstrap_room(size: int, rank: int) -> int:
    """Return a random room below 2**63, by whose number modulo `size` both engines know the rank."""
    return secrets.randbelow(ROOMS // size) * size + rank


def _params(items: Sequence[LLMEngineOutput]) -> object:
    return next((one.disaggregated_params for one in reversed(items) if one.disaggregated_params is not None), None)


def _link(items: Sequence[LLMEngineOutput]) -> TraceLink | None:
    return next((one.worker_trace_link for one in items if one.worker_trace_link is not None), None)
