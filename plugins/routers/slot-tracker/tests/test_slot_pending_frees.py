"""What the service is told after calls were lost: whatever the losses, it ends with the requests that run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest.mock import patch

import pytest
from dynamo_plugin_router_slot_tracker import pending_frees, reservations
from dynamo_plugin_router_slot_tracker.client import Refused, ServiceClient, ServiceUnreachable
from dynamo_plugin_router_slot_tracker.errors import Refusal
from dynamo_plugin_router_slot_tracker.pending_frees import PendingFrees
from dynamo_plugin_router_slot_tracker.registry import Registry
from dynamo_plugin_router_slot_tracker.reservations import Reservation, Reservations
from dynamo_plugin_router_slot_tracker.schemas import Addition, Registration, RequestKey
from hypothesis import given
from hypothesis import strategies as st

from plugins.conftest import until

#: What becomes of a call: the service never hears of it, and the client knows; the service never hears of it, and the
#: client cannot know; the service does it, and the answer is lost; or all goes well.
UNSENT, LOST, UNANSWERED, ANSWERED = range(4)


class Service:
    """A registry behind a network that loses what `outcomes` say, and nothing after them."""

    usable = True

    def __init__(self, outcomes: Iterator[int]) -> None:
        self._outcomes = outcomes
        self.registry = Registry()
        self.registry.register(Registration(worker_id=7, model_name="m", block_size=16, dp_start=0, dp_size=1))
        self.calls: list[str] = []

    @property
    def active(self) -> set[str]:
        return set(self.registry.scope("m", "default").requests)

    async def add(self, addition: Addition) -> None:
        await self._call(f"add {addition.request_id}", lambda: self.registry.add(addition))

    async def complete_prefill(self, key: RequestKey) -> None:
        await self._call(f"prefill {key.request_id}", lambda: self.registry.complete_prefill(key))

    async def free(self, key: RequestKey, *, urgent: bool = False) -> None:
        await self._call(f"free {key.request_id}", lambda: self.registry.free(key))

    async def _call(self, name: str, act: Callable[[], object]) -> None:
        outcome = next(self._outcomes, ANSWERED)
        await asyncio.sleep(0)
        if outcome is UNSENT:
            raise ServiceUnreachable(uncertain=False)
        if outcome is LOST:
            raise ServiceUnreachable
        self.calls.append(name)
        refused = None
        try:
            act()
        except Refusal as refusal:
            refused = Refused(refusal.status, refusal.message)
        if outcome is UNANSWERED:
            raise ServiceUnreachable
        if refused is not None:
            raise refused


def reservation(owner: Reservations, request_id: str) -> Reservation:
    def make(attempt_id: str) -> Addition:
        return Addition(
            model_name="m", request_id=attempt_id, worker_id=7, dp_rank=0, sequence_hashes=[1], new_isl_tokens=9
        )

    one = Reservation(owner, (7, 0), 1.0, make)
    one.entered(request_id)
    return one


def key_of(request_id: str) -> RequestKey:
    return RequestKey(model_name="m", request_id=request_id)


outcomes = st.lists(st.sampled_from([UNSENT, LOST, UNANSWERED, ANSWERED]), max_size=40)
#: For each request how far it comes, and how many turns of the loop pass before its next step.
lives = st.lists(st.tuples(st.sampled_from(["running", "prefilled", "over"]), st.integers(0, 4)), max_size=12)


@given(outcomes, lives, st.booleans())
def test_with_any_lost_calls_only_running_requests_remain(
    lost: list[int], requests: list[tuple[str, int]], ends: bool
) -> None:
    async def live() -> None:
        service = Service(iter(lost))
        owner = Reservations(cast(ServiceClient, service), expiry=300)
        owner.start()
        running = set()
        for number, (fate, turns) in enumerate(requests):
            one = reservation(owner, f"r{number}")
            for _ in range(turns):
                await asyncio.sleep(0)
            if fate != "running":
                one.prefilled()
            for _ in range(turns):
                await asyncio.sleep(0)
            if fate == "over":
                one.left()
            else:
                running.add(f"r{number}")
        if not ends:
            await asyncio.wait_for(owner._changed.join(), 10)
            await until(lambda: not owner.pending)
        await owner.aclose()

        # An `/add` is never repeated, so that one which was lost stays so.
        assert service.active == {request_id for request_id in running if f"add {request_id}" in service.calls}
        assert not owner.unknown
        for number in range(len(requests)):
            own = [call.split()[0] for call in service.calls if call.endswith(f" r{number}")]
            assert own.count("add") <= 1
            # Nothing follows a free but another one.
            assert set(own[own.index("free") :]) == {"free"} if "free" in own else True

    with patch.object(pending_frees, "FIRST", 0), patch.object(pending_frees, "_HURRY", 0):
        asyncio.run(live())


def frees(outcome: Iterator[int], expiry: float = 300.0) -> tuple[Service, PendingFrees]:
    service = Service(outcome)
    return service, PendingFrees(cast(ServiceClient, service), expiry)


def always(outcome: int) -> Iterator[int]:
    while True:
        yield outcome


async def test_no_more_wait_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_frees, "LIMIT", 3)
    service, waiting = frees(iter(()))
    for number in range(5):
        waiting.put(key_of(f"r{number}"), asyncio.get_running_loop().time())
    assert len(waiting) == 3

    await waiting.flush()

    # The oldest go first, for the service expires them first.
    assert sorted(service.calls) == ["free r2", "free r3", "free r4"]


@pytest.mark.parametrize("bounds", [{"ATTEMPTS": 3}, {}])
async def test_a_service_that_never_answers_is_given_up(
    bounds: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in ({"FIRST": 0.01, "LAST": 0.02} | bounds).items():
        monkeypatch.setattr(pending_frees, name, value)
    # By number, or by the expiry of the service.
    service, waiting = frees(always(UNANSWERED), 300.0 if bounds else 0.5)
    waiting.put(key_of("r"), asyncio.get_running_loop().time())
    task = asyncio.create_task(waiting.run())

    await until(lambda: "1 ended requests count at the slot tracker until they expire there" in caplog.text)

    assert not waiting
    assert len(service.calls) >= 3
    if bounds:
        assert len(service.calls) == 3
    task.cancel()


async def test_while_the_service_is_away_only_one_call_finds_that_out(monkeypatch: pytest.MonkeyPatch) -> None:
    service, waiting = frees(always(UNANSWERED))
    for number in range(50):
        waiting.put(key_of(f"r{number}"), asyncio.get_running_loop().time())

    assert not await waiting._round()

    assert service.calls == ["free r0"]
    assert len(waiting) == 50


@pytest.mark.parametrize("turns", range(8))
async def test_a_round_that_is_cancelled_loses_none(turns: int) -> None:
    service, waiting = frees(iter(()))
    for number in range(20):
        waiting.put(key_of(f"r{number}"), asyncio.get_running_loop().time())
    task = asyncio.create_task(waiting._round())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

    await waiting.flush()

    assert set(service.calls) == {f"free r{number}" for number in range(20)}


async def test_frees_of_an_unknown_model_are_not_repeated() -> None:
    service, waiting = frees(iter(()))
    waiting.put(RequestKey(model_name="gone", request_id="r"), asyncio.get_running_loop().time(), answers=2)

    await waiting.flush()

    assert service.calls == ["free r"]


async def test_hashes_of_ended_requests_are_not_kept_and_a_full_queue_adds_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reservations, "_MAX_CHANGED", 2)
    service = Service(iter(()))
    owner = Reservations(cast(ServiceClient, service), expiry=300)
    # Nothing has been told yet, for it has not been started.
    many = [reservation(owner, f"r{number}") for number in range(5)]
    assert owner._changed.qsize() == 2
    for one in many[1:]:
        one.left()
    assert [one.addition is None for one in many] == [False, True, True, True, True]
    assert owner.unknown == {(7, 0): 2.0}

    owner.start()
    await asyncio.wait_for(owner._changed.join(), 10)

    assert service.active == {"r0"}
    # One that the service counts is freed also when the queue is full.
    monkeypatch.setattr(reservations, "_MAX_CHANGED", 0)
    many[0].left()
    assert owner.pending == 1
    await owner.aclose()
    assert service.active == set()
