"""The stall timeout: who is given up for silence, in which phase, and who is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from dynamo_core.errors import CannotConnect, ResponseTimeout, Unavailable
from dynamo_core.protocol.annotated import Annotated
from dynamo_runtime.dispatch.timeouts import StallTimeout, StallTimer
from hypothesis import given
from hypothesis import strategies as st

#: Seconds that pass only where a test says so: `check` does what the timeouts would do.
NEVER = 4000.0


async def turns(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def checks(stage: Any) -> int:
    """Return how many checks in a row have to find nothing new."""
    count = stage.pipeline._timeouts.stall.checks
    assert isinstance(count, int)
    return count


def check(stream: Any, times: int = 1) -> None:
    timer = stream._stall_timer
    for _ in range(times):
        if not timer._number:
            # It was given up, and the next worker has not accepted yet.
            return
        timer.cancel()
        timer._check()


@pytest.fixture
def stage(make_stage: Callable[..., Any]) -> Any:
    return make_stage(stall=NEVER, first_item=10_000.0, total=50_000.0)


async def test_a_worker_that_is_slow_is_not_given_up(stage: Any) -> None:
    stream = await stage.generate()
    for _ in range(10):
        stage.transport.calls[0].give(1)
        check(stream, checks(stage) - 1)
    await turns()
    stage.transport.calls[0].complete()

    assert len(stage.transport.calls) == 1
    await stage.ends_whole(stream)


@pytest.mark.parametrize("taken", [True, False], ids=["its tokens were read", "its tokens wait to be read"])
@pytest.mark.parametrize("given", [0, 1, 5])
async def test_a_worker_that_falls_silent_is_given_up_in_any_phase(stage: Any, given: int, taken: bool) -> None:
    stream = await stage.generate()
    stage.transport.calls[0].give(given)
    read = [token for item in stream.take() for token in item.token_ids] if taken else []
    check(stream)
    check(stream, checks(stage))
    await turns()
    # The worker that goes on is watched like the first one, also before it says anything.
    check(stream, checks(stage))
    await turns()
    assert len(stage.transport.calls) == 3
    stage.transport.calls[2].complete()

    await stage.ends_whole(stream, read)
    assert not len(stage.pipeline._timeouts.stall.timeouts)


async def test_progress_reports_reset_the_stall_timeout(stage: Any) -> None:
    stream = await stage.generate()
    for _ in range(3):
        check(stream, checks(stage) - 1)
        stage.transport.calls[0].sink.event(Annotated(event="progress"))
        check(stream)
    await turns()

    assert len(stage.transport.calls) == 1
    stage.transport.calls[0].complete()
    await stream.aclose()


async def test_silence_of_a_worker_that_was_asked_to_pause_is_no_failure(stage: Any) -> None:
    stream = await stage.generate()
    stage.transport.calls[0].give(2)
    stream.pause()
    check(stream, 5 * checks(stage))
    await turns()
    resumed_after = len(stage.transport.calls)
    stream.resume()
    check(stream, checks(stage))
    await turns()

    assert (resumed_after, len(stage.transport.calls)) == (1, 2)
    await stream.aclose()


async def test_a_request_that_no_worker_answers_is_tried_on_so_many_others_and_no_more(
    make_stage: Callable[..., Any],
) -> None:
    stage = make_stage(6, stall=NEVER, retries=2)
    stream = await stage.generate()
    for _ in range(5):
        if not stream.ended:
            check(stream, checks(stage))
        await turns()

    assert len(stage.transport.calls) == 3
    assert isinstance(stream.error, Unavailable)
    await stream.aclose()
    assert all(call.closed for call in stage.transport.calls)


async def test_refusals_and_silence_count_together(make_stage: Callable[..., Any]) -> None:
    stage = make_stage(6, stall=NEVER, retries=2)
    stage.transport.refusals = [CannotConnect("gone")]
    stream = await stage.generate()
    while not stream.ended:
        check(stream, checks(stage))
        await turns()

    assert len(stage.transport.asked) == 3
    assert isinstance(stream.error, Unavailable)
    assert stream.error.__cause__ is not None
    await stream.aclose()


async def test_the_stall_timeout_pauses_without_a_worker(make_stage: Callable[..., Any]) -> None:
    stage = make_stage(1, stall=NEVER, migration_wait=20)
    stream = await stage.generate()
    stage.transport.calls[0].give(2)
    stage.transport.refusals = [CannotConnect("not yet")] * 1000
    stage.lose()
    await turns()

    assert not len(stage.pipeline._timeouts.stall.timeouts)
    await stream.aclose()


class Silent:
    """A stream of which nothing is known but what has arrived."""

    instance_id: int | None = 7
    source_paused = False

    def __init__(self) -> None:
        self.arrived = 0
        self.error: Exception | None = None

    def fail_attempt(self, error: Exception) -> None:
        self.error = error


@given(st.floats(0.001, 1000.0), st.lists(st.booleans(), max_size=60))
def test_exactly_so_many_silent_checks_in_a_row_give_a_worker_up(seconds: float, arrivals: list[bool]) -> None:
    async def run() -> None:
        timeout, stream = StallTimeout(seconds), Silent()
        timer = StallTimer(timeout, stream)
        timer.start()
        silent = 0
        for arrives in arrivals:
            stream.arrived += arrives
            silent = 0 if arrives else silent + 1
            timeout.timeouts.cancel(timer._number)
            timer._check()
            assert (stream.error is not None) == (silent == timeout.checks)
            if stream.error is not None:
                assert isinstance(stream.error, ResponseTimeout)
                break
        timer.cancel()
        assert not len(timeout.timeouts)

    asyncio.run(run())
