"""Checks of streams that are stopped by their client or closed in the middle."""

from __future__ import annotations

import asyncio
from typing import Any

from dynamo_core.contracts.engine import DisaggregationMode, LLMEngine
from dynamo_core.contracts.engine_boundary import call_async, check_stream
from dynamo_core.contracts.requests.context import EngineContext, GenerateContext
from dynamo_core.protocol.output import FinishReason
from dynamo_core.protocol.request import PreprocessedRequest
from dynamo_core.tasks import TaskSet

from dynamo_testing.engine.bench import Bench, Skipped
from dynamo_testing.engine.bounded_calls import LAST_WORDS, end, outcome, told, within
from dynamo_testing.engine.failures import (
    AbortFailed,
    CancellationIgnored,
    CancellationNotObserved,
    CloseFailed,
    ConformanceFailure,
    NoChunksYielded,
    QueuedStopIgnored,
    RequestLeaked,
    StreamYieldedError,
)
from dynamo_testing.engine.streams import Reading, check_parts, counted

#: So many streams at once, and an engine that says it can have no more must give every place back to pass.
MOST_CLOSED = 64
#: Streams that are closed in the middle if it can have more, or does not say.
CLOSED = 8
#: The limit of the request that is stopped after its last token.
FEW_TOKENS = 2
#: Seconds for an engine to give a request a place, or to let it wait for one.
QUEUED = 0.2


async def cancel_at_once(bench: Bench) -> str:
    """Check that a request that is stopped before its first item ends with `cancelled`, in time."""
    engine, _ = await bench.running()
    client = _Client(bench, engine)
    client.reading.on_open = client.stop
    await client.read()
    return client.judge()


async def cancel_midway(bench: Bench) -> str:
    """Check that a request that is stopped after its first item ends with `cancelled`, in time."""
    engine, _ = await bench.running()
    if bench.mode is DisaggregationMode.PREFILL:
        raise Skipped("after its one token a prefill engine has only its result to hand over")
    client = _Client(bench, engine)

    client.reading.on_item = client.stop_unless_ended
    await client.read()
    return client.judge("the stream ended with its first item")


async def cancel_at_end(bench: Bench) -> str:
    """Check that a request that is stopped between its last token and its terminal ends with `cancelled`."""
    engine, _ = await bench.running()
    if bench.mode is DisaggregationMode.PREFILL:
        raise Skipped("after its one token a prefill engine has only its result to hand over")
    if bench.text:
        raise Skipped("only the engine knows which text is the last")
    client = _Client(bench, engine, await bench.request(max_tokens=FEW_TOKENS, ignore_eos=True))

    def stop() -> None:
        if client.reading.tokens >= FEW_TOKENS:
            client.stop_unless_ended()

    client.reading.on_item = stop
    await client.read()
    return client.judge("the last token came with the terminal")


async def cancel_queued(bench: Bench) -> str:
    """Check that a request that is stopped while it waits for a place ends with `cancelled`, in time."""
    engine, config = await bench.running()
    places = config.max_num_seqs
    holders = [
        _Holder(engine, await bench.long_request(), bench.context())
        for _ in range(places if places is not None and places <= MOST_CLOSED else CLOSED)
    ]
    tasks = TaskSet()
    running = [tasks.spawn(outcome(holder.run()), name="conformance holder") for holder in holders]
    client = _Client(bench, engine, await bench.long_request())

    def later() -> None:
        asyncio.get_running_loop().call_later(QUEUED, client.stop_unless_ended)

    client.reading.on_open = later
    client.reading.on_item = client.stop_unless_ended
    try:
        await _settled(holders, running, bench.plan.request_timeout)
        await client.read()
    finally:
        for holder in holders:
            holder.release.set()
        await asyncio.wait(running, timeout=LAST_WORDS)
        for task in running:
            await end(task)
    if client.stopped_at is not None and not client.in_time and not client.reading.items:
        raise QueuedStopIgnored(
            f"beside {counted(len(holders), 'open stream')} a request waited for its first item, "
            f"and went on to wait for {client.after:.1f} s after the stop{client.reading.place}"
        )
    return client.judge("it was answered at once")


async def _settled(holders: list[_Holder], running: list[asyncio.Task[Any]], patience: float) -> None:
    """Return when all have their first item, or none has come for a while: the others wait for a place."""
    loop = asyncio.get_running_loop()
    until = loop.time() + patience
    had = -1
    while loop.time() < until:
        has = sum(holder.first.is_set() or task.done() for holder, task in zip(holders, running, strict=True))
        if has in (had, len(holders)):
            return
        had = has
        await asyncio.sleep(QUEUED)


class _Holder:
    """A stream that is not read on after its first item, so that it keeps its place."""

    def __init__(self, engine: LLMEngine, request: PreprocessedRequest, ctx: EngineContext) -> None:
        self._engine = engine
        self._request = request
        self._ctx = ctx
        self.first = asyncio.Event()
        self.release = asyncio.Event()

    async def run(self) -> None:
        """Hold the place until it is released, or the stream fails: other checks find that."""
        items: Any = self._engine.generate(self._request, GenerateContext(self._ctx))
        check_stream(self._engine, items)
        try:
            async for _ in items:
                self.first.set()
                await self.release.wait()
                # Not closed, which another check is about: stopped, and read to its end.
                self._ctx.stop_generating()
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                async with asyncio.timeout(LAST_WORDS):
                    await close()


async def close_midway(bench: Bench) -> str:
    """Check that a stream can be closed after its first item, and requests are answered as before."""
    engine, config = await bench.running()
    places = config.max_num_seqs
    times = (places if places is not None and places <= MOST_CLOSED else CLOSED) + 1
    patience = bench.plan.request_timeout
    for closed in range(times):
        reading = Reading(most=1)
        await reading.read(engine, await bench.long_request(), bench.context(), patience)
        if reading.items:
            _check_closing(reading)
            continue
        # Only the first can blame nothing but itself.
        try:
            bench.check(reading)
        except ConformanceFailure as failure:
            if not closed:
                raise
            raise RequestLeaked(_leak(closed, failure)) from failure
    reading = Reading()
    await reading.read(engine, await bench.request(), bench.context(), patience)
    try:
        bench.check(reading)
    except ConformanceFailure as failure:
        raise RequestLeaked(_leak(times, failure)) from failure
    return f"{counted(times, 'stream')} closed, and one answered after them"


def _check_closing(reading: Reading) -> None:
    if not reading.closable:
        raise CloseFailed("what generate returns has no aclose")
    if reading.overdue is not None:
        where = "the stream was not closed" if reading.closing else "the first item did not come"
        raise CloseFailed(f"{where} within {reading.overdue:g} s")
    if reading.close_error is not None:
        raise CloseFailed(f"closing the stream {told(reading.close_error)}") from reading.close_error
    check_parts(reading)


def _leak(closed: int, failure: ConformanceFailure) -> str:
    return f"after {counted(closed, 'stream')} closed in the middle, the next request: {failure.name}: {failure.seen}"


class _Client:
    """A client that gives up on its request, and the framework's single `abort` after it."""

    def __init__(self, bench: Bench, engine: LLMEngine, request: PreprocessedRequest | None = None) -> None:
        """`request` is a long one if None."""
        self._request = request
        self._bench = bench
        self._engine = engine
        self._ctx = bench.context()
        self._news = asyncio.Event()
        self._tasks = TaskSet()
        self._aborting: asyncio.Task[None] | None = None
        self._abort_error: Exception | None = None
        self.in_time = True
        self.reading = Reading()
        #: When it gave up, and how many seconds later the stream had ended, or was given up too.
        self.stopped_at: float | None = None
        self.after = 0.0

    def stop(self) -> None:
        """Give up. Repeating it does nothing."""
        if self.stopped_at is not None:
            return
        self.stopped_at = asyncio.get_running_loop().time()
        self._ctx.stop_generating()
        self._news.set()
        # An engine that decodes is not told of a request before that has its first token.
        held_back = self._bench.mode is DisaggregationMode.DECODE and not self.reading.items
        if type(self._engine).abort is not LLMEngine.abort and not held_back:
            self._aborting = self._tasks.spawn(self._abort(), name="conformance abort")

    def stop_unless_ended(self) -> None:
        """Give up, if the terminal has not come."""
        if self.reading.terminal is None and self.reading.ended_at is None:
            self.stop()

    async def read(self) -> None:
        """Read to the end of the stream, or of the time it has."""
        loop = asyncio.get_running_loop()
        plan = self._bench.plan
        request = self._request or await self._bench.long_request()
        reading = self.reading.run(self._engine, request, self._ctx)
        reader = self._tasks.spawn(outcome(reading), name="conformance reader")
        stopped = self._tasks.spawn(self._news.wait(), name="conformance stop")
        try:
            await asyncio.wait({reader, stopped}, timeout=plan.request_timeout, return_when=asyncio.FIRST_COMPLETED)
            if self.stopped_at is None:
                if not reader.done():
                    self.reading.overdue = plan.request_timeout
                return
            await asyncio.wait({reader}, timeout=max(0.0, self.stopped_at + plan.cancel_timeout - loop.time()))
            self.after = (self.reading.ended_at or loop.time()) - self.stopped_at
            if not reader.done():
                self.reading.look()
            self.in_time = reader.done() and self.after <= plan.cancel_timeout
            if self._aborting is not None:
                await self._aborting
        finally:
            for task in (reader, stopped, self._aborting):
                if task is not None:
                    await end(task)
            if reader.done() and not reader.cancelled():
                self.reading.error = self.reading.error or reader.result().error

    def judge(self, before_the_stop: str = "") -> str:
        """Return the outcome of the stop; `before_the_stop` says how a stream can end before it.

        Raises:
            ConformanceFailure: not what the contract says.
        """
        reading = self.reading
        if self.stopped_at is None and before_the_stop:
            self._bench.check(reading)
            return f"{before_the_stop}, so there was nothing to stop"
        if not self.in_time:
            raise CancellationNotObserved(
                f"the stream went on for {self.after:.1f} s after the stop, with "
                f"{counted(len(reading.items), 'item')}{reading.place}",
                after=self.after,
            )
        if reading.error is not None:
            raise StreamYieldedError(f"the stopped stream {told(reading.error)}") from reading.error
        check_parts(reading)
        if not reading.items:
            raise NoChunksYielded(f"the stopped stream ended without any item{reading.method}")
        reason = reading.items[-1].finish_reason
        if reason is not FinishReason.CANCELLED:
            how = "without a terminal item" if reason is None else f"with {str(reason)!r}"
            raise CancellationIgnored(
                f"the stopped stream ended {how} after {counted(len(reading.items), 'item')}{reading.place}"
            )
        if self._abort_error is not None:
            raise AbortFailed(f"abort {told(self._abort_error)}") from self._abort_error
        aborted = ", abort called" if self._aborting is not None else ""
        return f"ended with 'cancelled' {self.after:.2f} s after the stop{aborted}"

    async def _abort(self) -> None:
        try:
            await within(call_async(self._engine, "abort", self._ctx), self._bench.plan.request_timeout)
        except Exception as error:
            self._abort_error = error
