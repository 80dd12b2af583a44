"""What a request holds while it runs: streams, places on the load board, a permit, a deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_core.contracts.admission import Permit
from dynamo_core.contracts.call import GENERATE, Endpoint
from dynamo_core.dispatch.execution.alarms import Alarms
from dynamo_core.dispatch.execution.flush import FlushQueue
from dynamo_core.dispatch.execution.route_span import RouteSpan
from dynamo_core.dispatch.execution.stall import StallTimeout
from dynamo_core.dispatch.execution.stream import Adjust, Merge, ResponseStream
from dynamo_core.dispatch.execution.token_log import TokenLog
from dynamo_core.dispatch.load.board import Ticket
from dynamo_core.errors import Cancelled, DeadlineExceeded, DynamoError, ResponseTimeout
from dynamo_core.protocol.output import LLMEngineOutput


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


class RequestAlarms:
    """The deadlines of all requests of a pipeline."""

    __slots__ = ("deadlines", "first", "rest", "stall")

    def __init__(self, deadlines: Deadlines) -> None:
        first = min(deadlines.first_item, deadlines.total)
        self.deadlines = deadlines
        #: Until the first item.
        self.first = Alarms(first)
        #: From then on.
        self.rest = Alarms(deadlines.total - first)
        #: Without output of a worker; None: no such deadline.
        self.stall = None if deadlines.stall is None else StallTimeout(deadlines.stall)


class Leg:
    """A call that is tried at one worker after the other: its stream, and its place on the load board.

    The place is given back when the stream ends or is closed, whichever is first.
    """

    __slots__ = ("_span", "_ticket", "asked", "completed", "label", "moved_from", "patient", "stream", "workers")

    def __init__(
        self,
        merge: Merge | None,
        flush: FlushQueue,
        *,
        label: str = "",
        observers: Sequence[Callable[[Sequence[Any]], None]] = (),
        on_close: Callable[[], None] | None = None,
        stall: StallTimeout | None = None,
    ) -> None:
        self._ticket: Ticket | None = None
        self._span: RouteSpan | None = None
        #: The workers that were asked, except those that were full. The connector bounds their number.
        self.workers: set[int] = set()
        #: How many calls there have been in all.
        self.asked = 0
        #: The worker that had the call before, and how many tokens had come by then.
        self.moved_from: int | None = None
        self.completed = 0
        #: Whether a worker is waited for while all are busy, since the request has been let in as part of another.
        self.patient = False
        #: Tells the attempts of this leg from those of the request's other legs.
        self.label = label
        self.stream = ResponseStream(
            merge, flush, observers=observers, on_end=self._ended, on_close=on_close, stall=stall
        )

    @property
    def placed(self) -> bool:
        """Whether a worker has the call, or is being asked, and nobody has ended it."""
        return self._ticket is not None

    @property
    def over(self) -> DynamoError | None:
        """Why there is no use in asking another worker, if there is none."""
        return self.stream.error

    def enter(self, ticket: Ticket, span: RouteSpan | None = None) -> None:
        """A worker was chosen."""
        self._ticket, self._span = ticket, span
        if self.stream.ended:
            self.leave(self.stream.error)

    def leave(self, error: DynamoError | None = None) -> None:
        """The worker has finished the call, or has not taken it, or failed: `error` says why."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.leave()
        span, self._span = self._span, None
        if span is not None:
            span.end(error)

    def sink(self) -> Any:
        """The sink for the chosen worker."""
        on_first: Callable[[], None] | None = self._ticket.first_item if self._ticket is not None else None
        return self.stream.begin(on_first)

    def _ended(self) -> None:
        self.leave(self.stream.error)


class Attempts(Leg):
    """The leg whose stream is the client's. Holds the permit, and the one deadline that all legs share.

    `log` is kept where the request may move to another worker in mid-answer.
    """

    __slots__ = (
        "_alarm",
        "_alarms",
        "_before",
        "_output_tokens",
        "_permit",
        "_running",
        "adjust",
        "culprit",
        "log",
        "pending",
        "prefill_workers",
        "prefills",
        "stall",
    )

    def __init__(
        self,
        flush: FlushQueue,
        endpoint: Endpoint,
        permit: Permit,
        alarms: RequestAlarms,
        *,
        log: TokenLog | None = None,
    ) -> None:
        self._permit = permit
        self.log = log
        #: What becomes of the items of the current attempt.
        self.adjust: Adjust | None = None
        #: Why the attempt has failed that is just being placed, and the worker to blame if it is not the stream's.
        self.pending: DynamoError | None = None
        self.culprit: int | None = None
        #: The prefill workers that were asked, as `workers` has those that answer; and how many calls there have been.
        self.prefill_workers: set[int] = set()
        self.prefills = 0
        #: For the streams of all legs.
        self.stall = alarms.stall
        self._alarms = alarms
        self._before: Leg | None = None
        self._output_tokens = 0
        self._running = alarms.first
        self._alarm = alarms.first.set(self._first_due)
        observers: Sequence[Callable[[Sequence[Any]], None]] = ()
        if log is not None:
            observers = (log.observe,)
        elif endpoint is GENERATE:
            observers = (self._count,)
        super().__init__(endpoint.merge, flush, observers=observers, on_close=self._closed, stall=alarms.stall)

    def after(self, leg: Leg | None) -> None:
        """What this one comes after: it ends when the request does. None: it is ended by others from now on."""
        self._before = leg
        if leg is not None and self.stream.ended:
            leg.stream.fail(self.stream.error or Cancelled("the request has ended"))

    @property
    def over(self) -> DynamoError | None:
        return self.stream.error or self.pending

    def sink(self) -> Any:
        on_first: Callable[[], None] | None = self._ticket.first_item if self._ticket is not None else None
        return self.stream.begin(on_first, self.adjust)

    def lose(self, error: DynamoError, culprit: int) -> None:
        """The current attempt is of no use any more: worker `culprit` has failed, which is not the stream's own."""
        self.culprit = culprit
        self.stream.lose(error)

    def _ended(self) -> None:
        self._running.cancel(self._alarm)
        self.leave(self.stream.error)
        before, self._before = self._before, None
        if before is not None:
            before.stream.fail(self.stream.error or Cancelled("the request has ended"))

    def _closed(self) -> None:
        self._permit.release(self._output_tokens if self.log is None else self.log.output_tokens)

    def _count(self, batch: Sequence[LLMEngineOutput]) -> None:
        for item in batch:
            self._output_tokens += len(item.token_ids)

    def _first_due(self) -> None:
        deadlines = self._alarms.deadlines
        if not self.stream.begun and deadlines.first_item < deadlines.total:
            self.stream.fail(ResponseTimeout(f"no answer began within {deadlines.first_item} s"))
        elif deadlines.first_item < deadlines.total:
            self._running = self._alarms.rest
            self._alarm = self._running.set(self._last_due)
        else:
            self._last_due()

    def _last_due(self) -> None:
        self.stream.fail(DeadlineExceeded(f"the answer took longer than {self._alarms.deadlines.total} s"))
