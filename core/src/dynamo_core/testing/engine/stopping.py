"""Checks of streams that do not come to their own end: stopped by their client, or closed in the middle."""

from __future__ import annotations

import asyncio

from dynamo_core.contracts.engine import DisaggregationMode, LLMEngine
from dynamo_core.protocol.output import FinishReason
from dynamo_core.tasks import TaskSet
from dynamo_core.testing.engine.bench import Bench, Skipped
from dynamo_core.testing.engine.deadline import call, end, outcome, told, within
from dynamo_core.testing.engine.failures import (
    AbortFailed,
    CancellationIgnored,
    CancellationNotObserved,
    CloseFailed,
    ConformanceFailure,
    NoChunksYielded,
    RequestLeaked,
    StreamYieldedError,
)
from dynamo_core.testing.engine.streams import Reading, check_answer, check_parts, counted

#: So many streams at once, and an engine that says it can have no more must give every place back to pass.
MOST_CLOSED = 64
#: Streams that are closed in the middle if it can have more, or does not say.
CLOSED = 8


async def cancel_at_once(bench: Bench) -> str:
    """A request that is stopped before its first item ends with `cancelled`, in time."""
    engine, _ = await bench.running()
    client = _Client(bench, engine)
    client.reading.on_open = client.stop
    await client.read()
    return client.judge()


async def cancel_midway(bench: Bench) -> str:
    """A request that is stopped after its first item ends with `cancelled`, in time."""
    engine, _ = await bench.running()
    if bench.mode is DisaggregationMode.PREFILL:
        raise Skipped("after its one token a prefill engine has only its result to hand over")
    client = _Client(bench, engine)

    def stop() -> None:
        if client.reading.terminal is None:
            client.stop()

    client.reading.on_item = stop
    await client.read()
    if client.stopped_at is None:
        check_answer(client.reading, bench.mode)
        return "the stream ended with its first item, so there was nothing to stop"
    return client.judge()


async def close_midway(bench: Bench) -> str:
    """A stream can be closed after its first item, and requests are answered as before."""
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
            check_answer(reading, bench.mode)
        except ConformanceFailure as failure:
            if not closed:
                raise
            raise RequestLeaked(_leak(closed, failure)) from failure
    reading = Reading()
    await reading.read(engine, await bench.request(), bench.context(), patience)
    try:
        check_answer(reading, bench.mode)
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
    """A client that gives up on its request, and what the framework does then: `abort`, once."""

    def __init__(self, bench: Bench, engine: LLMEngine) -> None:
        self._bench = bench
        self._engine = engine
        self._ctx = bench.context()
        self._news = asyncio.Event()
        self._tasks = TaskSet()
        self._aborting: asyncio.Task[None] | None = None
        self._abort_error: Exception | None = None
        self._in_time = True
        self.reading = Reading()
        #: When it gave up, and how many seconds later the stream had ended, or was given up too.
        self.stopped_at: float | None = None
        self.after = 0.0

    def stop(self) -> None:
        """Gives up. Repeating it does nothing."""
        if self.stopped_at is not None:
            return
        self.stopped_at = asyncio.get_running_loop().time()
        self._ctx.stop_generating()
        self._news.set()
        # An engine that decodes is not told of a request before that has its first token.
        held_back = self._bench.mode is DisaggregationMode.DECODE and not self.reading.items
        if type(self._engine).abort is not LLMEngine.abort and not held_back:
            self._aborting = self._tasks.spawn(self._abort(), name="conformance abort")

    async def read(self) -> None:
        """Reads to the end of the stream, or of the time it has."""
        loop = asyncio.get_running_loop()
        plan = self._bench.plan
        request = await self._bench.long_request()
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
            self._in_time = reader.done() and self.after <= plan.cancel_timeout
            if self._aborting is not None:
                await self._aborting
        finally:
            for task in (reader, stopped, self._aborting):
                if task is not None:
                    await end(task)
            if reader.done() and not reader.cancelled():
                self.reading.error = self.reading.error or reader.result().error

    def judge(self) -> str:
        """What came of the stop.

        Raises:
            ConformanceFailure: not what the contract says.
        """
        reading = self.reading
        if not self._in_time:
            raise CancellationNotObserved(
                f"the stream went on for {self.after:.1f} s after the stop, with {counted(len(reading.items), 'item')}",
                after=self.after,
            )
        if reading.error is not None:
            raise StreamYieldedError(f"the stopped stream {told(reading.error)}") from reading.error
        check_parts(reading)
        if not reading.items:
            raise NoChunksYielded("the stopped stream ended without any item")
        reason = reading.items[-1].finish_reason
        if reason is not FinishReason.CANCELLED:
            how = "without a terminal item" if reason is None else f"with {str(reason)!r}"
            raise CancellationIgnored(f"the stopped stream ended {how} after {counted(len(reading.items), 'item')}")
        if self._abort_error is not None:
            raise AbortFailed(f"abort {told(self._abort_error)}") from self._abort_error
        aborted = ", abort called" if self._aborting is not None else ""
        return f"ended with 'cancelled' {self.after:.2f} s after the stop{aborted}"

    async def _abort(self) -> None:
        try:
            await within(call(self._engine.abort, self._ctx), self._bench.plan.request_timeout)
        except Exception as error:
            self._abort_error = error
