"""Which workers of a pool are offered to routers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from dynamo_core.contracts.router import no_worker
from dynamo_core.errors import ServiceOverloaded, Unavailable
from dynamo_core.protocol.records import CORDONED, DRAINING, Instance, ModelCard
from dynamo_runtime.dispatch.pools.pool import COOL_DOWN, FULL_TIME, Pool

#: What happens to a pool.
Step = Callable[[Pool], object]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("dynamo_runtime.dispatch.pools.pool.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def pool(clock: list[float]) -> Pool:
    pool = Pool("m", "aggregated")
    for number in (1, 2, 3):
        pool.add(Instance(instance_id=number), ModelCard(name="m", instance_id=number))
    return pool


def set_state(pool: Pool, number: int, state: str) -> None:
    pool.add(Instance(instance_id=number, state=state), pool.cards[number])


def ids(pool: Pool, *excluded: int) -> list[int]:
    return [instance.instance_id for instance in pool.eligible(excluded)]


def added(number: int, **more: Any) -> Step:
    return lambda pool: pool.add(Instance(instance_id=number, **more), ModelCard(name="m", instance_id=number))


def down(*numbers: int) -> Step:
    return lambda pool: list(map(pool.report_down, numbers))


def busy(*numbers: int) -> Step:
    return lambda pool: [*map(partial(pool.set_busy, busy=True), numbers)]


def full(number: int) -> Step:
    return lambda pool: pool.report_full(number)


def up(number: int) -> Step:
    return lambda pool: pool.report_up(number)


def removed(number: int) -> Step:
    return lambda pool: pool.remove(number)


@pytest.mark.parametrize(
    ("steps", "offered"),
    [
        # A worker that is down is passed over, and is better than none.
        ([down(2)], {(): [1, 3]}),
        ([down(1, 2)], {(3,): [1, 2], (2, 3): [1]}),
        ([down(1, 2, 3)], {(): [1, 2, 3]}),
        # A new record of it ends the wait, and so does a call that it accepts.
        ([down(2), added(2, host="moved")], {(): [1, 2, 3]}),
        ([down(2), up(2)], {(): [1, 2, 3]}),
        ([full(1), up(1)], {(): [1, 2, 3]}),
        # One that has gone is not remembered.
        ([down(2), removed(2), down(2), added(2)], {(): [1, 3, 2]}),
        ([busy(1), full(1), removed(1), busy(1), added(1)], {(): [2, 3, 1]}),
        ([added(2, state=CORDONED), removed(2), added(2)], {(): [1, 3, 2]}),
        # A busy one is never offered, and one that is down does not replace it.
        ([busy(1)], {(): [2, 3]}),
        ([busy(1, 2, 3)], {(): []}),
        ([busy(1, 2, 3), lambda pool: pool.set_busy(2, False)], {(): [2], (2,): []}),
        ([down(1), busy(2, 3)], {(): [], (2,): [], (2, 3): [1]}),
        ([down(1), busy(1, 2, 3)], {(2, 3): []}),
        # One that is out of service is not the last resort when the others are down.
        ([added(2, state=CORDONED), down(1, 2, 3)], {(): [1, 3], (1,): [3], (1, 3): []}),
    ],
)
def test_pool_offers_these_workers(pool: Pool, steps: list[Step], offered: dict[tuple[int, ...], list[int]]) -> None:
    for step in steps:
        step(pool)

    assert {excluded: ids(pool, *excluded) for excluded in offered} == offered
    assert set(pool.instances) == {1, 2, 3}


def test_a_down_worker_is_eligible_again_after_the_cool_down(pool: Pool, clock: list[float]) -> None:
    pool.report_down(2)
    clock[0] += COOL_DOWN - 0.1
    before = ids(pool)
    clock[0] += 0.2

    assert (before, ids(pool)) == ([1, 3], [1, 2, 3])


def test_a_full_worker_is_asked_last_and_not_twice_for_one_request(pool: Pool, clock: list[float]) -> None:
    pool.report_full(1)
    assert (ids(pool), ids(pool, 2)) == ([2, 3], [3])
    pool.report_full(2)
    pool.report_full(3)

    # Somebody may have room by now; but not one of those who have just refused this very request.
    assert (ids(pool), ids(pool, 2)) == ([1, 2, 3], [])
    clock[0] += FULL_TIME
    assert ids(pool, 2) == [1, 3]


@pytest.mark.parametrize("state", [CORDONED, DRAINING])
def test_a_worker_out_of_service_is_never_offered_but_stays_in_the_pool(pool: Pool, state: str) -> None:
    set_state(pool, 2, state)

    assert (ids(pool), ids(pool, 1), ids(pool, 1, 3)) == ([1, 3], [3], [])
    assert (list(pool.instances), list(pool.cards)) == ([1, 2, 3], [1, 2, 3])
    assert pool.in_service == {1, 3}
    assert pool.limited
    assert pool.state(2) == state


def test_a_worker_back_in_service_keeps_its_place(pool: Pool) -> None:
    version = pool.version
    set_state(pool, 2, CORDONED)
    cordoned = pool.version
    set_state(pool, 2, "")

    assert ids(pool) == [1, 2, 3]
    assert version < cordoned < pool.version
    assert not pool.limited
    assert pool.state(2) == "free"


def test_no_worker_tells_overload_from_none_in_service(pool: Pool) -> None:
    busy = no_worker(pool)
    for number in (1, 2, 3):
        set_state(pool, number, DRAINING)
    drained = no_worker(pool)
    empty = no_worker(Pool("m", "aggregated"))

    assert isinstance(busy, ServiceOverloaded)
    assert isinstance(drained, Unavailable)
    assert str(drained) == "all aggregated workers of model 'm' are cordoned or draining"
    assert (type(empty), str(empty)) == (Unavailable, "no worker serves model 'm' now")
