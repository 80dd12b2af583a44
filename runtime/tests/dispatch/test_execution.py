"""What a request holds: hops share one deadline, places on the load tracker are given back once, and one state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
from dynamo_core.contracts.admission import Permit
from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.contracts.router import Route
from dynamo_core.contracts.transports.call import GENERATE
from dynamo_core.errors import Cancelled, DeadlineExceeded, Disconnected, DynamoError, ResponseTimeout
from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_core.protocol.records import Instance, ModelCard
from dynamo_core.protocol.request import PreprocessedRequest
from dynamo_core.tasks import TaskSet
from dynamo_runtime.dispatch.execution.execution import Deadlines, ExecutionState, RequestExecution, RequestTimeouts
from dynamo_runtime.dispatch.execution.response_stream import FlushQueue, ResponseStream
from dynamo_runtime.dispatch.load.tracker import LoadTracker, Reservation
from dynamo_runtime.dispatch.pools.worker_group import RoutePlan


class CountedPermit(Permit):
    __slots__ = ("released",)

    def __init__(self) -> None:
        self.released = 0

    def release(self, output_tokens: int) -> None:
        self.released += 1


class Planner:
    card = ModelCard(name="m", instance_id=0)

    def plan(self, excluded: Collection[int] = ()) -> RoutePlan:
        raise NotImplementedError


class NoRecovery:
    """Every failure ends the request."""

    def __init__(self) -> None:
        self.tasks = TaskSet()

    def recover(self, execution: RequestExecution, error: DynamoError) -> DynamoError | None:
        return error


@dataclass
class Request:
    deadlines: Deadlines = field(default_factory=Deadlines)
    tracker: LoadTracker = field(default_factory=LoadTracker)
    permit: CountedPermit = field(default_factory=CountedPermit)

    def __post_init__(self) -> None:
        self.flush = FlushQueue()
        plan: Any = ()
        self.execution = RequestExecution(
            PreprocessedRequest(model="m", token_ids=[1]),
            EngineContext("r"),
            Planner(),
            plan,
            self.permit,
            principal=Principal(),
            flush=self.flush,
            timeouts=RequestTimeouts(self.deadlines),
            policy=NoRecovery(),
        )
        self.stream = self.execution.stream

    def prefill(self) -> ResponseStream:
        """Return the stream of a prefill worker that was chosen."""
        stream = ResponseStream(GENERATE.merge, self.flush)
        stream.begin(self.reserve("p"))
        return stream

    def reserve(self, attempt: str) -> Reservation:
        route = Route(Instance(instance_id=1))
        return self.tracker.reserve(route, attempt, prompt_tokens=3, block_size=None, hashes=())


async def ended(stream: ResponseStream) -> DynamoError | None:
    done = asyncio.Event()
    stream.on_ready(lambda: done.set() if stream.ended else None)
    async with asyncio.timeout(5):
        await done.wait()
    return stream.error


@pytest.mark.parametrize(
    ("deadlines", "kind"),
    [(Deadlines(first_item=0.01), ResponseTimeout), (Deadlines(total=0.01), DeadlineExceeded)],
)
async def test_a_deadline_before_the_call_ends_the_prefill(deadlines: Deadlines, kind: type[DynamoError]) -> None:
    request = Request(deadlines)
    prefill = request.prefill()
    request.execution.start_prefill(prefill)

    error = await ended(prefill)

    assert type(error) is kind
    assert request.stream.error is error
    assert request.tracker.total_requests == 0
    await prefill.aclose()
    await request.stream.aclose()
    assert request.permit.released == 1


async def test_a_hop_that_comes_too_late_ends_at_once() -> None:
    request = Request()
    lost = Disconnected("lost")
    request.stream.fail(lost)
    prefill = request.prefill()

    request.execution.start_prefill(prefill)

    assert prefill.error is lost
    assert request.tracker.total_requests == 0
    await request.stream.aclose()


async def test_a_joined_call_is_not_ended_twice(make_call: Callable[[], Any]) -> None:
    request = Request()
    prefill = request.prefill()
    request.execution.start_prefill(prefill)
    call = make_call()
    request.execution.join(call, 1)

    await request.stream.aclose()

    assert call.closed
    assert not prefill.ended
    assert request.tracker.total_requests == 1
    await prefill.aclose()
    assert request.tracker.total_requests == 0


async def test_a_worker_that_is_chosen_after_the_end_takes_no_place() -> None:
    request = Request()
    request.stream.fail(Disconnected("lost"))

    request.execution.answer.begin(request.reserve("late"))

    assert not request.stream.placed
    assert request.tracker.total_requests == 0
    await request.stream.aclose()


async def test_a_request_goes_from_state_to_state(make_call: Callable[[], Any]) -> None:
    request = Request()
    states = [request.execution.state]

    request.execution.start_routing()
    states.append(request.execution.state)
    sink = request.execution.answer.begin(request.reserve("a"))
    request.stream.attach(make_call(), 1)
    request.execution.placement_done()
    states.append(request.execution.state)
    sink.data(LLMEngineOutput([1]))
    states.append(request.execution.state)
    await request.stream.aclose()
    states.append(request.execution.state)

    assert states == [
        ExecutionState.ADMITTED,
        ExecutionState.ROUTING,
        ExecutionState.ACCEPTED,
        ExecutionState.STREAMING,
        ExecutionState.ENDED,
    ]


async def test_items_that_come_before_the_acceptance_count_once_it_is_there(make_call: Callable[[], Any]) -> None:
    request = Request()
    request.execution.start_routing()
    request.execution.answer.begin().data(LLMEngineOutput([1]))
    before = request.execution.state
    request.stream.attach(make_call(), 1)
    request.execution.placement_done()

    assert (before, request.execution.state) == (ExecutionState.ROUTING, ExecutionState.STREAMING)
    await request.stream.aclose()


async def test_failures_during_routing_are_left_to_the_recovery(make_call: Callable[[], Any]) -> None:
    request = Request()
    request.execution.start_routing()
    request.execution.answer.begin(request.reserve("a"))
    first, second = Disconnected("first"), Disconnected("second")
    for error in (first, second):
        request.stream.fail_attempt(error)
    meanwhile = request.stream.ended
    request.execution.placement_done()

    assert not meanwhile
    assert request.execution.state is ExecutionState.ENDED
    assert request.stream.error is first
    await request.stream.aclose()


async def test_closing_ends_a_request_that_recovers() -> None:
    request = Request()
    request.execution.start_routing()
    request.execution.placement_done()
    task = asyncio.create_task(asyncio.Event().wait())
    request.execution.enter_recovery(task, in_mid_answer=False)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    state = request.execution.state

    await request.stream.aclose()

    assert (state, request.execution.state) == (ExecutionState.RECOVERING, ExecutionState.ENDED)
    assert task.cancelled()
    assert isinstance(request.stream.error, Cancelled)
    assert request.permit.released == 1
