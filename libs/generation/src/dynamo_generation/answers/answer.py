"""The answer to one client request: the engine streams behind it, and the events made from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dynamo_core import BackendError, DynamoError

from dynamo_generation.answers.annotations import Timing
from dynamo_generation.answers.engine_stream_slices import Source
from dynamo_generation.choices.choice import Piece

if TYPE_CHECKING:
    from dynamo_core import InflightRequest, LLMEngineOutput, TaskSet, TokenStream

    from dynamo_generation.answers.answer_memory import AnswerHold

log = logging.getLogger(__name__)

#: Seconds between the terminal of a stream and the flag that completes it.
_END_WAIT = 1.0


class Answer:
    """The streams of one client request. Owns them: `aclose` releases whatever they hold.

    `tasks` keeps what must run to its end although the request is over.
    """

    def __init__(self, sources: Sequence[Source], inflight: InflightRequest, timing: Timing, tasks: TaskSet) -> None:
        self.sources = sources
        self.timing = timing
        self.inflight = inflight
        self._tasks = tasks
        self._left = len(sources)
        self._tokens = 0
        self._first = True
        self._ended: set[int] = set()
        #: Why a stream ended badly; the whole answer has failed then.
        self.failure: DynamoError | None = None
        #: What it takes while it is collected, if that is worth telling.
        self.holding: AnswerHold | None = None
        self.choices = sorted(
            (choice for source in sources for choice in source.choices.values()), key=lambda choice: choice.index
        )

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return self._left == 0

    @property
    def finish_reason(self) -> str | None:
        """The reason of the first choice, which stands for all in the books."""
        return self.choices[0].finish_reason

    def read(self, source: Source, outputs: Sequence[LLMEngineOutput] | None = None) -> list[Piece]:
        """Return everything that waits in a stream. If it ended badly, `failure` is set; what came before is given too.

        `outputs` is what waited, if it has been taken already.
        """
        pieces: list[Piece] = []
        if id(source) in self._ended:
            return pieces
        before = self._tokens
        try:
            self._feed(source, source.take() if outputs is None else outputs, pieces)
        except DynamoError as error:
            self.failure = error
        if pieces:
            source.read_one()
            if self._first:
                self._first = False
                self.timing.first_output()
            self.inflight.output(self._tokens - before)
            if self.failure is None and pieces[-1].last and not source.open:
                self._end(source)
        return pieces

    def _feed(self, source: Source, outputs: Sequence[LLMEngineOutput], pieces: list[Piece]) -> None:
        stream = source.stream
        for output in outputs:
            choice = source.choices.get(output.index)
            if choice is None:
                raise BackendError.Unknown(f"the engine answered for choice {output.index}, which was not asked for")
            if choice.finish_reason is None:
                before = choice.completion_tokens
                text = choice.feed(output)
                self._tokens += choice.completion_tokens - before
                last = choice.finish_reason is not None
                ready, tokens = output.text_logprobs, choice.tokens
                pieces.append(Piece(choice, text, choice.scored, output.delta, last, choice.parsed, ready, tokens))
        if stream.ended and not stream.waiting and not source.waiting and source.open:
            if stream.error is not None:
                raise stream.error
            # Complete, but no reason was named.
            left = [choice for choice in source.choices.values() if choice.finish_reason is None]
            for choice in left:
                text = choice.end()
                pieces.append(Piece(choice, text, choice.scored, None, True, choice.parsed))

    def pause(self) -> None:
        """Pause: the client cannot keep up."""
        for source in self.sources:
            source.pause()

    def resume(self) -> None:
        """Resume: the client has caught up."""
        for source in self.sources:
            source.resume()

    async def aclose(self) -> None:
        """End all streams. Go on to the end although the caller is cancelled meanwhile."""
        for source in self.sources:
            source.on_ready(None)
        only = self.sources[0].stream
        # It may have moved since it was begun; the books name the last worker.
        self.inflight.routed(only.instance_id)
        if len(self.sources) == 1 and only.ended and only.error is None:
            # Nothing is left to stop, so nothing is lost if the caller is cancelled in here.
            await only.aclose()
            return
        await asyncio.shield(self._tasks.spawn(self._release(), name="close-answer"))

    async def _release(self) -> None:
        if self.done:
            await asyncio.gather(*(_let_end(source.stream) for source in self.sources if not source.cut))
        await close_all([source.stream for source in self.sources])

    def _end(self, source: Source) -> None:
        self._ended.add(id(source))
        self._left -= 1
        source.on_ready(None)
        if source.cut:
            # The engine need not go on while the client still reads.
            self._tasks.spawn(close_all([source.stream]), name="close-choice")


async def _let_end(stream: TokenStream) -> None:
    """Wait a moment for a stream whose terminal has come to be complete: closing it now would look like giving up."""
    if stream.ended:
        return
    ended = asyncio.Event()
    stream.on_ready(ended.set)
    try:
        async with asyncio.timeout(_END_WAIT):
            while not stream.ended:
                await ended.wait()
                ended.clear()
    except TimeoutError:
        log.debug("a stream was not complete in time after its terminal")
    finally:
        stream.on_ready(None)


async def close_all(streams: Sequence[TokenStream]) -> None:
    """Close streams, all at once: an engine that is slow to stop does not keep the others running."""
    for result in await asyncio.gather(*(stream.aclose() for stream in streams), return_exceptions=True):
        if isinstance(result, BaseException):
            log.error("a stream could not be closed", exc_info=result)
