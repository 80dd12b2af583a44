"""Migration: continue the request of a failed worker at another one, under the same stream.

Before anything of an answer is there the request is simply asked again. In mid-answer another worker is given the
prompt and the tokens so far, and lower limits. docs/explanation/migration.md says what can move and what cannot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec
from dynamo_core.backoff import Backoff
from dynamo_core.errors import DynamoError, ServiceOverloaded, Unavailable, blames_worker, retryable
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.output import FinishReason, LLMEngineOutput, usage
from dynamo_core.protocol.records import ModelCard
from dynamo_core.protocol.request import PreprocessedRequest
from dynamo_core.tasks import TaskSet
from dynamo_telemetry.metrics import Metrics

from dynamo_runtime.dispatch.execution.connect import no_worker_error
from dynamo_runtime.dispatch.execution.execution import Deadlines, RequestExecution, TokenLog
from dynamo_runtime.dispatch.pools.worker_group import RoutePlan
from dynamo_runtime.telemetry.request_events import RequestEventHub

log = logging.getLogger(__name__)

#: The label values of `migration_type`.
NEW_REQUEST = "new_request"
ONGOING_REQUEST = "ongoing_request"

#: Upper bounds of the histogram of durations, in seconds.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0)

#: Has workers of a plan accept a request: not those given, after one that failed for the reason given.
PlaceRequest: TypeAlias = Callable[
    [RequestExecution, RoutePlan, PreprocessedRequest, frozenset[int], DynamoError | None], Awaitable[object]
]

#: Seconds for which the log says nothing more of a worker that is lost for the same reason; how many such pairs it
#: remembers.
WARNING_INTERVAL = 60.0
MAX_WARNINGS = 1024


class LossLog:
    """Warns of workers that requests were lost on."""

    __slots__ = ("_quiet_until",)

    def __init__(self) -> None:
        self._quiet_until: dict[tuple[int | None, str], float] = {}

    def lost(self, instance_id: int | None, error: DynamoError) -> None:
        """Record that a request has lost a worker; None: no worker was chosen yet."""
        now = time.monotonic()
        key = (instance_id, error.kind)
        if self._quiet_until.get(key, 0.0) > now:
            return
        if len(self._quiet_until) >= MAX_WARNINGS:
            self._quiet_until = {known: until for known, until in self._quiet_until.items() if until > now}
            if len(self._quiet_until) >= MAX_WARNINGS:
                self._quiet_until.clear()
        self._quiet_until[key] = now + WARNING_INTERVAL
        where = "a worker that is not known" if instance_id is None else f"worker {instance_id:016x}"
        log.warning("requests are failing on %s: %s: %s", where, error.kind, error)


class Migrator:
    """The recovery policy of requests, and the step *migrate*. Holds no state of a request, but the tasks that move."""

    def __init__(
        self, place: PlaceRequest, deadlines: Deadlines, metrics: Metrics, prefix: str, events: RequestEventHub
    ) -> None:
        model = ("model",)
        self.tasks = TaskSet()
        self._place = place
        self._events = events
        self._deadlines = deadlines
        self._tries = deadlines.retries + 1
        self._losses = LossLog()
        self._moves = metrics.counter(
            f"{prefix}_model_migration_total",
            "Moves of requests whose worker failed, whether another was found or not. migration_type is new_request "
            "before the first token, ongoing_request after it.",
            (*model, "migration_type"),
        )
        self._durations = metrics.histogram(
            f"{prefix}_model_migration_duration_seconds",
            "Seconds from the failure of a worker to the acceptance by another (outcome success), or to giving up "
            "(failure, cancelled).",
            (*model, "migration_type", "outcome"),
            BUCKETS,
        )
        self._overlong = metrics.counter(
            f"{prefix}_model_migration_max_seq_len_exceeded_total",
            "Requests that have grown beyond client.migration_max_seq_len, and can no longer move.",
            model,
        )

    def token_log_for(self, request: PreprocessedRequest, card: ModelCard) -> TokenLog | None:
        """Return what takes down the answer to a request; None if it cannot move in mid-answer anyway."""
        if card.migration_limit < 1 or migration_blocker(request, card) is not None:
            return None
        most = self._deadlines.migration_max_seq_len
        if most is None:
            return TokenLog()
        return TokenLog(max(most - len(request.token_ids), 0), self._overlong.labels(card.name).inc)

    async def aclose(self) -> None:
        """End what is under way."""
        await self.tasks.aclose()

    # The policy.

    def recover(self, execution: RequestExecution, error: DynamoError) -> DynamoError | None:
        """See `RecoveryPolicy`."""
        if execution.ctx.is_stopped() or not retryable(error):
            return error
        stream, card = execution.stream, execution.planner.card
        if execution.log is not None:
            seen = execution.log.including_unread(stream.unread_items())
        elif stream.begun:
            blocker = migration_blocker(execution.request, card) if card.migration_limit else None
            blocker = blocker or ("its tokens were not kept" if card.migration_limit else "its model does not migrate")
            return self._give_up(execution, error, blocker)
        else:
            seen = TokenLog()
        if not seen.empty:
            blocker = _unmovable(seen, execution.moves, card.migration_limit)
            if blocker is not None:
                return self._give_up(execution, error, blocker)
        elif execution.retries + 1 >= self._tries:
            self._give_up(execution, error, f"{execution.retries + 1} workers accepted it and failed")
            return no_worker_error(error)
        task = self.tasks.spawn(self._migrate(execution, error, seen), name=f"move-{execution.ctx.id}")
        execution.enter_recovery(task, in_mid_answer=not seen.empty)
        return None

    def _give_up(self, execution: RequestExecution, error: DynamoError, reason: str) -> DynamoError:
        self._losses.lost(execution.failed_worker, error)
        log.info("request %s stays broken, %s: %s", execution.ctx.id, reason, error)
        return error

    # The step.

    async def _migrate(self, execution: RequestExecution, error: DynamoError, seen: TokenLog) -> None:
        model = execution.planner.card.name
        kind = NEW_REQUEST if seen.empty else ONGOING_REQUEST
        loop = asyncio.get_running_loop()
        began = loop.time()
        outcome = "failure"
        self._moves.labels(model, kind).inc()
        forget = execution.ctx.on_stop(execution.stop)
        try:
            self._leave(execution, error, seen)
            await self._find(execution, error, seen)
            outcome = "success"
        except asyncio.CancelledError:
            outcome = "cancelled"
            execution.fail(error)
            raise
        except DynamoError as last:
            if execution.failed_after_acceptance(last):
                # What happened after it was accepted is dealt with below.
                outcome = "success"
            else:
                log.info("request %s finds no other worker: %s", execution.ctx.id, last)
                execution.fail(last if seen.empty else error)
        except Exception:
            log.exception("request %s could not be moved", execution.ctx.id)
            execution.fail(error)
        finally:
            forget()
            self._durations.labels(model, kind, outcome).observe(loop.time() - began)
        execution.placement_done()

    def _leave(self, execution: RequestExecution, error: DynamoError, seen: TokenLog) -> None:
        """Detach the worker that has failed."""
        failed = execution.detach_worker(error, seen)
        if failed is not None and blames_worker(error):
            for group in execution.plan:
                group.pool.report_down(failed)
        self._losses.lost(failed, error)
        execution.publish_moved(self._events, failed, len(seen.tokens), error)
        log.info(
            "request %s leaves worker %016x after %d tokens: %s",
            execution.ctx.id,
            failed or 0,
            len(seen.tokens),
            error,
        )

    async def _find(self, execution: RequestExecution, error: DynamoError, seen: TokenLog) -> None:
        """Return once another worker has accepted, or nothing is left to be said."""
        request = execution.request
        if not seen.empty:
            reason = implied_finish_reason(request, seen.tokens, execution.planner.card.context_length)
            if reason is not None:
                _finish(execution, reason, seen)
                return
            request = continued(request, seen)
        backoff = Backoff(self._deadlines.migration_wait)
        # At first the others; then those as well that were lost on the wire, as it may be whole again.
        excluded = execution.failed | execution.unreached
        while True:
            if not seen.empty:
                execution.forget_asked()
            try:
                plan = execution.replan(excluded)
                await self._place(execution, plan, request, excluded, error)
                return
            except (ServiceOverloaded, Unavailable):
                # A new request waits for workers that are busy or out of reach, not for those that are not there yet.
                worth_it = not seen.empty or self._may_be_asked_again(execution)
                if not worth_it or execution.stream.ended or not await backoff.pause():
                    raise
            excluded = execution.failed

    def _may_be_asked_again(self, execution: RequestExecution) -> bool:
        """Return whether each role has a worker that has not failed on the request and that it may still be given to.

        A broken wire mends itself, so a request waits for workers behind it. A request that a worker has failed itself
        may be the cause of all that goes wrong: its calls are counted, also where they reach no worker.
        """
        return all(
            not (execution.failed and hop is not None and hop.calls - hop.full >= self._tries)
            and any(
                one not in execution.failed and (hop is None or len(hop.workers) < self._tries or one in hop.workers)
                for one in group.pool.in_service
            )
            for group, hop in zip(execution.plan, execution.hops(), strict=True)
        )


def _finish(execution: RequestExecution, reason: FinishReason, seen: TokenLog) -> None:
    """Give the terminal that the worker has not given."""
    prompt, answer = len(execution.request.token_ids), len(seen.tokens)
    counts = msgspec.structs.replace(usage(prompt, answer), cached_tokens=seen.cached_tokens)
    sink = execution.stream.begin()
    sink.data(LLMEngineOutput(finish_reason=reason).with_usage(counts))
    sink.event(Annotated.from_complete_final())


def _unmovable(seen: TokenLog, moves: int, limit: int) -> str | None:
    """Return why an answer that has begun cannot go on elsewhere; None if it can."""
    if seen.finished:
        return "its answer was complete"
    if seen.has_unmovable_output:
        return "its engine gave more than the tokens of one answer"
    if seen.overlong:
        return "its answer has become too long to be moved"
    if moves >= limit:
        return f"Migration limit exhausted after {moves} moves"
    return None


def migration_blocker(request: PreprocessedRequest, card: ModelCard) -> str | None:
    """Return why an answer to this request can never go on at another worker; None if it can."""
    options = request.sampling_options
    if card.model_input == "text":
        return "its engine takes text"
    if options.guided_decoding is not None:
        return "its answer is guided, and the state of the guide is the engine's"
    if (options.n or 1) > 1 or (options.best_of or 1) > 1 or options.use_beam_search:
        return "its engine makes several answers at once"
    return None


def implied_finish_reason(
    request: PreprocessedRequest, tokens: list[int], context_length: int | None
) -> FinishReason | None:
    """Return how an answer that has come as far as `tokens` has ended, if only its terminal is missing; else None."""
    limits = request.stop_conditions
    if limits.max_tokens is not None and len(tokens) >= limits.max_tokens:
        return FinishReason.LENGTH
    if context_length is not None and len(request.token_ids) + len(tokens) >= context_length:
        return FinishReason.LENGTH
    if tokens and not limits.ignore_eos and len(tokens) >= (limits.min_tokens or 0):
        if tokens[-1] in request.eos_token_ids:
            return FinishReason.EOS
        if tokens[-1] in (limits.stop_token_ids or ()) or tokens[-1] in (limits.stop_token_ids_hidden or ()):
            return FinishReason.STOP
    return None


def continued(request: PreprocessedRequest, seen: TokenLog) -> PreprocessedRequest:
    """Return what a worker is asked so that it goes on after the tokens that were seen."""
    limits, count = request.stop_conditions, len(seen.tokens)
    return msgspec.structs.replace(
        request,
        token_ids=[*request.token_ids, *seen.tokens],
        stop_conditions=msgspec.structs.replace(
            limits,
            max_tokens=_less(limits.max_tokens, count),
            min_tokens=_less(limits.min_tokens, count),
            max_thinking_tokens=_less(limits.max_thinking_tokens, count),
        ),
        migration_link=seen.link or request.migration_link,
    )


def _less(limit: int | None, count: int) -> int | None:
    return None if limit is None else max(limit - count, 0)
