"""A worker's state: kept in its record, changed by its endpoint, whatever else happens to the record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from dynamo_core.contracts.discovery import Lease
from dynamo_core.contracts.transports.call import ServedContext
from dynamo_core.errors import CannotConnect, EngineShutdown, InvalidArgument, Unavailable
from dynamo_core.protocol.cards import read_instance
from dynamo_core.protocol.records import (
    CARDS,
    CORDONED,
    DRAINING,
    INSTANCES,
    SERVING,
    Instance,
    ModelCard,
    WorkerStateReport,
    WorkerStateRequest,
)
from dynamo_runtime.worker.capacity_gate import CapacityGate
from dynamo_runtime.worker.registration import Registration
from dynamo_telemetry.metrics import Metrics
from hypothesis import given
from hypothesis import strategies as st

CARD = ModelCard(name="m", instance_id=7)
INSTANCE = Instance(instance_id=7, worker="w")


class StageLease(Lease):
    """Holds records in memory. A put fails while `broken`, and waits while `open` is not set."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.broken = False
        self.open = asyncio.Event()
        self.open.set()
        self._lost = asyncio.Event()

    @property
    def id(self) -> int:
        return 7

    @property
    def lost(self) -> asyncio.Event:
        return self._lost

    @property
    def states(self) -> list[str]:
        """Of the instances that are listed."""
        return [read_instance(value).state for key, value in self.records.items() if key.startswith(INSTANCES)]

    async def put(self, key: str, value: bytes) -> None:
        await self.open.wait()
        if self.broken:
            raise CannotConnect("the store is away")
        self.records[key] = value

    async def remove(self, key: str) -> None:
        self.records.pop(key, None)

    async def aclose(self) -> None:
        self.records.clear()


class Registered:
    """A registered worker."""

    def __init__(self, *, notice: float = 0.0) -> None:
        self.lease = StageLease()
        self.gate = CapacityGate(Metrics(), limit=1, queue=9)
        self.registration = Registration(self.lease, self.gate, notice=notice)

    async def enter(self) -> Registered:
        await self.registration.enter(CARD, INSTANCE)
        return self

    async def ask(self, state: str | None = None) -> WorkerStateReport:
        items = await self.registration.serve(WorkerStateRequest(state), ServedContext("r"))
        (report,) = [item async for item in items]
        return report


async def test_the_state_that_is_asked_for_is_in_the_record_once_it_is_reported() -> None:
    worker = await Registered().enter()

    for state in (CORDONED, DRAINING, SERVING):
        report = await worker.ask(state)

        assert (report.state, worker.lease.states) == (state, [state])
        assert worker.registration.instance == Instance(instance_id=7, worker="w", state=state)


async def test_asking_without_a_state_changes_nothing() -> None:
    worker = await Registered().enter()
    await worker.ask(CORDONED)
    before = dict(worker.lease.records)
    worker.lease.broken = True

    report = await worker.ask()

    assert (report.state, worker.lease.records) == (CORDONED, before)


async def test_running_and_queued_requests_are_reported() -> None:
    worker = await Registered().enter()
    tickets = [worker.gate.enter() for _ in range(3)]

    assert [(await worker.ask()).requests, (await worker.ask(DRAINING)).drained] == [3, False]
    for ticket in tickets:
        ticket.leave()
    assert await worker.ask() == WorkerStateReport(DRAINING, 0, True)


async def test_a_worker_in_service_has_not_drained_however_idle_it_is() -> None:
    worker = await Registered().enter()

    assert not (await worker.ask()).drained


async def test_a_worker_has_drained_only_when_callers_have_had_time_to_notice(
    advance: Callable[[float], None],
) -> None:
    worker = await Registered(notice=5.0).enter()
    assert worker.registration.notice_left == 5.0
    at_first = await worker.ask(CORDONED)
    advance(3.0)
    # What is out of service already does not begin anew.
    later = await worker.ask(DRAINING)
    left = worker.registration.notice_left
    advance(2.5)
    at_last = await worker.ask()
    in_service = await worker.ask(SERVING)

    assert (at_first.drained, later.drained, at_last.drained, in_service.drained) == (False, False, True, False)
    assert left == pytest.approx(2.0, abs=0.5)
    assert worker.registration.notice_left == 5.0


async def test_a_failed_write_keeps_the_state_and_raises() -> None:
    worker = await Registered().enter()
    worker.lease.broken = True

    with pytest.raises(Unavailable, match="discovery does not take the record of worker w now"):
        await worker.ask(CORDONED)
    worker.lease.broken = False

    assert (await worker.ask()).state == SERVING


async def test_a_state_is_put_again_though_the_worker_is_in_it() -> None:
    worker = await Registered().enter()
    # A store may have kept what it did not confirm.
    await worker.lease.put(INSTANCES + INSTANCE.path, b'{"instance_id": 7, "state": "cordoned"}')

    await worker.ask(SERVING)

    assert worker.lease.states == [SERVING]


async def test_a_state_that_no_worker_can_be_in_is_refused_with_its_field() -> None:
    worker = await Registered().enter()

    with pytest.raises(InvalidArgument, match="its state is 'gone'") as refused:
        await worker.ask("gone")

    assert refused.value.field == "state"
    assert worker.lease.states == [SERVING]


async def test_a_worker_that_is_not_listed_takes_the_state_and_is_listed_with_it() -> None:
    worker = await Registered().enter()
    await worker.registration.set_listed(False)

    await worker.ask(DRAINING)
    hidden = worker.lease.states
    await worker.registration.set_listed(True)

    assert (hidden, worker.lease.states) == ([], [DRAINING])


async def test_a_worker_that_starts_or_stops_takes_no_state() -> None:
    worker = Registered()
    with pytest.raises(EngineShutdown, match="the worker is starting"):
        await worker.ask(CORDONED)
    await worker.enter()
    await worker.registration.leave()
    for state in (CORDONED, None):
        with pytest.raises(EngineShutdown, match="the worker is stopping"):
            await worker.ask(state)

    assert worker.lease.records == {}


async def test_leaving_waits_for_a_pending_state_change() -> None:
    worker = await Registered().enter()
    worker.lease.open.clear()
    asking = asyncio.ensure_future(worker.ask(CORDONED))
    await asyncio.sleep(0)
    leaving = asyncio.ensure_future(worker.registration.leave())
    await asyncio.sleep(0)
    worker.lease.open.set()

    report, _ = await asyncio.gather(asking, leaving)

    assert (report.state, worker.lease.records) == (CORDONED, {})


@given(st.lists(st.sampled_from([SERVING, CORDONED, DRAINING, "hide", "show", "break", "mend"]), max_size=20))
def test_the_listed_state_is_always_the_last_confirmed(steps: list[str]) -> None:
    async def play() -> None:
        worker = await Registered().enter()
        confirmed, listed = SERVING, True
        for step in steps:
            worker.lease.broken = {"break": True, "mend": False}.get(step, worker.lease.broken)
            try:
                if step in ("hide", "show"):
                    await worker.registration.set_listed(step == "show")
                    listed = step == "show"
                elif step not in ("break", "mend"):
                    await worker.ask(step)
                    confirmed = step
            except (Unavailable, CannotConnect):
                assert worker.lease.broken
            assert worker.lease.states == ([confirmed] if listed else [])
            assert (await worker.ask()).state == confirmed
            assert CARDS + CARD.path in worker.lease.records

    asyncio.run(play())
