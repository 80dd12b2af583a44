"""N in the engine, Q before it, one more refused; whatever the order of events."""

from __future__ import annotations

import pytest
from dynamo_core.errors import WorkerOverloaded
from dynamo_runtime.worker.capacity_gate import CapacityGate, Ticket
from dynamo_telemetry.metrics import Metrics
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(("limit", "queue", "served"), [(1, 2, 3), (2, 3, 5)])
def test_exactly_n_plus_q_are_taken(limit: int, queue: int, served: int) -> None:
    gate = CapacityGate(Metrics(), limit=limit, queue=queue)

    tickets = [gate.enter() for _ in range(served)]

    with pytest.raises(WorkerOverloaded, match="Server overloaded: worker at capacity"):
        gate.enter()
    assert [ticket.in_engine for ticket in tickets] == [True] * limit + [False] * queue


def test_without_a_limit_all_requests_enter() -> None:
    gate = CapacityGate(Metrics(), limit=None, queue=2)

    tickets = [gate.enter() for _ in range(100)]

    assert all(ticket.in_engine for ticket in tickets)


async def test_its_three_metrics_follow() -> None:
    metrics = Metrics()
    gate = CapacityGate(metrics, limit=1, queue=1)
    tickets = [gate.enter(), gate.enter()]
    with pytest.raises(WorkerOverloaded):
        gate.enter()

    full = (await metrics.render()).decode()
    for ticket in tickets:
        ticket.leave()

    assert "dynamo_engine_request 1" in full
    assert "dynamo_request_queue 1" in full
    assert "dynamo_rejection_request_total 1" in full
    assert (gate.active, gate.queued) == (0, 0)


@given(st.integers(1, 3), st.integers(0, 3), st.lists(st.integers(0, 9), max_size=60))
def test_places_are_given_in_order_and_never_more_than_there_are(limit: int, queue: int, steps: list[int]) -> None:
    gate = CapacityGate(Metrics(), limit=limit, queue=queue)
    inside: list[Ticket] = []

    for step in steps:
        if step < 5:
            try:
                inside.append(gate.enter())
            except WorkerOverloaded:
                assert len(inside) == limit + queue
        elif inside:
            leaving = inside.pop(step % len(inside))
            leaving.leave()
            leaving.leave()
        granted = [ticket.in_engine for ticket in inside]
        assert granted == sorted(granted, reverse=True), "who came first is in first"
        assert sum(granted) == min(len(inside), limit) == gate.active
        assert gate.queued == len(inside) - sum(granted)
