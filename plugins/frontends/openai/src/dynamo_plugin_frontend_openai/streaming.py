"""Answering with events: waits for the first output, then writes from a callback while the handler's task sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dynamo_plugin_frontend_openai.answer import Answer, Source
from dynamo_plugin_frontend_openai.choices import Choice
from dynamo_plugin_frontend_openai.render import DONE, ChunkRenderer
from dynamo_plugin_frontend_openai.sse import KEEP_ALIVE, EventStream


class StreamingAnswer:
    """Brings one answer to one client as events.

    Until the first output is there nothing is sent, so that an error before it is a plain HTTP error; silence of
    `keep_alive` seconds ends that wait, and from then on is broken by comment lines. `opening` goes before the first
    chunk; `closing` makes what goes before the last finish chunk, `usage` the usage if a chunk of it is wanted.
    """

    def __init__(
        self,
        answer: Answer,
        renderer: ChunkRenderer,
        out: EventStream,
        *,
        keep_alive: float,
        opening: bytes,
        closing: Callable[[], bytes],
        usage: Callable[[], dict[str, Any]] | None,
    ) -> None:
        self._answer = answer
        self._renderer = renderer
        self._out = out
        self._keep_alive = keep_alive
        self._opening = opening
        self._closing = closing
        self._usage = usage
        self._opened: set[int] = set()
        #: Streams with something in them that the callback may not write yet.
        self._waiting: dict[int, Source] = {}
        self._live = False
        self._silent = False
        self._failure: Exception | None = None
        self._tail = b""
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Returns when the client was given everything.

        Raises:
            DynamoError: the engine's error; whether something was sent already can be seen at `EventStream.response`.
            ClientGone: the client left, or does not read.
        """
        self._timer = self._loop.call_later(self._keep_alive, self._tick)
        try:
            for source in self._answer.sources:
                source.stream.on_ready(partial(self._ready, source))
            await self._commit()
            while not self._answer.done:
                await self._write_on()
        finally:
            self._timer.cancel()
        await self._out.end(self._tail)

    async def _commit(self) -> None:
        """Waits for the first output and sends it with the headers."""
        first = b""
        while not first:
            await self._woken()
            first = self._read_waiting()
            if self._silent and not first:
                first = KEEP_ALIVE
        if self._answer.done:
            # All of it at once.
            await self._out.open(self._opening + first[: -len(self._tail)] if first is self._tail else b"")
            return
        await self._out.open(self._opening + first)

    async def _write_on(self) -> None:
        """Lets the callback write, until the answer is done or the client cannot keep up."""
        raise NotImplementedError

    def _ready(self, source: Source) -> None:
        raise NotImplementedError
