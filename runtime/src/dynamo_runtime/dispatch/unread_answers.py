"""The buffered answers of slow clients, kept within bounds, so that no worker waits for a client.

The answer of a client that cannot keep up goes on at its worker, and is gathered here. One that has reached the bound
of an answer is paused. While it is not whole it keeps a place at its worker: if its client takes nothing for a while,
and it is paused or others wait for that worker, it is given up. When all together reach their bound, the largest answer
of the tenant that has most is given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dynamo_core.errors import Cancelled, DynamoError
from dynamo_telemetry.metrics import Metrics

from dynamo_runtime.dispatch.timeouts import FixedTimeouts

MB = 1024 * 1024
#: Bytes of an output, and of each of its tokens, log-probabilities and alternatives.
_OUTPUT, _TOKEN, _LOGPROB, _ALTERNATIVE = 512, 40, 32, 96
#: Looks at a reader in the time that it may take nothing, and how many in a row must find that others wait.
_LOOKS, _CONTENDED = 5, 2


def size_of(output: Any) -> int:
    """Return how many bytes an output takes, roughly."""
    scores = output.log_probs
    alternatives = output.top_logprobs
    return (
        _OUTPUT
        + _TOKEN * len(output.token_ids)
        + len(output.text or "")
        + (_LOGPROB * len(scores) if scores else 0)
        + (_ALTERNATIVE * sum(map(len, alternatives)) if alternatives else 0)
    )


class UnreadAnswers:
    """All that is gathered in this process. `most_each` and `most_all` are in bytes, `stall` in seconds."""

    def __init__(self, metrics: Metrics, prefix: str, *, most_each: int, most_all: int, stall: float) -> None:
        self.most_each = most_each
        self._most_all = most_all
        self._stall = stall
        #: The time between two looks at a reader.
        self.looks = FixedTimeouts(stall / _LOOKS)
        self._answers: dict[str, set[UnreadAnswer]] = {}
        self._held = 0
        self._level = metrics.gauge(
            f"{prefix}_unread_bytes", "Bytes of answers that clients have not read and their workers need not keep."
        ).labels()
        given_up = metrics.counter(
            f"{prefix}_unread_given_up_total",
            "Answers given up because their clients do not read: one kept its place for too long (place), or all "
            "together were too large (memory).",
            ("reason",),
        )
        self._given_up = {reason: given_up.labels(reason) for reason in ("place", "memory")}

    def kept_place_too_long(self) -> Cancelled:
        """Return why an answer that keeps its place is given up."""
        self._given_up["place"].inc()
        return Cancelled(f"the client took nothing for {self._stall:g} s of an answer that waits for it")

    def _grow(self, answer: UnreadAnswer, size: int) -> None:
        self._answers.setdefault(answer.tenant, set()).add(answer)
        self._add(answer, size)
        while self._held > self._most_all:
            tenants = self._answers.values()
            largest = max(max(tenants, key=lambda answers: sum(each.held for each in answers)), key=_held)
            self._given_up["memory"].inc()
            largest.release()
            largest.give_up(Cancelled("clients do not read, and this is the largest answer of those that wait"))

    def _add(self, answer: UnreadAnswer, size: int) -> None:
        answer.held += size
        self._held += size
        self._level.set(self._held)

    def _release(self, answer: UnreadAnswer) -> None:
        answers = self._answers.get(answer.tenant)
        if answers is not None:
            answers.discard(answer)
            if not answers:
                del self._answers[answer.tenant]
        self._add(answer, -answer.held)


class UnreadAnswer:
    """The buffered part of one answer, in batches. `give_up` ends the answer."""

    __slots__ = ("_batches", "_memory", "count", "give_up", "held", "tenant")

    def __init__(self, memory: UnreadAnswers, tenant: str, give_up: Callable[[Cancelled], None]) -> None:
        self._memory = memory
        self._batches: deque[tuple[Sequence[Any], int, int]] = deque()
        self.tenant = tenant
        self.give_up = give_up
        #: Bytes, and items before they were merged.
        self.held = 0
        self.count = 0

    @property
    def full(self) -> bool:
        """Whether it has reached the bound of an answer."""
        return self.held >= self._memory.most_each

    def add(self, batch: Sequence[Any], count: int) -> None:
        """Gather a batch that was merged from `count` items. May give up answers, also this one."""
        size = sum(map(size_of, batch))
        self._batches.append((batch, count, size))
        self.count += count
        self._memory._grow(self, size)

    def take(self) -> tuple[Sequence[Any], int]:
        """Return the first batch, and the number of items it was merged from."""
        batch, count, size = self._batches.popleft()
        self.count -= count
        self._memory._add(self, -size)
        if not self._batches:
            self.release()
        return batch, count

    def items(self) -> list[Any]:
        """Return all items."""
        return [item for batch, _, _ in self._batches for item in batch]

    def release(self) -> None:
        """Let go of everything. Safe twice."""
        self._batches.clear()
        self.count = 0
        self._memory._release(self)


class ReadStream(Protocol):
    """A stream as a timer sees it."""

    #: Whether the reader has looked for more since this was last set to False.
    taken: bool
    source_paused: bool

    @property
    def contended(self) -> bool:
        """Whether others wait for the worker that serves the stream."""

    def give_up(self, error: DynamoError) -> None:
        """End the stream, whose reader does not read."""


class ReaderTimer:
    """Watches the reader of one stream while something waits for it."""

    __slots__ = ("_contended", "_memory", "_number", "_quiet", "_stream")

    def __init__(self, memory: UnreadAnswers, stream: ReadStream) -> None:
        self._memory = memory
        self._stream = stream
        self._number: int | None = None
        self._quiet = 0
        self._contended = 0

    def start(self) -> None:
        """Begin to watch, unless it does so already."""
        if self._number is None:
            self._quiet = self._contended = 0
            self._stream.taken = False
            self._number = self._memory.looks.set(self._look)

    def stop(self) -> None:
        """Watch no more."""
        if self._number is not None:
            self._memory.looks.cancel(self._number)
            self._number = None

    def _look(self) -> None:
        stream = self._stream
        self._quiet = 0 if stream.taken else self._quiet + 1
        self._contended = self._contended + 1 if stream.contended else 0
        stream.taken = False
        if self._quiet >= _LOOKS and (stream.source_paused or self._contended >= _CONTENDED):
            self._number = None
            stream.give_up(self._memory.kept_place_too_long())
        else:
            self._number = self._memory.looks.set(self._look)


def _held(answer: UnreadAnswer) -> int:
    return answer.held
