"""All that one client request gets from engines: its streams, and what they become."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dynamo_core.errors import StreamIncomplete
from dynamo_core.protocol.output import LLMEngineOutput

from dynamo_plugin_frontend_openai.annotations import Timing
from dynamo_plugin_frontend_openai.choices import Choice

if TYPE_CHECKING:
    from dynamo_core.contracts.frontend import InflightRequest, TokenStream
    from dynamo_core.tasks import TaskSet

log = logging.getLogger(__name__)


class Source:
    """One stream, and the choices that its items belong to, by the items' index."""

    __slots__ = ("choices", "stream")

    def __init__(self, stream: TokenStream, choices: Mapping[int, Choice]) -> None:
        self.stream = stream
        self.choices = choices

    @property
    def open(self) -> bool:
        """Whether one of its choices has not ended."""
        return any(choice.finish_reason is None for choice in self.choices.values())


#: A choice, the text it got, and the item the text came from; None for the text that was held back to the end.
Piece = tuple[Choice, str, LLMEngineOutput | None]


class Answer:
    """The streams of one client request. Owns them: `aclose` releases whatever they hold.

    `tasks` keeps what must run to its end although the request is over.
    """

    def __init__(self, sources: Sequence[Source], inflight: InflightRequest, timing: Timing, tasks: TaskSet) -> None:
        self.sources = sources
        self.timing = timing
        self._inflight = inflight
        self._tasks = tasks
        self._left = len(sources)
        self._closed: set[int] = set()
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

    def read(self, source: Source) -> list[Piece]:
        """Everything that waits in a stream.

        Raises:
            DynamoError: the stream ended badly; what came before is lost to the caller, who cannot use it any more.
        """
        if id(source) in self._closed:
            return []
        stream = source.stream
        choices = source.choices
        pieces: list[Piece] = []
        tokens = 0
        finished = False
        for output in stream.take():
            choice = choices.get(output.index)
            if choice is None:
                raise StreamIncomplete(f"the engine answered for choice {output.index}, which nobody asked for")
            if choice.finish_reason is not None:
                continue
            before = choice.completion_tokens
            pieces.append((choice, choice.feed(output), output))
            tokens += choice.completion_tokens - before
            if choice.finish_reason is not None:
                finished = True
        if stream.ended and not finished and source.open:
            if stream.error is not None:
                raise stream.error
            for choice in choices.values():
                if choice.finish_reason is None:
                    pieces.append((choice, choice.end(), None))
            finished = True
        if pieces:
            self.timing.first_output()
            self._inflight.output(tokens)
        if finished and not source.open:
            self._finish(source)
        return pieces

    def pause(self) -> None:
        """The client cannot keep up."""
        for source in self.sources:
            source.stream.pause()

    def resume(self) -> None:
        """The client has caught up."""
        for source in self.sources:
            source.stream.resume()

    async def aclose(self) -> None:
        """Ends all streams. Goes on to the end although the caller is cancelled meanwhile."""
        for source in self.sources:
            source.stream.on_ready(None)
        await asyncio.shield(self._tasks.spawn(_close_all(self.sources), name="close-answer"))

    def _finish(self, source: Source) -> None:
        self._closed.add(id(source))
        self._left -= 1
        source.stream.on_ready(None)
        if self._left and not source.stream.ended:
            # A stop string was found: others of this answer go on, this engine need not.
            self._tasks.spawn(_close_all([source]), name="close-choice")


async def _close_all(sources: Sequence[Source]) -> None:
    for source in sources:
        try:
            await source.stream.aclose()
        except Exception:
            log.exception("a stream could not be closed")
