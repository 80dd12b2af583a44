from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from dynamo_core.contracts.transports import serving
from dynamo_core.contracts.transports.call import Handler, ServedContext
from dynamo_core.contracts.transports.serving import ServedCall
from dynamo_core.errors import BackendError, Cancelled, Disconnected, DynamoError, Unknown, WorkerOverloaded
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.tasks import TaskSet

#: An end by this deadline is a failure of the test, not a measurement.
DEADLINE = 10.0


class Records:
    """A stream that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.has_ended = asyncio.Event()
        self.seen = asyncio.Event()
        self.full: asyncio.Future[None] | None = None

    async def accepted(self) -> None:
        self.told.append("accepted")

    def refused(self, error: DynamoError) -> None:
        self.told.append(("refused", type(error), str(error)))

    def data(self, item: Any) -> None:
        self.told.append(item)
        self.seen.set()

    def event(self, item: Annotated[Any]) -> None:
        if item.is_error():
            error = item.to_error()
            self.told.append(("error", type(error), str(error)))
        else:
            self.told.append(item.event)

    def room(self) -> Awaitable[None] | None:
        return self.full

    def ended(self, error: DynamoError | None) -> None:
        self.told.append(("ended", None if error is None else type(error)))
        self.has_ended.set()


class Bench:
    """One call under test, and a count of what was deferred to its end."""

    def __init__(self, tasks: TaskSet) -> None:
        self.tasks = tasks
        self.ctx = ServedContext("request")
        self.stream = Records()
        self.deferred = 0
        self.ctx.defer(self._count)

    def _count(self) -> None:
        self.deferred += 1

    def start(self, handler: Handler) -> ServedCall:
        call = ServedCall(handler, "the request", self.ctx, self.stream)
        call.start(self.tasks)
        return call

    async def start_and_watch_its_end(self) -> tuple[ServedCall, list[bool]]:
        """Return a call whose handler goes on after its first item, and whether a close told it to stop."""
        stopped_at_close: list[bool] = []

        async def generate(ctx: ServedContext) -> AsyncGenerator[Any, None]:
            try:
                yield 1
                await asyncio.Event().wait()
            finally:
                stopped_at_close.append(ctx.is_stopped())

        call = self.start(handler_of(generate))
        await asyncio.wait_for(self.stream.seen.wait(), DEADLINE)
        return call, stopped_at_close

    async def end(self, call: ServedCall) -> list[Any]:
        """Return all that was told, once the call has ended."""
        await asyncio.wait_for(call.wait(), DEADLINE)
        await asyncio.wait_for(self.stream.has_ended.wait(), DEADLINE)
        return self.stream.told


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    tasks = TaskSet()
    bench = Bench(tasks)
    yield bench
    await tasks.aclose()
    assert bench.deferred == 1, "what was deferred runs exactly once, however the call ends"


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "STOP_GRACE", 0.01)


def handler_of(generate: Callable[[ServedContext], AsyncGenerator[Any, None]]) -> Handler:
    async def handler(request: Any, ctx: ServedContext) -> AsyncGenerator[Any, None]:
        assert request == "the request"
        return generate(ctx)

    return handler


async def two_items(ctx: ServedContext) -> AsyncGenerator[Any, None]:
    yield 1
    yield Annotated.from_annotation("note", "x")
    yield 2


async def forever(ctx: ServedContext) -> AsyncGenerator[Any, None]:
    yield 1
    await asyncio.Event().wait()


WHOLE = ["complete_final", ("ended", None)]
CUT = [("ended", Disconnected)]
STOPPED, FOR_EVER = "until it is stopped", "for ever"


@pytest.mark.parametrize(
    ("error", "told", "logged"),
    [
        (WorkerOverloaded("full"), ("refused", WorkerOverloaded, "full"), ""),
        # The text of a foreign one may hold anything.
        (
            ZeroDivisionError("secret"),
            ("refused", Unknown, "the call could not be taken"),
            "a handler failed to take a call",
        ),
    ],
)
async def test_refusal_is_passed_on_and_nothing_follows(
    bench: Bench, caplog: pytest.LogCaptureFixture, error: Exception, told: Any, logged: str
) -> None:
    async def refuse(request: Any, ctx: ServedContext) -> AsyncGenerator[Any, None]:
        raise error

    assert await bench.end(bench.start(refuse)) == [told, ("ended", None)]
    assert logged in caplog.text


@pytest.mark.parametrize(
    ("says", "acts", "told", "logged"),
    [
        ([1, Annotated.from_annotation("note", "x"), 2], [], [1, "note", 2, *WHOLE], ""),
        # An error in mid-stream is an item, and the stream is still complete.
        (
            [1, BackendError.InvalidArgument("bad")],
            [],
            [1, ("error", BackendError.InvalidArgument, "bad"), *WHOLE],
            "",
        ),
        ([1, KeyError("x")], [], [1, ("error", Unknown, "'x'"), *WHOLE], "a handler failed in mid-stream"),
        # A handler that ends when it is stopped ends normally.
        ([1, STOPPED, "cancelled"], ["stop"], [1, "cancelled", *WHOLE], ""),
        ([1, FOR_EVER], ["kill"], [1, ("error", Cancelled, "stopped"), *WHOLE], ""),
        # A connection that is lost after a stop, and an owner that closes, say no more.
        ([1, FOR_EVER], ["stop", "lose"], [1, *CUT], ""),
        ([1, FOR_EVER], ["close the owner"], [1, *CUT], ""),
    ],
)
async def test_accepted_call_tells_these_items_and_its_end(
    bench: Bench,
    short_grace: None,
    caplog: pytest.LogCaptureFixture,
    says: list[Any],
    acts: list[str],
    told: list[Any],
    logged: str,
) -> None:
    async def generate(ctx: ServedContext) -> AsyncGenerator[Any, None]:
        for one in says:
            if isinstance(one, Exception):
                raise one
            if one in (STOPPED, FOR_EVER):
                await (ctx.stopped() if one == STOPPED else asyncio.Event().wait())
            else:
                yield one

    call = bench.start(handler_of(generate))
    await asyncio.wait_for(bench.stream.seen.wait(), DEADLINE)
    for act in acts:
        if act == "close the owner":
            await bench.tasks.aclose()
        elif act == "lose":
            call.lost()
        else:
            call.stop(kill=act == "kill")

    assert await bench.end(call) == ["accepted", *told]
    assert logged in caplog.text
    assert (bench.ctx.is_stopped(), bench.ctx.is_killed()) == (bool({"stop", "kill"} & {*acts}), "kill" in acts)


async def test_a_handler_that_ignores_the_stop_is_cancelled(bench: Bench, short_grace: None) -> None:
    call, stopped_at_close = await bench.start_and_watch_its_end()

    call.stop()

    error = ("error", Cancelled, "stopped")
    assert await bench.end(call) == ["accepted", 1, error, "complete_final", ("ended", None)]
    assert stopped_at_close == [True]


async def test_a_call_stopped_before_its_start_is_cancelled(bench: Bench, short_grace: None) -> None:
    bench.ctx.stop_generating()

    call = bench.start(handler_of(forever))

    error = ("error", Cancelled, "stopped")
    assert await bench.end(call) == ["accepted", 1, error, "complete_final", ("ended", None)]


async def test_a_stop_while_the_handler_has_not_accepted_ends_the_call(bench: Bench, short_grace: None) -> None:
    async def undecided(request: Any, ctx: ServedContext) -> AsyncGenerator[Any, None]:
        await asyncio.Event().wait()
        raise AssertionError("never reached")

    call = bench.start(undecided)

    call.stop()

    assert await bench.end(call) == [("ended", Disconnected)]


async def test_a_lost_connection_closes_the_handler_without_telling_it_to_stop(bench: Bench) -> None:
    call, stopped_at_close = await bench.start_and_watch_its_end()

    call.lost()

    assert await bench.end(call) == ["accepted", 1, ("ended", Disconnected)]
    assert stopped_at_close == [False]
    assert not bench.ctx.is_stopped()


async def test_a_connection_lost_before_the_first_step_still_ends_the_call(bench: Bench) -> None:
    call = bench.start(handler_of(two_items))

    call.lost()

    assert await bench.end(call) == [("ended", Disconnected)]
    assert bench.deferred == 1


async def test_the_handler_is_paused_until_the_sink_has_room(bench: Bench) -> None:
    produced: list[int] = []

    async def eager(ctx: ServedContext) -> AsyncGenerator[Any, None]:
        for number in range(3):
            produced.append(number)
            yield number

    bench.stream.full = asyncio.get_running_loop().create_future()
    call = bench.start(handler_of(eager))
    await asyncio.wait_for(bench.stream.seen.wait(), DEADLINE)
    await asyncio.sleep(0)
    assert produced == [0]

    full, bench.stream.full = bench.stream.full, None
    full.set_result(None)

    assert await bench.end(call) == ["accepted", 0, 1, 2, "complete_final", ("ended", None)]


async def test_a_lost_connection_closes_a_paused_handler(bench: Bench) -> None:
    async def generate(ctx: ServedContext) -> AsyncGenerator[Any, None]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            bench.stream.told.append("closed")

    bench.stream.full = asyncio.get_running_loop().create_future()
    call = bench.start(handler_of(generate))
    await asyncio.wait_for(bench.stream.seen.wait(), DEADLINE)

    call.lost()

    assert await bench.end(call) == ["accepted", 1, "closed", ("ended", Disconnected)]


async def test_waiting_for_an_unstarted_call_returns() -> None:
    call = ServedCall(handler_of(two_items), "the request", ServedContext("r"), Records())

    await asyncio.wait_for(call.wait(), DEADLINE)
    call.lost()
