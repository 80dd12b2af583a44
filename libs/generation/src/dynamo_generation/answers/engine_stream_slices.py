"""The source of an answer: one engine stream, read in slices that do not block the event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from dynamo_core import LLMEngineOutput

if TYPE_CHECKING:
    from dynamo_core import TokenStream

    from dynamo_generation.answers.loop_scheduler import LoopScheduler
    from dynamo_generation.choices.choice import Choice

OnReady: TypeAlias = Callable[..., None]

#: Items that may gather before they are read, once the first has been: reading many at once costs little more than one.
COALESCE = 128
#: Log-probabilities that are read at once: JSON of so many takes a fraction of a millisecond.
SCORES = 512
#: How many times that may wait to be read before the stream is asked to pause.
_AHEAD = 4


class Source:
    """One stream, and the choices that its items belong to, by the items' index."""

    __slots__ = ("choices", "on_ready", "patient", "pause", "resume", "stream", "take")

    #: Items that may gather if the answer is only looked at when it has ended.
    coalesce = COALESCE
    #: What was taken from the stream and is not read yet.
    waiting: Collection[LLMEngineOutput] = ()

    def __init__(self, stream: TokenStream, choices: Mapping[int, Choice]) -> None:
        self.stream = stream
        self.choices = choices
        #: Whether its items may be read late. The first never is: it is what the time to the first token is taken by.
        self.patient = False
        #: How the stream is read.
        self.on_ready: OnReady = stream.on_ready
        self.take: Callable[[], Sequence[LLMEngineOutput]] = stream.take
        #: What is done while the client does not keep up. Nothing: the stream gathers what comes, within bounds.
        self.pause: Callable[[], None] = _nothing
        self.resume: Callable[[], None] = _nothing

    @property
    def cut(self) -> bool:
        """Whether the frontend ended its choices, and the engine does not know."""
        # Plain loops, here and below: they are run for every piece, and a generator takes twice the time.
        for choice in self.choices.values():  # noqa: SIM110
            if choice.cut:
                return True
        return False

    @property
    def open(self) -> bool:
        """Whether one of its choices has not ended."""
        for choice in self.choices.values():  # noqa: SIM110
            if choice.finish_reason is None:
                return True
        return False

    def read_one(self) -> None:
        """Record that its first item has been read."""
        for choice in self.choices.values():
            if not choice.patient:
                self.patient = False
                return
        self.patient = True


class ScoredSource(Source):
    """A stream with log-probabilities for each token (`scores`), which cost more to show than to receive.

    A call of the reader gives it only a part of what waits, and the next call, in another turn of the loop, the next
    part.
    """

    __slots__ = (
        "_behind",
        "_callback",
        "_most",
        "_queued",
        "_reader_paused",
        "_scheduler",
        "_tokens",
        "coalesce",
        "waiting",
    )

    def __init__(
        self, stream: TokenStream, choices: Mapping[int, Choice], scheduler: LoopScheduler, scores: int
    ) -> None:
        super().__init__(stream, choices)
        self.coalesce = coalesced(scores)
        self.on_ready = self._on_ready
        self.take = self._take
        self.pause = self._pause
        self.resume = self._resume
        self._scheduler = scheduler
        #: Tokens that are read at once.
        self._most = max(1, SCORES // scores)
        self.waiting: deque[LLMEngineOutput] = deque()
        #: How many tokens wait.
        self._tokens = 0
        self._callback: Callable[[], None] | None = None
        self._queued = False
        self._behind = False
        self._reader_paused = False

    def _on_ready(self, callback: Callable[[], None] | None, *, coalesce: int = 1) -> None:
        self._callback = callback
        if callback is None:
            self.waiting.clear()
            self._tokens = 0
            self.stream.on_ready(None)
        else:
            self.stream.on_ready(self._arrived, coalesce=coalesce)

    def _take(self) -> Sequence[LLMEngineOutput]:
        arrived = self.stream.take()
        self.waiting.extend(arrived)
        self._tokens += sum(len(output.token_ids) for output in arrived)
        taken = self._first()
        if self.waiting and not self._queued:
            self._queued = True
            self._scheduler.resubmit(self._call)
        self._balance()
        return taken

    def _pause(self) -> None:
        self._reader_paused = True
        self.stream.pause()

    def _resume(self) -> None:
        self._reader_paused = False
        if not self._behind:
            self.stream.resume()

    def _arrived(self) -> None:
        if self._queued:
            self._balance()
        else:
            self._queued = True
            self._scheduler.submit(self._call)

    def _call(self) -> None:
        self._queued = False
        if self._callback is not None:
            self._callback()

    def _first(self) -> list[LLMEngineOutput]:
        """Take as many tokens as are read at once off the waiting ones."""
        waiting, left = self.waiting, self._most
        taken: list[LLMEngineOutput] = []
        while waiting and left > 0:
            output = waiting[0]
            count = len(output.token_ids)
            if count <= left or len(output.log_probs or ()) < count:
                # What has not a score for each token has none that are shown.
                taken.append(waiting.popleft())
            else:
                head, waiting[0] = _cut(output, left)
                taken.append(head)
            left -= max(count, 1)
        self._tokens -= sum(len(output.token_ids) for output in taken)
        return taken

    def _balance(self) -> None:
        """Ask the stream to pause while much waits here."""
        if self._behind:
            if not self.waiting:
                self._behind = False
                if not self._reader_paused:
                    self.stream.resume()
        elif self._tokens + self.stream.waiting > _AHEAD * self._most:
            self._behind = True
            self.stream.pause()


def _nothing() -> None:
    return None


def coalesced(scores: int) -> int:
    """Return items that may gather if each token has so many log-probabilities: fewer, as each is larger."""
    return max(1, COALESCE // max(scores, 1))


def _cut(output: LLMEngineOutput, at: int) -> tuple[LLMEngineOutput, LLMEngineOutput]:
    """Return an item as two, of which the second has what is told once."""
    scores, tops = output.log_probs or [], output.top_logprobs
    head = LLMEngineOutput(output.token_ids[:at], index=output.index, log_probs=scores[:at])
    head.top_logprobs = None if tops is None else tops[:at]
    tail: LLMEngineOutput = msgspec.structs.replace(
        output,
        token_ids=output.token_ids[at:],
        log_probs=scores[at:],
        top_logprobs=None if tops is None else tops[at:],
    )
    return head, tail
