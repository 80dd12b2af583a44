"""What a request holds: legs share one deadline, and places on the board are given back once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from dynamo_core.contracts.admission import Permit
from dynamo_core.contracts.call import GENERATE
from dynamo_core.contracts.router import Route
from dynamo_core.dispatch.execution.attempts import Attempts, Deadlines, Leg, RequestAlarms
from dynamo_core.dispatch.execution.flush import FlushQueue
from dynamo_core.dispatch.load.board import LoadBoard
from dynamo_core.errors import DeadlineExceeded, Disconnected, DynamoError, ResponseTimeout
from dynamo_core.protocol.records import Instance


class CountedPermit(Permit):
    __slots__ = ("released",)

    def __init__(self) -> None:
        self.released = 0

    def release(self, output_tokens: int) -> None:
        self.released += 1


@dataclass
class Request:
    deadlines: Deadlines = field(default_factory=Deadlines)
    board: LoadBoard = field(default_factory=LoadBoard)
    permit: CountedPermit = field(default_factory=CountedPermit)

    def __post_init__(self) -> None:
        self.flush = FlushQueue()
        self.attempts = Attempts(self.flush, GENERATE, self.permit, RequestAlarms(self.deadlines))

    def leg(self) -> Leg:
        leg = Leg(GENERATE.merge, self.flush, label="p")
        self.enter(leg, "p")
        return leg

    def enter(self, leg: Leg, attempt: str) -> None:
        route = Route(Instance(instance_id=1))
        leg.enter(self.board.enter(route, attempt, prompt_tokens=3, block_size=None, hashes=()))


async def ended(leg: Leg) -> DynamoError | None:
    done = asyncio.Event()
    leg.stream.on_ready(lambda: done.set() if leg.stream.ended else None)
    async with asyncio.timeout(5):
        await done.wait()
    return leg.stream.error


@pytest.mark.parametrize(
    ("deadlines", "kind"),
    [(Deadlines(first_item=0.01), ResponseTimeout), (Deadlines(total=0.01), DeadlineExceeded)],
)
async def test_a_deadline_that_passes_before_a_worker_is_called_ends_what_goes_before(
    deadlines: Deadlines, kind: type[DynamoError]
) -> None:
    request = Request(deadlines)
    leg = request.leg()
    request.attempts.after(leg)

    error = await ended(leg)

    assert type(error) is kind
    assert request.attempts.stream.error is error
    assert request.board.total_requests == 0
    await leg.stream.aclose()
    await request.attempts.stream.aclose()
    assert request.permit.released == 1


async def test_a_leg_that_comes_too_late_ends_at_once() -> None:
    request = Request()
    lost = Disconnected("lost")
    request.attempts.stream.fail(lost)
    leg = request.leg()

    request.attempts.after(leg)

    assert leg.stream.error is lost
    assert request.board.total_requests == 0
    await request.attempts.stream.aclose()


async def test_a_leg_that_was_let_go_outlives_the_request() -> None:
    request = Request()
    leg = request.leg()
    request.attempts.after(leg)
    request.attempts.after(None)

    await request.attempts.stream.aclose()

    assert not leg.stream.ended
    assert request.board.total_requests == 1
    await leg.stream.aclose()
    assert request.board.total_requests == 0


async def test_a_worker_that_is_chosen_after_the_end_takes_no_place() -> None:
    request = Request()
    request.attempts.stream.fail(Disconnected("lost"))

    request.enter(request.attempts, "late")

    assert not request.attempts.placed
    assert request.board.total_requests == 0
    await request.attempts.stream.aclose()
