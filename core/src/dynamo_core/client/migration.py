"""Migration: a request whose worker has failed goes on at another one, under the same stream.

Before anything of an answer is there the request is simply asked again. In mid-answer another worker is given the
prompt and the tokens so far, and lower limits. docs/migration.md says what can move and what cannot.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec

from dynamo_core.client.alarms import Alarms
from dynamo_core.client.attempts import Attempts, Deadlines
from dynamo_core.client.connect import down, exhausted, retryable
from dynamo_core.client.side import Way, Ways
from dynamo_core.client.token_log import TokenLog
from dynamo_core.contracts.context import EngineContext
from dynamo_core.errors import Cancelled, DynamoError, ResponseTimeout, ServiceOverloaded, Unavailable
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

#: How often a stream is looked at while a stalled worker would be given up.
LOOKS = 4

#: Upper bounds of the histogram of durations, in seconds.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0)

#: Places a request with workers of a way: not those given, after one that failed for the reason given.
Place: TypeAlias = Callable[[Way, PreprocessedRequest, frozenset[int], DynamoError | None], Awaitable[None]]


class Migrator:
    """Moves requests. Holds no state of a single request, but the tasks of those that move."""

    def __init__(self, deadlines: Deadlines, metrics: Metrics, prefix: str) -> None:
        model = ("model",)
        self.deadlines = deadlines
        self.tries = deadlines.retries + 1
        self.tasks = TaskSet()
        self.looks = None if deadlines.stall is None else Alarms(deadlines.stall / LOOKS)
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
    """Keeps the stream of one request alive; see `dynamo_core.client.stream.Rescue`."""

    __slots__ = (
        "_alarm",
        "_attempts",
        "_closers",
        "_ctx",
        "_failed",
        "_migrator",
        "_mover",
        "_moves",
        "_place",
        "_placing",
        "_request",
        "_retries",
        "_way",
        "_ways",
    )

    def __init__(
        self,
        migrator: Migrator,
        attempts: Attempts,
        request: PreprocessedRequest,
        ctx: EngineContext,
        ways: Ways,
        place: Place,
    ) -> None:
        self._migrator = migrator
        self._attempts = attempts
        self._request = request
        self._ctx = ctx
        self._ways = ways
        self._place = place
        self._way: Way | None = None
        self._failed: frozenset[int] = frozenset()
        #: How often workers have failed before anything of the answer was there, and how often it has moved after that.
        self._retries = 0
        self._moves = 0
        #: Whether a worker is being sought, so that a failure is the seeker's affair.
        self._placing = False
        self._mover: asyncio.Task[None] | None = None
        self._closers: list[asyncio.Task[None]] = []
        self._alarm = 0

    async def open(self, way: Way) -> None:
        """Places the request for the first time.

        Raises:
            DynamoError: no worker has accepted it, or the one that has failed at once, and no other is sought.
        """
        attempts = self._attempts
        attempts.stream.rescue = self
        self._way = way
        self._placing = True
        try:
            await self._place(way, self._request, self._failed, None)
        except DynamoError as error:
            if error is not attempts.pending:
                raise
        if not attempts.stream.ended:
            self._watch()
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
                card = self._ways.card
                if card.migration_limit and (reason := hindrance(self._request, card)) is not None:
                    log.warning("request %s stays broken, %s: %s", self._ctx.id, reason, error)
                return error
            seen = TokenLog()
        else:
            seen = attempts.log.with_ahead(stream.ahead())
        if seen.empty:
            self._retries += 1
            if attempts.tried >= self._migrator.tries or self._retries >= self._migrator.tries:
                return exhausted(error)
        else:
            reason = self._unmovable(seen)
            if reason is not None:
                log.warning("request %s stays broken, %s: %s", self._ctx.id, reason, error)
                return error
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
        if self._alarm and self._migrator.looks is not None:
            self._migrator.looks.cancel(self._alarm)
        self.give_up()
        if self._closers:
            await asyncio.wait(self._closers)

    # Moving.

    def _unmovable(self, seen: TokenLog) -> str | None:
        """Why an answer that has begun cannot go on elsewhere; None if it can."""
        if seen.finished:
            return "its answer was complete"
        if seen.other:
            return "its engine gave more than the tokens of one answer"
        if seen.overlong:
            return "its answer has become too long to be moved"
        if self._moves >= self._ways.card.migration_limit:
            return f"Migration limit exhausted after {self._moves} moves"
        return None

    async def _move(self, error: DynamoError, seen: TokenLog) -> None:
        attempts, model = self._attempts, self._ways.card.name
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
            if last is attempts.pending:
                # It was accepted; what happened then is looked at below.
                outcome = "success"
            else:
                log.warning("request %s finds no other worker: %s", self._ctx.id, last)
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
            self._failed |= {failed}
            for side in self._way or ():
                if down(error):
                    side.pool.report_down(failed)
        where = "an unknown worker" if failed is None else f"worker {failed:x}"
        log.warning("request %s leaves %s after %d tokens: %s", self._ctx.id, where, len(seen.tokens), error)

    async def _find(self, error: DynamoError, seen: TokenLog) -> None:
        """Returns once another worker has accepted, or nothing is left to be said."""
        attempts = self._attempts
        if seen.empty:
            request = self._request
        else:
            reason = what_is_left(self._request, seen.tokens, self._ways.card.context_length)
            if reason is not None:
                self._finish(reason, seen)
                return
            request = continued(self._request, seen)
            attempts.adjust = _Continued(seen)
            attempts.tried = 0
        failures = attempts.tried
        loop = asyncio.get_running_loop()
        until = loop.time() + self._migrator.deadlines.migration_wait
        pause = FIRST_WAIT
        while True:
            try:
                self._way = way = self._ways.way(self._failed)
                await self._place(way, request, self._failed, error)
                return
            except (ServiceOverloaded, Unavailable) as refused:
                # A new request waits for those who are busy, not for workers that are not there yet.
                worth_it = (isinstance(refused, ServiceOverloaded) and self._somebody_left()) or not seen.empty
                if not worth_it or attempts.stream.ended or loop.time() + pause > until:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_WAIT)
            # Those who were busy may be asked again.
            attempts.tried = min(failures, self._migrator.tries - 1)

    def _somebody_left(self) -> bool:
        """Whether there are workers that have not failed on the request, so that it may be worth waiting for them."""
        return all(any(known not in self._failed for known in side.pool.instances) for side in self._way or ())

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

    # Workers that hang.

    def _watch(self) -> None:
        looks = self._migrator.looks
        if looks is not None:
            self._alarm = looks.set(self._look)

    def _look(self) -> None:
        attempts, deadlines = self._attempts, self._migrator.deadlines
        stream = attempts.stream
        self._alarm = 0
        if stream.ended:
            return
        self._watch()
        if self._placing or stream.held_up or not stream.begun:
            # Nothing to blame a worker for; and how long a first item may take has a deadline of its own.
            stream.quiet = 0
            return
        stream.quiet += 1
        seconds = deadlines.stall or math.inf
        if not stream.started:
            # The worker that goes on has to compute the prompt first.
            seconds = max(seconds, deadlines.first_item)
        if stream.quiet * (deadlines.stall or math.inf) / LOOKS > seconds:
            stream.quiet = 0
            stream.lose(ResponseTimeout(f"worker {stream.instance_id or 0:x} has given nothing for {seconds} s"))


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
