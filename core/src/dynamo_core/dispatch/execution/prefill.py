"""The prefill hop: one worker computes the prompt, another one answers from the KV cache that this leaves.

Runs after admission and before a decode worker is chosen. There are two ways. A prefill worker that names a place to
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

from dynamo_core.contracts.call import Source
from dynamo_core.contracts.context import EngineContext
from dynamo_core.contracts.endpoints import GENERATE
from dynamo_core.contracts.router import Phase, Route, RoutingRequest
from dynamo_core.dispatch.execution.connect import Connector, down, lost_on_the_wire, retryable
from dynamo_core.dispatch.execution.execution import Attempts, Deadlines, Leg
from dynamo_core.dispatch.execution.response_stream import FlushQueue
from dynamo_core.dispatch.pools.worker_group import WorkerGroup
from dynamo_core.errors import BackendError, Cancelled, DynamoError, ServiceOverloaded
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

log = logging.getLogger(__name__)

#: Rooms are numbers below this.
ROOMS = 2**63

#: Seconds that a prefill worker may take to end by itself once the answer is complete.
SETTLE = 1.0

#: Seconds before a prefilled request asks the decode workers again when all of them were busy; doubled each time, up to
#: the second.
FIRST_WAIT = 0.05
LAST_WAIT = 1.0


class PrefillHop:
    """Leads requests over two workers. Holds no state of a single request."""

    def __init__(self, connector: Connector, flush: FlushQueue, deadlines: Deadlines) -> None:
        self._connector = connector
        self._flush = flush
        self._deadlines = deadlines
        self._tasks = TaskSet()

    async def open(
        self,
        attempts: Attempts,
        request: PreprocessedRequest,
        ctx: EngineContext,
        prefill: WorkerGroup,
        decode: WorkerGroup,
        *,
        excluded: frozenset[int] = frozenset(),
        last: DynamoError | None = None,
    ) -> None:
        """Returns once a decode worker has accepted, or the prefill worker has given the whole answer.

        `excluded` are workers of either group that are not asked. `last` is why the one failed that was asked before.

        Raises:
            DynamoError: the refusal or failure of either worker. What the hop held has been given back.
        """
        hop = _Prefill(request, excluded)
        routing = RoutingRequest(request, ctx.id, excluded, Phase.PREFILL)
        try:
            await self._prefill(hop, attempts, routing, ctx, prefill, last)
            if hop.answered:
                await hop.leg.stream.aclose()
                hop.answer(attempts)
            else:
                await self._decode(hop, attempts, routing, ctx, decode, last)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError | Cancelled) and not attempts.placed and hop.left_behind():
                self._tasks.spawn(self._release(hop, routing, ctx, decode), name=f"release-{ctx.id}")
            await hop.leg.stream.aclose()
            raise

    async def aclose(self) -> None:
        """Ends the cleaning up after requests that were given up."""
        await self._tasks.aclose()

    async def _prefill(
        self,
        hop: _Prefill,
        attempts: Attempts,
        routing: RoutingRequest,
        ctx: EngineContext,
        group: WorkerGroup,
        last: DynamoError | None,
    ) -> None:
        """Returns once the prompt has been prefilled, or once a worker with a place to meet has accepted it."""
        while True:
            hop.leg = leg = Leg(GENERATE.merge, self._flush, label="p", stall=attempts.stall)
            leg.workers = attempts.prefill_workers
            leg.asked, leg.moved_from, leg.completed = attempts.prefills, attempts.moved_from, attempts.completed
            attempts.after(leg)
            try:
                await self._connector.connect(
                    leg, GENERATE, hop.request, routing, ctx, group, prepare=hop.prepare, last=last
                )
            finally:
                attempts.prefills = leg.asked
            if hop.info is not None:
                leg.stream.on_ready(lambda: hop.watch(attempts, ctx))
                return
            try:
                async for item in leg.stream:
                    hop.items.append(item)
            except DynamoError as error:
                if not retryable(error) or attempts.stream.ended:
                    raise
                routing.excluded |= {hop.instance_id}
                out_of_reach = lost_on_the_wire(error) and group.pool.instances.keys() <= routing.excluded
                if leg.stream.started or out_of_reach:
                    # Both hops are done again, once a worker can be reached.
                    attempts.culprit = hop.instance_id
                    raise
                # It said nothing: another one may do it.
                await leg.stream.aclose()
                if down(error):
                    group.pool.report_down(hop.instance_id)
                last = error
            else:
                hop.check()
                return

    async def _decode(
        self,
        hop: _Prefill,
        attempts: Attempts,
        routing: RoutingRequest,
        ctx: EngineContext,
        group: WorkerGroup,
        last: DynamoError | None,
    ) -> None:
        """Has a decode worker go on; waits for one while all are busy, as the prompt has been paid for."""
        stream = attempts.stream
        request = hop.continued()
        loop = asyncio.get_running_loop()
        until = loop.time() + self._deadlines.decode_wait
        pause = FIRST_WAIT
        while True:
            try:
                source = await self._connector.connect(
                    attempts, GENERATE, request, hop.decode_routing(routing, request), ctx, group, last=last
                )
                break
            except ServiceOverloaded as error:
                if attempts.over is not None or loop.time() + pause > until:
                    raise attempts.over or error from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_WAIT)
            attempts.workers.clear()
        stream.prefill_instance_id = hop.instance_id
        # From now on the grip on the answer is one on both workers.
        attempts.after(None)
        stream.regrip(_Both(source, hop.leg, attempts))

    async def _release(self, hop: _Prefill, routing: RoutingRequest, ctx: EngineContext, group: WorkerGroup) -> None:
        """Fetches the KV cache of a request that was given up, as the prefill worker keeps it until somebody has."""
        request = hop.continued()
        leg = Leg(GENERATE.merge, self._flush, label="r")
        apart = EngineContext(ctx.id, metadata=ctx.metadata)
        try:
            async with asyncio.timeout(self._deadlines.decode_wait):
                await self._connector.connect(
                    leg, GENERATE, request, hop.decode_routing(routing, request), apart, group
                )
                # With the first token the cache has arrived.
                await anext(leg.stream, None)
        except (DynamoError, TimeoutError) as error:
            log.warning("request %s: the KV cache of its prompt was left to the prefill worker: %s", ctx.id, error)
        finally:
            await leg.stream.aclose()


class _Prefill:
    """The first hop of one request."""

    __slots__ = ("_asked", "_excluded", "info", "instance_id", "items", "leg", "rank", "request")

    leg: Leg

    def __init__(self, asked: PreprocessedRequest, excluded: frozenset[int]) -> None:
        self._asked = asked
        self._excluded = excluded
        limits = msgspec.structs.replace(asked.stop_conditions, max_tokens=1)
        #: What a prefill worker is asked: the same, for one token.
        self.request = msgspec.structs.replace(asked, stop_conditions=limits)
        #: Everything the worker has said.
        self.items: list[LLMEngineOutput] = []
        #: The worker that was chosen last, its rank, and where it meets the decode worker, if it does.
        self.instance_id = 0
        self.rank = 0
        self.info: BootstrapInfo | None = None

    def prepare(self, route: Route, card: ModelCard) -> PreprocessedRequest:
        """What the chosen worker is sent."""
        self.instance_id, self.rank = route.instance.instance_id, route.dp_rank
        facts = card.runtime_config
        size = facts.data_parallel_size
        self.info = None
        if facts.bootstrap_host is not None and facts.bootstrap_port is not None:
            self.info = BootstrapInfo(
                bootstrap_host=facts.bootstrap_host,
                bootstrap_port=facts.bootstrap_port,
                bootstrap_room=room(size, route.dp_rank - facts.data_parallel_start_rank),
            )
        # A wish for a rank is one about the decode worker's; this worker gets the rank that was chosen for it.
        hints = self.request.routing
        if hints is not None or size > 1:
            hints = msgspec.structs.replace(hints or RoutingHints(), dp_rank=route.dp_rank if size > 1 else None)
        return msgspec.structs.replace(self.request, routing=hints, bootstrap_info=self.info)

    def continued(self) -> PreprocessedRequest:
        """What a decode worker is asked."""
        asked = self._asked
        hints = msgspec.structs.replace(
            asked.routing or RoutingHints(), prefill_worker_id=self.instance_id, prefill_dp_rank=self.rank
        )
        override = decode_override(asked)
        asked = msgspec.structs.replace(asked, routing=hints, router_config_override=override)
        if self.info is not None:
            return msgspec.structs.replace(asked, bootstrap_info=self.info)
        result = PrefillResult(disaggregated_params=_params(self.items), prompt_tokens_details=self._details())
        return msgspec.structs.replace(
            asked, prefill_result=result, migration_link=_link(self.items) or asked.migration_link
        )

    def decode_routing(self, routing: RoutingRequest, request: PreprocessedRequest) -> RoutingRequest:
        """For the choice of a decode worker, which is sent `request`."""
        further = routing.in_phase(Phase.DECODE, request)
        further.excluded = self._excluded
        return further

    def check(self) -> None:
        """Whether the worker did what it was asked.

        Raises:
            BackendError: it ended with an error, or without anything to hand over.
        """
        reason = self._reason()
        if reason is FinishReason.ERROR:
            raise BackendError.Unknown(self._message())
        if not self.answered and _params(self.items) is None:
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
            return _params(self.items) is None
        return reason in (FinishReason.EOS, FinishReason.CANCELLED, FinishReason.CONTENT_FILTER)

    def answer(self, attempts: Attempts) -> None:
        """Makes what the worker said the client's answer, without what was meant for a decode worker."""
        stream = attempts.stream
        sink = attempts.sink()
        stream.instance_id = stream.prefill_instance_id = self.instance_id
        for item in self.items:
            sink.data(msgspec.structs.replace(item, disaggregated_params=None))
        sink.event(Annotated.from_complete_final())

    def left_behind(self) -> bool:
        """Whether the prompt has been prefilled, so that the worker keeps its KV cache for a decode worker."""
        stream = self.leg.stream
        self.items += stream.take()
        if not stream.ended or stream.error is not None or self._reason() is FinishReason.ERROR:
            return False
        return self.info is not None or (not self.answered and _params(self.items) is not None)

    def watch(self, attempts: Attempts, ctx: EngineContext) -> None:
        """Something came from a worker that is met by the decode worker: if it has failed, so does the request."""
        stream = self.leg.stream
        self.items += stream.take()
        reason = self._reason()
        error = stream.error
        if reason is FinishReason.ERROR:
            error = BackendError.Unknown(self._message())
        elif reason is FinishReason.CANCELLED:
            error = BackendError.Unknown("the prefill worker gave the request up")
        if error is not None and not ctx.is_stopped():
            attempts.lose(error, self.instance_id)

    def _reason(self) -> FinishReason | None:
        return self.items[-1].finish_reason if self.items else None

    def _message(self) -> str:
        return self.items[-1].error_message or "the engine gave no reason"

    def _details(self) -> dict[str, int] | None:
        usage = self.items[-1].completion_usage
        return None if usage is None or usage.cached_tokens is None else {"cached_tokens": usage.cached_tokens}


class _Both(Source):
    """The grip on the call of the decode worker and on that of the prefill worker before it."""

    __slots__ = ("_attempts", "_decode", "_prefill")

    def __init__(self, decode: Source, prefill: Leg, attempts: Attempts) -> None:
        self._decode = decode
        self._prefill = prefill
        self._attempts = attempts

    async def aclose(self) -> None:
        answer, before = self._attempts.stream, self._prefill.stream
        before.on_ready(None)
        try:
            if not answer.ended or answer.error is not None:
                # Before the first wait, so that both are told at once.
                self._stop_prefill()
            await self._decode.aclose()
            if not before.ended:
                # The answer is whole; what the prefill worker still says is under way.
                with suppress(DynamoError, TimeoutError):
                    async with asyncio.timeout(SETTLE):
                        async for _ in before:
                            pass
        finally:
            await before.aclose()

    def stop(self) -> None:
        self._decode.stop()
        self._stop_prefill()

    def pause(self) -> None:
        self._decode.pause()

    def resume(self) -> None:
        self._decode.resume()

    def _stop_prefill(self) -> None:
        before = self._prefill.stream
        before.on_ready(None)
        before.fail(Cancelled("the request has ended"))


def decode_override(asked: PreprocessedRequest) -> RouterConfigOverride:
    """How a decode worker is chosen: the cache comes from elsewhere, so that its own saves nothing."""
    return msgspec.structs.replace(
        asked.router_config_override or RouterConfigOverride(),
        overlap_score_credit=0.0,
        assume_kv_reuse=False,
        track_prefill_tokens=False,
    )


def room(size: int, rank: int) -> int:
    """A random room below 2**63, by whose number modulo `size` both engines know the rank."""
    return secrets.randbelow(ROOMS // size) * size + rank


def _params(items: Sequence[LLMEngineOutput]) -> object:
    for item in reversed(items):
        if item.disaggregated_params is not None:
            return item.disaggregated_params
    return None


def _link(items: Sequence[LLMEngineOutput]) -> TraceLink | None:
    for item in items:
        if item.worker_trace_link is not None:
            return item.worker_trace_link
    return None
