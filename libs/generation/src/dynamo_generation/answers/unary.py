"""Whole answers: the engine stream, collected into one body."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from dynamo_generation.answers.answer_memory import STEP, AnswerHold
from dynamo_generation.answers.render import BodyRenderer, Collected

if TYPE_CHECKING:
    from dynamo_generation.answers.answer import Answer
    from dynamo_generation.answers.answer_memory import AnswerMemory
    from dynamo_generation.answers.engine_stream_slices import Source


class UnaryAnswer:
    """Collects an answer from a callback, while the handler's task sleeps until the end."""

    def __init__(self, answer: Answer, renderer: BodyRenderer, memory: AnswerMemory) -> None:
        self._answer = answer
        self._renderer = renderer
        self._memory = memory
        #: Bytes that have not been counted yet.
        self._uncounted = 0
        self._collected = {choice.index: Collected(choice) for choice in answer.choices}
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._patient: set[int] = set()

    async def collect(self) -> list[Collected]:
        """Return everything, by choice, once all choices have ended.

        Raises:
            DynamoError: the engine's error, or that the answer takes too much memory.
        """
        for source in self._answer.sources:
            source.on_ready(partial(self._ready, source))
        await self._over
        return list(self._collected.values())

    def _ready(self, source: Source) -> None:
        try:
            self._read(source)
        except Exception as error:
            # Nothing may escape into the stream that calls; the handler's task deals with it.
            self._fail(error)

    def _read(self, source: Source) -> None:
        answer = self._answer
        for piece in answer.read(source):
            self._uncounted += self._renderer.add(self._collected[piece.choice.index], piece)
        if self._uncounted >= STEP:
            self._count()
        if answer.failure is not None:
            self._fail(answer.failure)
        elif answer.done:
            if not self._over.done():
                self._over.set_result(None)
        elif source.patient and source.open and id(source) not in self._patient:
            self._patient.add(id(source))
            source.on_ready(partial(self._ready, source), coalesce=source.coalesce)

    def _count(self) -> None:
        if self._answer.holding is None:
            self._answer.holding = AnswerHold(self._memory)
        size, self._uncounted = self._uncounted, 0
        self._answer.holding.grow(size)

    def _fail(self, error: Exception) -> None:
        for source in self._answer.sources:
            source.on_ready(None)
        if not self._over.done():
            self._over.set_exception(error)
