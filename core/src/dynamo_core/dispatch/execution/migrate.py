"""Migration: a request whose worker has failed goes on at another one, under the same stream.

Before anything of an answer is there the request is simply asked again. In mid-answer another worker is given the
prompt and the tokens so far, and lower limits. docs/explanation/migration.md says what can move and what cannot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec

from dynamo_core.contracts.context import EngineContext
from dynamo_core.dispatch.execution.connect import down, exhausted, lost_on_the_wire, retryable
from dynamo_core.dispatch.execution.execution import Attempts, Deadlines
from dynamo_core.dispatch.execution.token_log import TokenLog
from dynamo_core.dispatch.pools.worker_group import RoutePlan, RoutePlanner
from dynamo_core.errors import Cancelled, DynamoError, ServiceOverloaded, Unavailable
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.output import CompletionUsage, FinishReason, LLMEngineOutput
from dynamo_core.protocol.records import ModelCard
from dynamo_core.protocol.request import PreprocessedRequest
from dynamo_core.tasks import TaskSet
from dynamo_core.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

#: The label values of `migration_type`.
NEW_REQUEST = "new_request"
ONGOING_REQUEST = "ongoing_request"

#: Seconds before other workers are asked again when none was free; doubled each time, up to the second.
FIRST_WAIT = 0.05
LAST_WAIT = 1.0

#: Upper bounds of the histogram of durations, in seconds.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0)

#: Places a request with workers of a way: not those given, after one that failed for the reason given.
Place: TypeAlias = Callable[[RoutePlan, PreprocessedRequest, frozenset[int], DynamoError | None], Awaitable[None]]


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
        """A request has lost a worker; None: no worker was chosen yet."""
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
        log.warning("requests lose %s: %s: %s", where, error.kind, error)


class Migrator:
    """Moves requests. Holds no state of a single request, but the tasks of those that move."""

    def __init__(self, deadlines: Deadlines, metrics: Metrics, prefix: str) -> None:
        model = ("model",)
        self.deadlines = deadlines
        self.tries = deadlines.retries + 1
        self.tasks = TaskSet()
        self.losses = LossLog()
        self._moves = metrics.counter(
            f"{prefix}_model_migration_total",
            "Requests whose worker failed and for which another was sought.",
            (*model, "migration_type"),
        )
        self._durations = metrics.histogram(
            f"{prefix}_model_migration_duration_seconds",
            "From the failure of a worker to the acceptance by another, or to giving up.",
            (*model, "migration_type", "outcome"),
            BUCKETS,
        )
        self._overlong = metrics.counter(
            f"{prefix}_model_migration_max_seq_len_exceeded_total",
            "Requests that grew too long to be moved.",
            model,
        )

    def log_for(self, request: PreprocessedRequest, card: ModelCard) -> TokenLog | None:
        """What takes down the answer to a request; None if it cannot move in mid-answer anyway."""
        if card.migration_limit < 1 or hindrance(request, card) is not None:
            return None
        most = self.deadlines.migration_max_seq_len
        if most is None:
            return TokenLog()
        return TokenLog(max(most - len(request.token_ids), 0), lambda: self._overlong.labels(card.name).inc())

    def begun(self, model: str, kind: str) -> None:
        """A worker is sought."""
        self._moves.labels(model, kind).inc()

    def over(self, model: str, kind: str, outcome: str, seconds: float) -> None:
        """It was found, or not: `outcome` is success, failure or cancelled."""
        self._durations.labels(model, kind, outcome).observe(seconds)

    async def aclose(self) -> None:
        """Ends what is under way."""
        await self.tasks.aclose()


class Migration:
    """Keeps the stream of one request alive; see `dynamo_core.dispatch.execution.response_stream.Rescue`."""

    __slots__ = (
        "_attempts",
        "_closers",
        "_ctx",
        "_failed",
        "_migrator",
        "_mover",
        "_moves",
        "_place",
        "_placing",
        "_plan",
        "_planner",
        "_request",
        "_retries",
        "_unreached",
    )

    def __init__(
        self,
        migrator: Migrator,
        attempts: Attempts,
        request: PreprocessedRequest,
        ctx: EngineContext,
        planner: RoutePlanner,
        place: Place,
    ) -> None:
        self._migrator = migrator
        self._attempts = attempts
        self._request = request
        self._ctx = ctx
        self._planner = planner
        self._place = place
        self._plan: RoutePlan | None = None
        #: Workers that have failed on the request, and those that were lost on the wire: they are asked again if there
        #: is no other.
        self._failed: frozenset[int] = frozenset()
        self._unreached: frozenset[int] = frozenset()
        #: How often workers have failed before anything of the answer was there, and how often it has moved after that.
        self._retries = 0
        self._moves = 0
        #: Whether a worker is being sought, so that a failure is the seeker's affair.
        self._placing = False
        self._mover: asyncio.Task[None] | None = None
        self._closers: list[asyncio.Task[None]] = []

    async def open(self, plan: RoutePlan) -> None:
        """Places the request for the first time.

        Raises:
            DynamoError: no worker has accepted it, or the one that has failed at once, and no other is sought.
        """
        attempts = self._attempts
        attempts.stream.rescue = self
        self._plan = plan
        self._placing = True
        try:
            await self._place(plan, self._request, self._failed, None)
        except DynamoError as error:
            if not self._taken_in_vain(error):
                raise
        self._placed()
        if attempts.stream.error is not None and not attempts.stream.begun:
            raise attempts.stream.error

    # The stream's side.

    def lost(self, error: DynamoError) -> DynamoError | None:
        attempts = self._attempts
        if self._placing:
            attempts.pending = attempts.pending or error
            return None
        if self._ctx.is_stopped() or not retryable(error):
            return error
        stream = attempts.stream
        if attempts.log is None:
            if stream.begun:
                card = self._planner.card
                reason = "its model does not migrate" if not card.migration_limit else hindrance(self._request, card)
                return self._broken(error, reason or "its tokens were not kept")
            seen = TokenLog()
        else:
            seen = attempts.log.with_ahead(stream.ahead())
        if seen.empty:
            self._retries += 1
            if self._retries >= self._migrator.tries:
                self._broken(error, f"{self._retries} workers took it in vain")
                return exhausted(error)
        else:
            reason = self._unmovable(seen)
            if reason is not None:
                return self._broken(error, reason)
            self._moves += 1
        self._placing = True
        self._mover = self._migrator.tasks.spawn(self._move(error, seen), name=f"move-{self._ctx.id}")
        return None

    def give_up(self) -> None:
        mover, self._mover = self._mover, None
        if mover is not None:
            mover.cancel()
            self._closers.append(mover)

    async def aclose(self) -> None:
        self.give_up()
        if self._closers:
            await asyncio.wait(self._closers)

    def _broken(self, error: DynamoError, reason: str) -> DynamoError:
        attempts = self._attempts
        self._migrator.losses.lost(attempts.culprit or attempts.stream.instance_id, error)
        log.info("request %s stays broken, %s: %s", self._ctx.id, reason, error)
        return error

    # Moving.

    def _unmovable(self, seen: TokenLog) -> str | None:
        """Why an answer that has begun cannot go on elsewhere; None if it can."""
        if seen.finished:
            return "its answer was complete"
        if seen.other:
            return "its engine gave more than the tokens of one answer"
        if seen.overlong:
            return "its answer has become too long to be moved"
        if self._moves >= self._planner.card.migration_limit:
            return f"Migration limit exhausted after {self._moves} moves"
        return None

    async def _move(self, error: DynamoError, seen: TokenLog) -> None:
        model = self._planner.card.name
        kind = NEW_REQUEST if seen.empty else ONGOING_REQUEST
        loop = asyncio.get_running_loop()
        began = loop.time()
        outcome = "failure"
        self._migrator.begun(model, kind)
        forget = self._ctx.on_stop(self._stopped)
        try:
            self._leave(error, seen)
            await self._find(error, seen)
            outcome = "success"
        except asyncio.CancelledError:
            outcome = "cancelled"
            self._end(error)
            raise
        except DynamoError as last:
            if self._taken_in_vain(last):
                # What happened after it was accepted is looked at below.
                outcome = "success"
            else:
                log.info("request %s finds no other worker: %s", self._ctx.id, last)
                self._end(last if seen.empty else error)
        except Exception:
            log.exception("request %s could not be moved", self._ctx.id)
            self._end(error)
        finally:
            forget()
            self._migrator.over(model, kind, outcome, loop.time() - began)
        self._mover = None
        self._placed()

    def _leave(self, error: DynamoError, seen: TokenLog) -> None:
        """Lets go of the worker that has failed."""
        attempts = self._attempts
        stream = attempts.stream
        culprit, attempts.culprit = attempts.culprit, None
        failed = stream.instance_id if culprit is None else culprit
        attempts.leave(error)
        attempts.moved_from, attempts.completed = failed, len(seen.tokens)
        stream.prefill_instance_id = None
        source = stream.let_go()
        if source is not None:
            self._closers.append(self._migrator.tasks.spawn(source.aclose(), name=f"leave-{self._ctx.id}"))
        if failed is not None:
            if lost_on_the_wire(error):
                self._unreached |= {failed}
            else:
                self._failed |= {failed}
            for group in self._plan or ():
                if down(error):
                    group.pool.report_down(failed)
        self._migrator.losses.lost(failed, error)
        log.info(
            "request %s leaves worker %016x after %d tokens: %s", self._ctx.id, failed or 0, len(seen.tokens), error
        )

    async def _find(self, error: DynamoError, seen: TokenLog) -> None:
        """Returns once another worker has accepted, or nothing is left to be said."""
        attempts = self._attempts
        if seen.empty:
            request = self._request
        else:
            reason = what_is_left(self._request, seen.tokens, self._planner.card.context_length)
            if reason is not None:
                self._finish(reason, seen)
                return
            request = continued(self._request, seen)
            attempts.adjust = _Continued(seen)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._migrator.deadlines.migration_wait
        pause = FIRST_WAIT
        # At first the others; then those as well that were lost on the wire, as it may be whole again.
        excluded = self._failed | self._unreached
        while True:
            if not seen.empty:
                # Each round of moving has tries of its own.
                attempts.workers.clear()
                attempts.prefill_workers.clear()
            try:
                self._plan = plan = self._planner.plan(excluded)
                await self._place(plan, request, excluded, error)
                return
            except (ServiceOverloaded, Unavailable):
                # A new request waits for workers that are busy or out of reach, not for those that are not there yet.
                worth_it = not seen.empty or self._may_be_asked_again()
                if not worth_it or attempts.stream.ended or loop.time() + pause > until:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_WAIT)
            excluded = self._failed

    def _may_be_asked_again(self) -> bool:
        """Whether each role has a worker that has not failed on the request and that it may still be given to."""
        attempts, tries = self._attempts, self._migrator.tries
        plan = self._plan or ()
        asked = (attempts.workers,) if len(plan) < 2 else (attempts.prefill_workers, attempts.workers)
        return all(
            any(
                known not in self._failed and (len(before) < tries or known in before) for known in group.pool.instances
            )
            for group, before in zip(plan, asked, strict=True)
        )

    def _finish(self, reason: FinishReason, seen: TokenLog) -> None:
        """Gives the terminal that the worker has not given."""
        prompt, answer = len(self._request.token_ids), len(seen.tokens)
        terminal = LLMEngineOutput(finish_reason=reason)
        terminal.completion_usage = CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=answer,
            total_tokens=prompt + answer,
            cached_tokens=seen.cached_tokens,
        )
        sink = self._attempts.stream.begin()
        sink.data(terminal)
        sink.event(Annotated.from_complete_final())

    def _taken_in_vain(self, error: DynamoError) -> bool:
        """Whether a worker took the request, and its failure, not a refusal, kept the request from being placed."""
        attempts = self._attempts
        if error is not attempts.pending and retryable(error) and not attempts.stream.ended:
            attempts.pending = error
        return error is attempts.pending

    def _placed(self) -> None:
        """A worker has accepted. If its attempt has failed since, that is what is dealt with next."""
        attempts = self._attempts
        self._placing = False
        pending, attempts.pending = attempts.pending, None
        if pending is not None and not attempts.stream.ended:
            final = self.lost(pending)
            if final is not None:
                self._end(final)

    def _stopped(self) -> None:
        self._attempts.stream.fail(Cancelled("the request was stopped while it had no worker"))

    def _end(self, error: DynamoError) -> None:
        # Not to be cancelled by the stream's end: this is what ends it.
        self._mover = None
        self._attempts.stream.fail(error)


class _Continued:
    """Makes what the next worker says a part of one answer: its counts are those of its own prompt and tokens."""

    __slots__ = ("_before", "_cached_tokens", "_cum_log_probs")

    def __init__(self, seen: TokenLog) -> None:
        self._before = len(seen.tokens)
        self._cached_tokens = seen.cached_tokens
        self._cum_log_probs = seen.cum_log_probs

    def __call__(self, item: LLMEngineOutput) -> LLMEngineOutput:
        changes: dict[str, Any] = {}
        usage = item.completion_usage
        if usage is not None:
            prompt = max(usage.prompt_tokens - self._before, 0)
            answer = usage.completion_tokens + self._before
            changes["completion_usage"] = CompletionUsage(
                prompt_tokens=prompt,
                completion_tokens=answer,
                total_tokens=prompt + answer,
                cached_tokens=self._cached_tokens,
            )
        if item.cum_log_probs is not None and self._cum_log_probs is not None:
            changes["cum_log_probs"] = self._cum_log_probs + item.cum_log_probs
        # A copy: engines may yield the same object to many.
        return msgspec.structs.replace(item, **changes) if changes else item


def hindrance(request: PreprocessedRequest, card: ModelCard) -> str | None:
    """Why an answer to this request can never go on at another worker; None if it can."""
    options = request.sampling_options
    if card.model_input == "text":
        return "its engine takes text"
    if options.guided_decoding is not None:
        return "its answer is guided, and the state of the guide is the engine's"
    if (options.n or 1) > 1 or (options.best_of or 1) > 1 or options.use_beam_search:
        return "its engine makes several answers at once"
    return None


def what_is_left(request: PreprocessedRequest, tokens: list[int], context_length: int | None) -> FinishReason | None:
    """How an answer that has come as far as `tokens` has ended, if only its terminal is missing; else None."""
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
    """What a worker is asked so that it goes on after the tokens that were seen."""
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
