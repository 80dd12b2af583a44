"""Handlers and waits shared by tests of transports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.transports.call import Endpoint, ServedContext
from dynamo_core.contracts.transports.transport import Served, Transport
from dynamo_core.protocol.output import LLMEngineOutput, merge_outputs
from dynamo_core.protocol.records import Instance

from dynamo_testing.transport.harness import Recorder

#: Seconds that anything may take before a test fails.
WAIT = 10.0

TOKENS = Endpoint("tokens", int, LLMEngineOutput, merge_outputs)
ECHO = Endpoint("echo", bytes, bytes)


class SteppedEngine:
    """A handler for `TOKENS` that emits one token per `step`, and remembers its calls."""

    def __init__(self) -> None:
        self.contexts: list[ServedContext] = []
        #: One event per call, set when its generator has ended.
        self.left: list[asyncio.Event] = []
        self._step = asyncio.Event()
        self._done = False
        self._waiting = 0
        self._news = asyncio.Event()

    async def all_wait(self) -> None:
        """Return when every stream has emitted and waits for the next step."""
        async with asyncio.timeout(WAIT):
            while self._waiting < len(self.left):
                self._news.clear()
                await self._news.wait()

    def step(self, *, last: bool = False) -> None:
        """Emit one token in every stream, in one turn of the loop."""
        self._done = last
        self._waiting = 0
        step, self._step = self._step, asyncio.Event()
        step.set()

    async def __call__(self, first: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
        self.contexts.append(ctx)
        self.left.append(left := asyncio.Event())
        return self._items(first, ctx, left)

    async def _items(
        self, token: int, ctx: ServedContext, left: asyncio.Event
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        ctx.on_stop(lambda: self.step())
        try:
            while not self._done and not ctx.is_stopped():
                step = self._step
                yield LLMEngineOutput([token])
                token += 1
                self._waiting += 1
                self._news.set()
                await step.wait()
        finally:
            left.set()


async def echo(request: bytes, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
    """Handle `ECHO`: the request between two words."""

    async def items() -> AsyncGenerator[bytes, None]:
        yield b"first"
        yield request
        yield b"last"

    return items()


async def deaf(request: bytes, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
    """Handle `ECHO` without an item or an end, and do not look whether it is to stop."""

    async def items() -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b""

    return items()


def counted(pause: float = 0) -> Callable[[int, ServedContext], object]:
    """Return a handler for `TOKENS` that counts up to the request, with so many seconds between two tokens."""

    async def count(limit: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
        async def items() -> AsyncGenerator[LLMEngineOutput, None]:
            for number in range(limit):
                yield LLMEngineOutput([number])
                await asyncio.sleep(pause)

        return items()

    return count


def at(served: Served, instance_id: int = 7) -> Instance:
    """Return the record of a worker that serves something."""
    return Instance(instance_id=instance_id, address=served.address)


async def greet(server: Transport, client: Transport) -> bytes:
    """Return what the client gets back for a greeting that it sends to the server."""
    sink = Recorder(WAIT)
    await client.call(at(await server.serve(7, ECHO, echo)), ECHO, b"hello", EngineContext("greeting"), sink)
    assert await sink.end() is None
    greeting: bytes = sink.items[1]
    return greeting


async def open_streams(
    server: Transport, client: Transport, count: int, first: int = 0
) -> tuple[SteppedEngine, list[Recorder]]:
    """Return an engine and the sinks of its calls, each of which has got its first token."""
    engine, sinks = SteppedEngine(), [Recorder() for _ in range(count)]
    instance = at(await server.serve(7, TOKENS, engine))
    for sink in sinks:
        await client.call(instance, TOKENS, first, EngineContext("r"), sink)
        await sink.begun()
    return engine, sinks


async def close_calls_that_do_not_end(server: Transport, client: Transport) -> None:
    """Close three calls of a deaf handler."""
    instance = at(await server.serve(7, ECHO, deaf))
    sources = [await client.call(instance, ECHO, b"", EngineContext(str(n)), Recorder(WAIT)) for n in range(3)]
    async with asyncio.timeout(WAIT):
        for source in sources:
            await source.aclose()


async def happens(event: asyncio.Event) -> None:
    """Return once the event is set."""
    async with asyncio.timeout(WAIT):
        await event.wait()


async def until(condition: Callable[[], object]) -> None:
    """Return once a condition holds that no event announces."""
    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)
