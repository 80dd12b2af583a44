"""Streamed answers: wait for the first output, then write from a callback while the handler's task sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from dynamo_generation.answers.answer import Answer
from dynamo_generation.answers.engine_stream_slices import Source
from dynamo_generation.answers.plain_path import PlainPath
from dynamo_generation.answers.render import DONE, ChunkRenderer
from dynamo_generation.answers.sse import PROBE_AFTER, EventStream
from dynamo_generation.choices.choice import Choice

if TYPE_CHECKING:
    from dynamo_core import LLMEngineOutput


class StreamingAnswer:
    """Brings one answer to one client as events.

    Until the first output is there nothing is sent, so that an error before it is a plain HTTP error; silence of
    `keep_alive` seconds ends that wait, and from then on is broken by what the framing of `out` has for it.
    `leading_events` goes before the first chunk; `closing` makes what goes before the last finish chunk, `usage` the
    usage if a chunk of it is wanted; `done` ends it all, and `finalize` makes what comes even after that, once what it
    waits for is done. `check` looks at what was answered before the end is written.
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
        check: Callable[[], Awaitable[None]] | None = None,
        done: bytes = DONE,
        finalize: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        self._answer = answer
        self._renderer = renderer
        self._out = out
        self._keep_alive = keep_alive
        self._opening = opening
        self._closing = closing
        self._check = check
        #: The choices whose end is written when there is no other left.
        self._ended: list[Choice] = []
        self._usage = usage
        self._done = done
        self._finalize = finalize
        self._opened: set[int] = set()
        #: Where nearly every item goes, once the answer has begun.
        self._plain: PlainPath | None = None
        #: Whether the callback may write: the headers are out and the client keeps up.
        self._live = False
        self._stalled = False
        self._silent = False
        #: Streams in which something arrived while the callback might not write.
        self._waiting: dict[int, Source] = {}
        self._failure: Exception | None = None
        self._tail = b""
        self._bell = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> web.StreamResponse:
        """Return the response when the client was given everything.

        Raises:
            DynamoError: the engine's error; `EventStream.response` tells whether something was sent before it.
            ClientGone: the client left, or does not read.
        """
        self._timer = self._loop.call_later(self._keep_alive, self._tick)
        self._out.set_probe(self._probe)
        try:
            for source in self._answer.sources:
                source.on_ready(partial(self._ready, source))
            await self._commit()
            while not self._answer.done:
                await self._go_on()
            if self._failure is not None:
                raise self._failure
        finally:
            self._live = False
            self._timer.cancel()
            self._out.set_probe(None)
        tail = self._tail
        if self._check is not None:
            await self._check()
            tail += self._ending()
        if self._finalize is not None:
            if tail:
                # The client has all of the answer while it waits for the end.
                self._out.push(tail)
            tail = await self._finalize()
        return await self._out.end(tail)

    async def _commit(self) -> None:
        """Wait for the first output, or for too long, and send it with the headers."""
        first = b""
        while not first:
            await self._woken()
            first = b"".join([self._render(source) for source in self._take_waiting()])
            if self._answer.failure is not None:
                raise self._answer.failure
            if not first and self._silent:
                first = self._out.framing.keep_alive
        if self._answer.done and self._finalize is None:
            self._tail, first = first, b""
        await self._out.open(first)
        self._open_gate()

    async def _go_on(self) -> None:
        """Sleep until the callback needs something that it cannot do itself."""
        await self._woken()
        if self._failure is not None:
            raise self._failure
        if self._stalled:
            await self._out.drained()
            self._stalled = False
            self._answer.resume()
            self._open_gate()

    async def _woken(self) -> None:
        await self._bell.wait()
        self._bell.clear()

    def _open_gate(self) -> None:
        """Let the callback write from now on, and write what arrived before."""
        self._live = True
        for source in self._take_waiting():
            self._ready(source)

    def _take_waiting(self) -> list[Source]:
        sources = list(self._waiting.values())
        self._waiting.clear()
        return sources

    def _ready(self, source: Source) -> None:
        """Note that something arrived in a stream. Called by the stream, once per turn of the loop."""
        if not self._live:
            self._waiting[id(source)] = source
            if not self._stalled:
                self._bell.set()
            return
        try:
            plain = self._plain
            if plain is None or source.stream.ended:
                self._write(self._render(source))
                return
            outputs = source.stream.take()
            chunk = plain.chunk(outputs)
            if chunk is None:
                self._write(self._render(source, outputs))
            elif chunk and self._out.push(chunk):
                self._stall()
        except Exception as error:
            # Nothing may escape into the stream that calls; the handler's task deals with it.
            self._fail(error)

    def _write(self, data: bytes) -> None:
        answer = self._answer
        if answer.done:
            self._live = False
            self._tail = data
            self._bell.set()
            return
        if data and self._out.push(data) and not self._stalled:
            self._stall()
        if answer.failure is not None:
            self._fail(answer.failure)

    def _stall(self) -> None:
        """Make the handler's task wait for a client that does not keep up."""
        self._live = False
        self._stalled = True
        self._answer.pause()
        self._bell.set()

    def _fail(self, error: Exception) -> None:
        self._live = False
        self._failure = error
        self._bell.set()

    def _render(self, source: Source, outputs: Sequence[LLMEngineOutput] | None = None) -> bytes:
        """Return the bytes of everything that waits in a stream; `outputs` is that, if it has been taken already."""
        answer, renderer = self._answer, self._renderer
        parts: list[bytes] = []
        for piece in answer.read(source, outputs):
            choice = piece.choice
            if choice.index not in self._opened:
                self._opened.add(choice.index)
                parts.append(renderer.leading_events(choice))
                self._plain = PlainPath.of(answer.choices, renderer, answer.inflight)
            parts.append(renderer.piece(piece))
            if piece.last and answer.done:
                self._ended.append(choice)
            elif piece.last:
                parts.append(renderer.finish(choice))
        if answer.done and self._check is None:
            parts.append(self._ending())
        if parts and self._opening:
            parts.insert(0, self._opening)
            self._opening = b""
        return b"".join(parts)

    def _ending(self) -> bytes:
        """Return what comes when every choice has ended."""
        parts = [self._closing(), *map(self._renderer.finish, self._ended)]
        if self._usage is not None:
            parts.append(self._renderer.usage(self._usage()))
        return b"".join([*parts, self._done])

    def _probe(self) -> None:
        """Write to a client that may be gone, to find out."""
        if self._live:
            self._comment(PROBE_AFTER)

    def _tick(self) -> None:
        """Act on a silence that has lasted, or was broken since the timer was set."""
        wait = self._keep_alive
        if self._out.response is None:
            self._silent = True
            self._bell.set()
        elif self._live:
            wait = self._comment(wait)
        self._timer = self._loop.call_later(wait, self._tick)

    def _comment(self, after: float) -> float:
        """Write a comment line if silence has lasted so many seconds; return the seconds until the next one is due."""
        silence = self._loop.time() - self._out.last_write
        if silence < after:
            return after - silence
        try:
            self._write(self._out.framing.keep_alive)
        except Exception as error:
            self._fail(error)
        return after
