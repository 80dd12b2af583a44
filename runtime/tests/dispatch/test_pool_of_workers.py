"""Which workers of a pool are offered to routers."""

from __future__ import annotations

import pytest
from dynamo_core.contracts.router import no_worker
from dynamo_core.errors import ServiceOverloaded, Unavailable
from dynamo_core.protocol.records import CORDONED, DRAINING, Instance, ModelCard
from dynamo_runtime.dispatch.pools.pool import COOL_DOWN, FULL_TIME, Pool


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


def test_a_worker_that_is_down_is_passed_over(pool: Pool) -> None:
    pool.report_down(2)

    assert ids(pool) == [1, 3]
    assert list(pool.instances) == [1, 2, 3]


def test_a_worker_that_is_down_is_better_than_none(pool: Pool) -> None:
    pool.report_down(1)
    pool.report_down(2)

    assert ids(pool, 3) == [1, 2]
    assert ids(pool, 2, 3) == [1]
    pool.report_down(3)
    assert ids(pool) == [1, 2, 3]


def test_it_is_given_another_chance_after_a_while(pool: Pool, clock: list[float]) -> None:
    pool.report_down(2)
    clock[0] += COOL_DOWN - 0.1
    before = ids(pool)
    clock[0] += 0.2

    assert (before, ids(pool)) == ([1, 3], [1, 2, 3])


def test_a_new_record_of_it_ends_the_wait(pool: Pool) -> None:
    pool.report_down(2)
    pool.add(Instance(instance_id=2, host="moved"), ModelCard(name="m", instance_id=2))

    assert ids(pool) == [1, 2, 3]


def test_a_call_that_it_accepts_ends_the_wait(pool: Pool) -> None:
    pool.report_down(2)
    pool.report_up(2)

    assert ids(pool) == [1, 2, 3]


def test_a_worker_that_has_gone_is_not_remembered(pool: Pool) -> None:
    pool.report_down(2)
    pool.remove(2)
    pool.report_down(2)
    pool.add(Instance(instance_id=2), ModelCard(name="m", instance_id=2))

    assert ids(pool) == [1, 3, 2]


def test_a_busy_worker_is_never_offered(pool: Pool) -> None:
    pool.set_busy(1, True)
    some = ids(pool)
    for number in (2, 3):
        pool.set_busy(number, True)
    none = ids(pool)
    pool.set_busy(2, False)

    assert (some, none, ids(pool), ids(pool, 2)) == ([2, 3], [], [2], [])
    assert set(pool.busy) == {1, 3}


def test_a_worker_that_is_down_does_not_replace_one_that_is_busy(pool: Pool) -> None:
    pool.report_down(1)
    pool.set_busy(2, True)
    pool.set_busy(3, True)

    assert (ids(pool), ids(pool, 2), ids(pool, 2, 3)) == ([], [], [1])
    pool.set_busy(1, True)
    assert ids(pool, 2, 3) == []


def test_a_full_worker_is_asked_last_and_not_twice_for_one_request(pool: Pool, clock: list[float]) -> None:
    pool.report_full(1)
    assert (ids(pool), ids(pool, 2)) == ([2, 3], [3])
    pool.report_full(2)
    pool.report_full(3)

    # Somebody may have room by now; but not one of those who have just refused this very request.
    assert (ids(pool), ids(pool, 2)) == ([1, 2, 3], [])
    clock[0] += FULL_TIME
    assert ids(pool, 2) == [1, 3]


def test_a_full_worker_that_accepts_is_full_no_more(pool: Pool) -> None:
    pool.report_full(1)
    pool.report_up(1)

    assert ids(pool) == [1, 2, 3]


def test_marks_go_with_their_worker(pool: Pool) -> None:
    pool.set_busy(1, True)
    pool.report_full(1)
    pool.remove(1)
    pool.set_busy(1, True)
    pool.add(Instance(instance_id=1), ModelCard(name="m", instance_id=1))

    assert ids(pool) == [2, 3, 1]


@pytest.mark.parametrize("state", [CORDONED, DRAINING])
def test_a_worker_out_of_service_is_never_offered_but_stays_in_the_pool(pool: Pool, state: str) -> None:
    set_state(pool, 2, state)

    assert (ids(pool), ids(pool, 1), ids(pool, 1, 3)) == ([1, 3], [3], [])
    assert (list(pool.instances), list(pool.cards)) == ([1, 2, 3], [1, 2, 3])
    assert pool.in_service == {1, 3}
    assert pool.limited
    assert pool.state(2) == state


def test_it_is_offered_in_its_old_place_once_it_is_back_in_service(pool: Pool) -> None:
    version = pool.version
    set_state(pool, 2, CORDONED)
    cordoned = pool.version
    set_state(pool, 2, "")

    assert ids(pool) == [1, 2, 3]
    assert version < cordoned < pool.version
    assert not pool.limited
    assert pool.state(2) == "free"


def test_it_is_not_the_last_resort_when_the_others_are_down(pool: Pool) -> None:
    set_state(pool, 2, CORDONED)
    for number in (1, 2, 3):
        pool.report_down(number)

    assert (ids(pool), ids(pool, 1), ids(pool, 1, 3)) == ([1, 3], [3], [])


def test_one_that_leaves_while_out_of_service_comes_back_in_service(pool: Pool) -> None:
    set_state(pool, 2, CORDONED)
    pool.remove(2)
    left = pool.limited
    pool.add(Instance(instance_id=2), ModelCard(name="m", instance_id=2))

    assert not left
    assert ids(pool) == [1, 3, 2]


def test_why_there_is_no_worker_says_whether_any_is_in_service(pool: Pool) -> None:
    busy = no_worker(pool)
    for number in (1, 2, 3):
        set_state(pool, number, DRAINING)
    drained = no_worker(pool)
    empty = no_worker(Pool("m", "aggregated"))

    assert isinstance(busy, ServiceOverloaded)
    assert isinstance(drained, Unavailable)
    assert str(drained) == "all aggregated workers of model 'm' are cordoned or draining"
    assert (type(empty), str(empty)) == (Unavailable, "no worker serves model 'm' now")
