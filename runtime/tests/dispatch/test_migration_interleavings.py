"""Whatever happens in which order, a reader sees each token of the answer once, and nothing is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from dynamo_core.errors import (
    BackendError,
    CannotConnect,
    Disconnected,
    DynamoError,
    EngineShutdown,
    InvalidArgument,
    ResponseTimeout,
    StreamIncomplete,
    WorkerOverloaded,
)
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.output import LLMEngineOutput, usage
from dynamo_runtime.dispatch.execution.execution import ExecutionState
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

LENGTH = 12
LIMIT = 2

FAILURES = [Disconnected("lost"), EngineShutdown("ends"), StreamIncomplete("gap"), BackendError.EngineShutdown("dead")]
FATAL = [InvalidArgument("no"), BackendError.Unknown("broken")]
REFUSALS = [CannotConnect("nobody"), WorkerOverloaded("full"), EngineShutdown("ends")]


class Interleavings(RuleBasedStateMachine):
    """One request. Workers give, fail, come late; the reader takes, pauses, stops, leaves."""

    make_stage: ClassVar[Any]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.seen: list[int] = []
        self.scores = 0
        self.ended_with: LLMEngineOutput | None = None
        self.closed = False

    @initialize(early=st.integers(0, 3), broken=st.integers(0, 2))
    def begin(self, early: int, broken: int) -> None:
        self.stage = self.make_stage(limit=LIMIT)
        self.answer = self.stage.answer(LENGTH)
        self.prompt_tokens = len(self.stage.prompt)
        self.stage.transport.early, self.stage.transport.broken = early, broken
        self.stream = self.run(self.stage.generate(LENGTH))
        self.execution = self.stream._owner
        self.settle()

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 5))

    def do(self, *actions: Callable[[], Any]) -> None:
        """Run within the event loop, without a turn for another task in between."""

        async def all_of_them() -> None:
            for action in actions:
                action()

        self.loop.run_until_complete(all_of_them())

    def settle(self) -> None:
        async def turns() -> None:
            for _ in range(30):
                await asyncio.sleep(0)

        self.run(turns())

    @property
    def current(self) -> Any:
        return self.stage.transport.calls[-1]

    @property
    def working(self) -> bool:
        return not self.current.over and not self.closed

    @precondition(lambda self: self.working)
    @rule(count=st.integers(0, 4))
    def give(self, count: int) -> None:
        self.do(partial(self.current.give, min(count, self.current.left)))

    @precondition(lambda self: self.working)
    @rule(error=st.sampled_from(FAILURES), told=st.booleans(), refusals=st.lists(st.sampled_from(REFUSALS), max_size=2))
    def fail(self, error: DynamoError, told: bool, refusals: list[DynamoError]) -> None:
        self.stage.transport.refusals = list(refusals)
        self.do(partial(self.current.fail, error, told=told))
        self.settle()
        self.stage.transport.refusals = []

    @precondition(lambda self: self.working)
    @rule(error=st.sampled_from(FATAL))
    def fail_for_good(self, error: DynamoError) -> None:
        self.do(partial(self.current.fail, error, told=True))
        assert self.stream.ended

    @precondition(lambda self: self.working)
    @rule()
    def fail_and_give_no_turn(self) -> None:
        self.do(partial(self.current.fail, Disconnected("lost"), told=False), self.take)

    @precondition(lambda self: self.working)
    @rule()
    def hang(self) -> None:
        """Give it up; it may still have something to say."""
        self.do(partial(self.stream.fail_attempt, ResponseTimeout("silent")))
        self.settle()

    @precondition(lambda self: self.working)
    @rule()
    def complete(self) -> None:
        self.do(self.current.complete)

    @precondition(lambda self: len(self.stage.transport.calls) > 1)
    @rule(count=st.integers(1, 3))
    def come_late(self, count: int) -> None:
        old = self.stage.transport.calls[0]
        late = [partial(old.sink.data, LLMEngineOutput([5555])) for _ in range(count)]
        self.do(*late, partial(old.sink.event, Annotated.from_complete_final()), partial(old.sink.closed, None))

    @rule()
    def read(self) -> None:
        self.do(self.take)

    def take(self) -> None:
        for item in self.stream.take():
            self.seen += item.token_ids
            self.scores += len(item.log_probs or ())
            if item.finish_reason is not None:
                self.ended_with = item

    @rule(turns=st.booleans())
    def pause(self, turns: bool) -> None:
        self.do(self.stream.pause)
        if turns:
            self.settle()
            assert self.closed or self.stream.ended or self.current.over or self.current.paused
        self.do(self.stream.resume)

    @rule()
    def wait(self) -> None:
        self.settle()

    @precondition(lambda self: not self.closed)
    @rule()
    def stop(self) -> None:
        self.do(self.stage.ctx.stop_generating)

    @precondition(lambda self: not self.closed)
    @rule()
    def leave(self) -> None:
        self.take()
        self.run(self.stream.aclose())
        self.closed = True

    @invariant()
    def the_reader_sees_the_answer_once(self) -> None:
        assert self.seen == self.answer[: len(self.seen)]
        assert self.scores == len(self.seen)
        if self.ended_with is not None:
            assert self.seen == self.answer
            assert self.ended_with.completion_usage == usage(self.prompt_tokens, LENGTH)

    @invariant()
    def no_more_than_one_place_is_held(self) -> None:
        held = self.stage.tracker.total_requests
        assert held <= 1
        if self.stream.ended:
            assert held == 0

    @invariant()
    def its_state_says_what_becomes_of_it(self) -> None:
        state = self.execution.state
        assert (state is ExecutionState.ENDED) == self.stream.ended
        if state is ExecutionState.STREAMING:
            assert self.stream.begun
        if state is ExecutionState.RECOVERING:
            assert self.execution._recovery is not None

    @invariant()
    def it_moves_no_more_often_than_allowed(self) -> None:
        assert (
            sum(1 for call in self.stage.transport.calls if len(call.request.token_ids) > self.prompt_tokens) <= LIMIT
        )
        assert sum(1 for call in self.stage.transport.calls if len(call.request.token_ids) == self.prompt_tokens) <= 3

    def teardown(self) -> None:
        if not hasattr(self, "stream"):
            self.loop.close()
            return
        self.take()
        complete = self.stream.ended and self.stream.error is None
        self.run(self.stream.aclose())
        self.settle()
        assert not complete or self.seen == self.answer
        assert self.stage.tracker.total_requests == 0
        assert self.stage.permit.told == [len(self.seen)]
        assert all(call.closed for call in self.stage.transport.calls)
        assert not asyncio.all_tasks(self.loop)
        self.run(self.stage.pipeline.aclose())
        self.loop.close()


def test_any_interleaving(make_stage: Callable[..., Any]) -> None:
    class Staged(Interleavings):
        """With the stage that the fixture gives."""

    Staged.make_stage = staticmethod(make_stage)
    run_state_machine_as_test(
        Staged,
        settings=settings(
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        ),
    )
