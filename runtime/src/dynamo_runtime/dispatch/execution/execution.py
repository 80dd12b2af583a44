"""`RequestExecution`: one client request, from its admission to its end, as one state machine."""

from __future__ import annotations

import asyncio
import copy
import enum
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
from dynamo_core.contracts.admission import Permit
from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.contracts.requests.request_events import RequestMoved
from dynamo_core.contracts.transports.call import GENERATE, Endpoint, Sink, Source
from dynamo_core.errors import (
    Cancelled,
    DeadlineExceeded,
    DynamoError,
    ResponseTimeout,
    WorkerOverloaded,
    lost_on_the_wire,
    retryable,
)
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.decoding import truncated
from dynamo_core.protocol.output import CompletionUsage, LLMEngineOutput
from dynamo_core.protocol.request import PreprocessedRequest, TraceLink
from dynamo_core.tasks import TaskSet

from dynamo_runtime.dispatch.execution.response_stream import FlushQueue, ResponseStream
from dynamo_runtime.dispatch.load.tracker import Reservation
from dynamo_runtime.dispatch.pools.worker_group import RoutePlan, RoutePlanner
from dynamo_runtime.dispatch.timeouts import FixedTimeouts, StallTimeout
from dynamo_runtime.dispatch.unread_answers import UnreadAnswers
from dynamo_runtime.telemetry.request_events import RequestEventHub
from dynamo_runtime.telemetry.route_span import RouteSpan


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Bounds of one request, in seconds, and how many more workers are tried while nothing of the answer is there."""

    retries: int = 2
    accept: float = 5.0
    first_item: float = 300.0
    total: float = 590.0
    #: How long a prompt that has been prefilled waits for a decode worker that takes it.
    decode_wait: float = 30.0
    #: How long a request whose worker has failed waits for another one.
    migration_wait: float = 20.0
    #: Tokens of prompt and answer up to which a request can move in mid-answer; None: any number.
    migration_max_seq_len: int | None = None
    #: How long a worker that has accepted the request may send nothing; None: as long as its process and wire live.
    stall: float | None = None


class RequestTimeouts:
    """The deadlines of all requests of a pipeline."""

    __slots__ = ("deadlines", "first", "rest", "stall")

    def __init__(self, deadlines: Deadlines) -> None:
        first = min(deadlines.first_item, deadlines.total)
        self.deadlines = deadlines
        #: Until the first item.
        self.first = FixedTimeouts(first)
        #: From then on.
        self.rest = FixedTimeouts(deadlines.total - first)
        #: Without output of a worker; None: no such deadline.
        self.stall = None if deadlines.stall is None else StallTimeout(deadlines.stall)


class TokenLog:
    """Told every batch that the reader takes, over all attempts. Holds up to `most` tokens, then none at all.

    `overlong` is called once, when there are more.
    """

    __slots__ = (
        "_dropped",
        "_most",
        "_overlong",
        "cached_tokens",
        "cum_log_probs",
        "finished",
        "has_unmovable_output",
        "link",
        "tokens",
    )

    def __init__(self, most: int | None = None, overlong: Callable[[], None] | None = None) -> None:
        self._most = most
        self._overlong = overlong
        self._dropped = 0
        self.tokens: list[int] = []
        #: Where the last worker's span can be found.
        self.link: TraceLink | None = None
        #: Tokens of the prompt that the first worker found in its cache, if it has said so: what later ones say is made
        #: to say the same.
        self.cached_tokens: int | None = None
        self.cum_log_probs: float | None = None
        #: Whether the terminal item has come.
        self.finished = False
        #: Whether something came that is no token of a single answer, and so cannot be told to another worker.
        self.has_unmovable_output = False

    def observe(self, batch: Sequence[LLMEngineOutput]) -> None:
        """Take down a batch."""
        tokens = self.tokens
        for item in batch:
            tokens += item.token_ids
            if item.delta is not None or item.index:
                self.has_unmovable_output = True
            if item.worker_trace_link is not None:
                self.link = item.worker_trace_link
            if item.cum_log_probs is not None:
                self.cum_log_probs = item.cum_log_probs
            if item.completion_usage is not None:
                self.cached_tokens = item.completion_usage.cached_tokens
            if item.finish_reason is not None:
                self.finished = True
        if self._most is not None and len(tokens) > self._most:
            self._drop()

    def including_unread(self, items: Sequence[LLMEngineOutput]) -> TokenLog:
        """Return what this one will be when the reader has taken `items`, which have arrived."""
        log = copy.copy(self)
        log._overlong, log.tokens = None, self.tokens.copy()
        log.observe(items)
        return log

    @property
    def output_tokens(self) -> int:
        """The number of tokens that came, held or not."""
        return self._dropped + len(self.tokens)

    @property
    def overlong(self) -> bool:
        """Whether there were too many to hold."""
        return self._dropped > 0

    @property
    def empty(self) -> bool:
        """Whether nothing of an answer has come."""
        return not (self.tokens or self._dropped or self.has_unmovable_output or self.finished)

    def _drop(self) -> None:
        if not self._dropped and self._overlong is not None:
            self._overlong()
        self._dropped += len(self.tokens)
        self.tokens.clear()
        self._most = 0


class ContinuedSink:
    """A sink that makes the next worker's output a part of one answer: its counts are of its own prompt and tokens."""

    __slots__ = ("_before", "_cached_tokens", "_cum_log_probs", "_sink")

    def __init__(self, sink: Sink, seen: TokenLog) -> None:
        self._sink = sink
        self._before = len(seen.tokens)
        self._cached_tokens = seen.cached_tokens
        self._cum_log_probs = seen.cum_log_probs

    def data(self, item: LLMEngineOutput) -> None:
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
                reasoning_tokens=usage.reasoning_tokens,
            )
        if item.cum_log_probs is not None and self._cum_log_probs is not None:
            changes["cum_log_probs"] = self._cum_log_probs + item.cum_log_probs
        # A copy: engines may yield the same object to many.
        self._sink.data(msgspec.structs.replace(item, **changes) if changes else item)

    def event(self, item: Annotated[Any]) -> None:
        self._sink.event(item)

    def closed(self, error: DynamoError | None) -> None:
        self._sink.closed(error)


class Hop:
    """A call that is tried at worker after worker until one accepts: its stream, and the workers asked so far.

    The hop of the answer has the client's stream; a prefill worker is called in a hop of its own. `label` tells the
    attempts of the hop from those of the request's other hops. If `patient`, a worker is waited for while all are busy,
    since the request has been let in as part of another.
    """

    __slots__ = (
        "_seen",
        "calls",
        "completed",
        "failure",
        "full",
        "label",
        "moved_from",
        "patient",
        "stream",
        "workers",
    )

    def __init__(self, stream: ResponseStream, label: str = "", *, patient: bool = False) -> None:
        self.stream = stream
        self.label = label
        self.patient = patient
        #: The workers that were asked, except those that were full. The connector bounds their number.
        self.workers: set[int] = set()
        #: How many calls there have been in all, and how many of them found a worker full.
        self.calls = 0
        self.full = 0
        #: The worker that had the call before, and how many tokens had come by then.
        self.moved_from: int | None = None
        self.completed = 0
        #: Why the attempt that is being placed is of no use, although the stream stays open.
        self.failure: DynamoError | None = None
        #: What came before, of which the items of the next workers make one answer.
        self._seen: TokenLog | None = None

    @property
    def over(self) -> DynamoError | None:
        """Why there is no use in asking another worker, if there is none."""
        return self.stream.error or self.failure

    def begin(self, reservation: Reservation | None = None, span: RouteSpan | None = None) -> Sink:
        """Return the sink for the worker that was chosen."""
        attempt = self.stream.begin(reservation, span)
        return attempt if self._seen is None else ContinuedSink(attempt, self._seen)

    def ask(self, instance_id: int) -> int:
        """Count a worker that is about to be asked; return how many calls there were before."""
        self.workers.add(instance_id)
        number, self.calls = self.calls, self.calls + 1
        return number

    def attempt_id(self, ctx: EngineContext, number: int) -> str:
        """Return the id of an attempt of this hop, before which there were `number` calls."""
        return f"{ctx.id}-{self.label}{number}"

    def refused(self, instance_id: int, error: DynamoError) -> None:
        """Handle a refusal of the worker. One that is full does not count as asked: another one may have room."""
        self.stream.release_attempt(error)
        self.moved_from = instance_id
        if isinstance(error, WorkerOverloaded):
            self.workers.discard(instance_id)
            self.full += 1

    def forget_asked(self) -> None:
        """Allow asking the same workers again."""
        self.workers.clear()

    def reopen(self, stream: ResponseStream, after: Hop) -> None:
        """Start another round over a stream of its own; `after` says what the request has been through."""
        self.stream = stream
        self.moved_from, self.completed = after.moved_from, after.completed

    def leave(self, worker: int | None, seen: TokenLog) -> None:
        """Leave a worker that failed after it accepted: the next one goes on from what was seen."""
        self.moved_from, self.completed = worker, len(seen.tokens)
        self._seen = None if seen.empty else seen

    def note_failure(self, error: DynamoError | None) -> None:
        """Note why the current placement is of no use any more; None: it is placed anew."""
        self.failure = error


class ExecutionState(enum.Enum):
    """The state of a request; docs/architecture.md has the transitions."""

    ADMITTED = "admitted"
    ROUTING = "routing"
    ACCEPTED = "accepted"
    STREAMING = "streaming"
    RECOVERING = "recovering"
    ENDED = "ended"


class RecoveryPolicy(Protocol):
    """The policy for an attempt that has failed while the stream is open."""

    #: The tasks of requests that recover, and of calls that are being left.
    tasks: TaskSet

    def recover(self, execution: RequestExecution, error: DynamoError) -> DynamoError | None:
        """Have the execution recover and return None; or return the error that the stream ends with."""


class RequestExecution:
    """All state of one client request. Only this class writes it; the steps read it and call its transitions.

    It owns the client's stream, which reports what becomes of the current attempt (`StreamOwner`). `log` is kept where
    the request may move to another worker in mid-answer.
    """

    __slots__ = (
        "_closing",
        "_failed_worker",
        "_output_tokens",
        "_permit",
        "_policy",
        "_prior",
        "_recovery",
        "_running",
        "_timeout",
        "answer",
        "ctx",
        "endpoint",
        "failed",
        "log",
        "moves",
        "payload",
        "plan",
        "planner",
        "prefill",
        "principal",
        "request",
        "retries",
        "state",
        "stream",
        "timeouts",
        "unreached",
    )

    def __init__(
        self,
        request: PreprocessedRequest,
        ctx: EngineContext,
        planner: RoutePlanner,
        plan: RoutePlan,
        permit: Permit,
        *,
        principal: Principal,
        flush: FlushQueue,
        timeouts: RequestTimeouts,
        policy: RecoveryPolicy,
        endpoint: Endpoint = GENERATE,
        payload: Any = None,
        log: TokenLog | None = None,
        patient: bool = False,
        unread: UnreadAnswers | None = None,
    ) -> None:
        self.state = ExecutionState.ADMITTED
        self.request = request
        self.ctx = ctx
        self.endpoint = endpoint
        #: What a worker is sent if it is not the request itself.
        self.payload = payload
        self.planner = planner
        self.plan = plan
        self.principal = principal
        self.log = log
        #: Workers that have failed on the request, and those that were lost on the wire: they are asked again if there
        #: is no other.
        self.failed: frozenset[int] = frozenset()
        self.unreached: frozenset[int] = frozenset()
        #: How often workers have failed before anything of the answer was there, and how often it has moved after that.
        self.retries = 0
        self.moves = 0
        self._permit: Permit | None = permit
        self._policy = policy
        self._output_tokens = 0
        #: The worker to blame for a failure if it is not the stream's own.
        self._failed_worker: int | None = None
        #: The stream of a prefill worker that ends when the request does.
        self._prior: ResponseStream | None = None
        self._recovery: asyncio.Task[None] | None = None
        #: What has to end before the stream is closed.
        self._closing: list[asyncio.Task[None]] = []
        observe = log.observe if log is not None else self._count if endpoint is GENERATE else None
        read = partial(ResponseStream, unread=unread, tenant=principal.tenant)
        self.stream = read(endpoint.merge, flush, owner=self, observe=observe, stall=timeouts.stall)
        #: The call whose stream is the client's, and the one before it if a prefill worker computes the prompt.
        self.answer = Hop(self.stream, patient=patient)
        self.prefill: Hop | None = None
        #: The deadlines of this and of all requests.
        self.timeouts = timeouts
        self._running = timeouts.first
        self._timeout = timeouts.first.set(self._first_due)

    # Transitions that the steps call.

    def start_routing(self) -> None:
        """Start to seek a worker for the first time."""
        self.state = ExecutionState.ROUTING

    def placement_done(self) -> None:
        """Record that the request has been placed. If its attempt has failed since, that is dealt with next."""
        self._recovery = None
        failure = self.answer.failure
        self.answer.note_failure(None)
        if self.state is ExecutionState.ENDED:
            return
        self.state = ExecutionState.STREAMING if self.stream.started else ExecutionState.ACCEPTED
        if failure is not None:
            final = self.attempt_failed(failure)
            if final is not None:
                self.fail(final)

    def enter_recovery(self, task: asyncio.Task[None], *, in_mid_answer: bool) -> None:
        """Let `task` seek another worker from now on."""
        self.state = ExecutionState.RECOVERING
        self._recovery = task
        if in_mid_answer:
            self.moves += 1
        else:
            self.retries += 1

    def fail(self, error: DynamoError) -> None:
        """End the request badly. A recovery that calls this is not cancelled by it."""
        self._recovery = None
        self.stream.fail(error)

    def stop(self) -> None:
        """Stop the request for its client while no worker has it."""
        self.stream.fail(Cancelled("the request was stopped while it had no worker"))

    # What the steps find out.

    def fail_attempt(self, error: DynamoError, failed_worker: int) -> None:
        """Fail the current attempt, since another worker that it builds on has failed."""
        self._failed_worker = failed_worker
        self.stream.fail_attempt(error)

    def blame(self, failed_worker: int) -> None:
        """Name the worker that the next failure is due to."""
        self._failed_worker = failed_worker

    def failed_after_acceptance(self, error: DynamoError) -> bool:
        """Return whether a worker took the request, and its failure, not a refusal, kept it from being placed."""
        if error is not self.answer.failure and retryable(error) and not self.stream.ended:
            self.answer.note_failure(error)
        return error is self.answer.failure

    def detach_worker(self, error: DynamoError, seen: TokenLog) -> int | None:
        """Leave the worker that has failed, after what was seen of the answer; return the worker to blame."""
        failed = self.failed_worker
        self._failed_worker = None
        self.stream.release_attempt(error)
        self.answer.leave(failed, seen)
        source = self.stream.detach_source()
        if source is not None:
            self._closing.append(self._policy.tasks.spawn(source.aclose(), name=f"leave-{self.ctx.id}"))
        if failed is not None:
            if lost_on_the_wire(error):
                self.unreached |= {failed}
            else:
                self.failed |= {failed}
        return failed

    def replan(self, excluded: Collection[int]) -> RoutePlan:
        """Plan anew, if possible with workers that are not excluded. Raise `Unavailable` if a role is missing."""
        self.plan = self.planner.plan(excluded)
        return self.plan

    def forget_asked(self) -> None:
        """Allow asking the same workers again: a round of moving has tries of its own."""
        self.answer.forget_asked()
        if self.prefill is not None:
            self.prefill.forget_asked()

    def start_prefill(self, stream: ResponseStream) -> Hop:
        """Open the hop to a prefill worker over `stream`, which ends when the request does."""
        if self.prefill is None:
            self.prefill = Hop(stream, "p")
        hop = self.prefill
        hop.reopen(stream, self.answer)
        self._prior = stream
        if self.stream.ended:
            stream.fail(self._why_ended())
        return hop

    def join(self, source: Source, prefill_worker: int) -> None:
        """Join the calls once a decode worker has accepted: `source` covers both, and ends them both."""
        self._prior = None
        self.stream.replace_source(source, prefill_worker)

    # What the steps ask.

    @property
    def failed_worker(self) -> int | None:
        """The worker to blame for the failure of the current attempt."""
        return self.stream.instance_id if self._failed_worker is None else self._failed_worker

    def hops(self) -> tuple[Hop | None, ...]:
        """Return for each group of the plan the calls at its workers; None where none was made."""
        return (self.answer,) if len(self.plan) == 1 else (self.prefill, self.answer)

    def publish_moved(
        self, events: RequestEventHub, failed_worker: int | None, tokens: int, error: DynamoError
    ) -> None:
        """Tell extensions that a worker which had accepted the request has failed, and that another is sought."""
        if events.active:
            model, now, reason = self.planner.card.name, time.monotonic(), truncated(error.message)
            events.publish(
                RequestMoved(self.ctx.root_id, now, self.ctx.id, model, failed_worker, tokens, error.kind, reason)
            )

    # What the stream reports; see `StreamOwner`.

    def first_item(self) -> None:
        if self.state is ExecutionState.ACCEPTED:
            self.state = ExecutionState.STREAMING

    def attempt_failed(self, error: DynamoError) -> DynamoError | None:
        if self.state is ExecutionState.ROUTING or self.state is ExecutionState.RECOVERING:
            # The step that places the request deals with it.
            self.answer.note_failure(self.answer.failure or error)
            return None
        return self._policy.recover(self, error)

    def stream_ended(self, error: DynamoError | None) -> None:
        self.state = ExecutionState.ENDED
        self._running.cancel(self._timeout)
        if error is None or isinstance(error, Cancelled):
            # A reader that is slow to take the rest, or does not, keeps nothing that others wait for.
            self._release_permit(whole=error is None)
        if error is not None:
            self._cancel_recovery()
        prior, self._prior = self._prior, None
        if prior is not None:
            prior.fail(self._why_ended())

    async def settle(self) -> None:
        self._cancel_recovery()
        if self._closing:
            await asyncio.wait(self._closing)

    def stream_closed(self) -> None:
        self._release_permit()

    def _release_permit(self, *, whole: bool = False) -> None:
        """Give the permit back; the reader still takes what waits of an answer that is `whole`. Safe twice."""
        permit, self._permit = self._permit, None
        if permit is None:
            return
        tokens = self._output_tokens if self.log is None else self.log.output_tokens
        if whole and self.endpoint is GENERATE:
            tokens += sum(len(item.token_ids) for item in self.stream.unread_items())
        permit.release(tokens)

    def _cancel_recovery(self) -> None:
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            recovery.cancel()
            self._closing.append(recovery)

    def _why_ended(self) -> DynamoError:
        return self.stream.error or Cancelled("the request has ended")

    def _count(self, batch: Sequence[LLMEngineOutput]) -> None:
        for item in batch:
            self._output_tokens += len(item.token_ids)

    # The deadlines: one timeout until the first item, one from then on.

    def _first_due(self) -> None:
        deadlines = self.timeouts.deadlines
        if not self.stream.begun and deadlines.first_item < deadlines.total:
            self.stream.fail(ResponseTimeout(f"no answer began within {deadlines.first_item} s"))
        elif deadlines.first_item < deadlines.total:
            self._running = self.timeouts.rest
            self._timeout = self._running.set(self._last_due)
        else:
            self._last_due()

    def _last_due(self) -> None:
        self.stream.fail(DeadlineExceeded(f"the answer took longer than {self.timeouts.deadlines.total} s"))
