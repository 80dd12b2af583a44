"""The queue of waiting requests, the shares and the limits: all that is counted, with times that the tests make."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from dynamo_plugin_admission_fair_queue.config import TenantSettings
from dynamo_plugin_admission_fair_queue.queue import RequestQueue, Waiter
from dynamo_plugin_admission_fair_queue.shares import Shares
from dynamo_plugin_admission_fair_queue.tenant_quotas import TenantLimits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

WEIGHTS = {"a": 1.0, "b": 1.0, "heavy": 4.0}


def weight(tenant: str) -> float:
    return WEIGHTS[tenant]


def line(size: int = 100, aging: float = 10.0) -> RequestQueue[None]:
    return RequestQueue(weight, size=size, aging=aging)


def waiter(
    tenant: str, at: float = 0.0, *, priority: int = 0, cost: float = 1.0, seniority: float = 0.0
) -> Waiter[None]:
    return Waiter(tenant, priority, cost, at, at + 1000, None, seniority)


def drained(queue: RequestQueue[None], now: float = 0.0, count: int = 1000) -> list[Waiter[None]]:
    """Return the admitted requests in order, each ending at once at the cost that it was said to have."""
    served: list[Waiter[None]] = []
    while len(served) < count and (one := queue.next(now, lambda _: True)) is not None:
        queue.let_in(one, now)
        served.append(one)
    for one in served:
        queue.end(one.tenant, 0.0)
    return served


# Who is next.


def test_a_higher_priority_goes_first() -> None:
    queue = line()
    low, high = waiter("a", 0), waiter("b", 1, priority=1)
    queue.add(low)
    queue.add(high)

    assert drained(queue, 1) == [high, low]


def test_waiting_makes_up_for_priority() -> None:
    queue = line(aging=10)
    low, high = waiter("a", 0), waiter("b", 5, priority=1)
    queue.add(low)
    queue.add(high)

    assert queue.next(9.5, lambda _: True) is high
    assert queue.next(10.5, lambda _: True) is low


def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    queue = line()
    for _ in range(50):
        queue.add(waiter("a"))
    first = drained(queue, count=10)
    quiet = waiter("b")
    queue.add(quiet)

    assert {one.tenant for one in first} == {"a"}
    assert quiet in drained(queue, count=2)


def test_a_tenant_with_four_times_the_weight_gets_four_times_as_much() -> None:
    queue = line()
    for _ in range(50):
        queue.add(waiter("a"))
        queue.add(waiter("heavy"))

    served = [one.tenant for one in drained(queue, count=50)]

    assert 39 <= served.count("heavy") <= 41


def test_the_real_cost_of_an_answer_counts() -> None:
    """Both ask for the same, and one gets answers that are ten times as long."""
    queue = line(size=1000)
    for _ in range(300):
        queue.add(waiter("a", cost=1))
        queue.add(waiter("b", cost=1))
    served = []
    for _ in range(110):
        one = queue.next(0, lambda _: True)
        assert one is not None
        queue.let_in(one, 0)
        queue.end(one.tenant, 9 if one.tenant == "a" else 0)
        served.append(one.tenant)

    assert served.count("a") == pytest.approx(10, abs=2)


def test_a_pausing_tenant_accrues_no_share() -> None:
    queue = line()
    for _ in range(40):
        queue.add(waiter("a"))
    drained(queue, count=20)
    for _ in range(20):
        queue.add(waiter("b"))

    served = [one.tenant for one in drained(queue, count=20)]

    assert 9 <= served.count("b") <= 11


def test_a_retry_goes_before_others_of_its_tenant_that_came_a_little_earlier() -> None:
    queue = line()
    first, retry, old = waiter("a", 9), waiter("a", 10, seniority=4), waiter("a", 5)
    for one in (first, retry, old):
        queue.add(one)

    assert drained(queue, 10) == [old, retry, first]


def test_a_retry_does_not_go_before_other_tenants() -> None:
    queue = line()
    others = waiter("b", 9)
    queue.add(others)
    for _ in range(5):
        queue.add(waiter("a", 10, seniority=100))

    assert others in drained(queue, 10, count=2)


def test_tenants_over_their_limit_are_skipped() -> None:
    queue = line()
    queue.add(waiter("a", 0))
    queue.add(waiter("b", 1))

    found = queue.next(1, lambda one: one.tenant != "a")

    assert found is not None
    assert found.tenant == "b"


# When it is full.


def test_a_full_line_takes_one_of_a_quiet_tenant_in_the_place_of_the_last_of_a_loud_one() -> None:
    queue = line(size=3)
    loud = [waiter("a", at) for at in range(3)]
    for one in loud:
        queue.add(one)

    assert not queue.has_room("a", 0)
    assert queue.has_room("b", 0)
    assert queue.add(waiter("b", 3)) is loud[-1]
    assert len(queue) == 3


def test_a_full_queue_refuses_equal_tenants() -> None:
    queue = line(size=2)
    queue.add(waiter("a"))
    queue.add(waiter("b"))

    assert not queue.has_room("a", 0)
    assert not queue.has_room("b", 0)


def test_a_full_queue_evicts_only_lower_priorities() -> None:
    queue = line(size=1)
    low = waiter("a")
    queue.add(low)

    assert not queue.has_room("b", -1)
    assert queue.add(waiter("a", priority=1)) is low
    assert not queue.has_room("b", 0)


def test_a_tenant_may_have_more_of_the_line_by_its_weight() -> None:
    queue = line(size=5)
    for tenant in ("heavy", "heavy", "heavy", "a", "a"):
        queue.add(waiter(tenant))

    victim = queue.add(waiter("heavy"))

    assert victim is not None
    assert victim.tenant == "a"


# How long it takes.


def test_the_expected_wait_follows_the_rate_of_admissions() -> None:
    queue = line()
    for _ in range(30):
        queue.add(waiter("a"))
    unknown = queue.wait_of("a", 0, 0.0)
    for second in range(1, 11):
        one = queue.next(second, lambda _: True)
        assert one is not None
        queue.let_in(one, second)

    assert unknown == 0.0
    assert queue.wait_of("a", 0, 10.0) == pytest.approx(21, rel=0.3)
    # Another tenant has half of all.
    assert queue.wait_of("b", 0, 10.0) == pytest.approx(2, rel=0.3)
    assert queue.wait_of("a", 1, 10.0) == pytest.approx(1, rel=0.3)


# Limits of tenants.


def limits(**settings: float) -> TenantLimits:
    return TenantLimits(lambda _: TenantSettings.model_validate(settings))


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 100), st.floats(-50, 100)), max_size=30),
    st.floats(0.1, 100),
    st.integers(1, 100),
)
def test_a_tenant_stays_within_its_rate_and_burst(
    asked: Sequence[tuple[float, float, float]], rate: float, burst: int
) -> None:
    book = limits(tokens_per_second=rate, burst_tokens=burst)
    now, spent, last = 0.0, 0.0, 0.0
    for pause, cost, correction in asked:
        now = max(now + pause, book.ready_at("a", now + pause))
        assert book.ready_at("a", now) == now
        # Before this one began it was not in debt.
        assert spent <= rate * now + burst + 1e-3
        book.begin("a", cost, now)
        book.end("a", max(correction, -cost), now)
        last = max(0.0, cost + max(correction, -cost))
        spent += last
    book.tidy("a", now + (spent + burst) / rate + 1)
    assert len(book) == 0


# All of it together.


class Queueing(RuleBasedStateMachine):
    """Requests come, wait, are let in, end, and are given up; nothing is lost, and nobody gets more than is fair."""

    @initialize(size=st.integers(0, 6), aging=st.floats(0.5, 20))
    def begin(self, size: int, aging: float) -> None:
        self.size = size
        self.queue = line(size, aging)
        self.now = 0.0
        self.waiting: list[Waiter[None]] = []
        self.running: list[str] = []

    @rule(
        tenant=st.sampled_from(sorted(WEIGHTS)),
        priority=st.integers(-1, 1),
        cost=st.floats(0, 1000),
        seniority=st.floats(0, 10),
    )
    def come(self, tenant: str, priority: int, cost: float, seniority: float) -> None:
        one = waiter(tenant, self.now, priority=priority, cost=cost, seniority=seniority)
        if not self.queue.has_room(tenant, priority):
            assert len(self.queue) == self.size
            return
        victim = self.queue.add(one)
        if victim is not None:
            assert len(self.waiting) == self.size
            assert victim.priority <= priority
            assert not victim.waits
            self.waiting.remove(victim)
        self.waiting.append(one)

    @rule(tenant=st.sampled_from(sorted(WEIGHTS)), cost=st.floats(0, 1000))
    def pass_by(self, tenant: str, cost: float) -> None:
        self.queue.pass_by(tenant, cost)
        self.running.append(tenant)

    @rule(barred=st.sets(st.sampled_from(sorted(WEIGHTS)), max_size=2))
    def let_in(self, barred: set[str]) -> None:
        one = self.queue.next(self.now, lambda asked: asked.tenant not in barred)
        if one is None:
            assert all(other.tenant in barred for other in self.waiting)
            return
        rivals = [other for other in self.waiting if other.tenant == one.tenant and other.priority == one.priority]
        assert min(rivals, key=lambda other: other.order) is one
        self.queue.let_in(one, self.now)
        self.waiting.remove(one)
        self.running.append(one.tenant)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.waiting))
        self.queue.remove(one)
        self.waiting.remove(one)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), correction=st.floats(-1000, 1000))
    def end(self, data: st.DataObject, correction: float) -> None:
        tenant = data.draw(st.sampled_from(self.running))
        self.queue.end(tenant, correction)
        self.running.remove(tenant)

    @rule(seconds=st.floats(0, 30))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def all_are_counted(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert len(self.queue) == len(self.waiting) <= self.size
        assert {id(one) for one in self.queue} == {id(one) for one in self.waiting}
        assert self.queue.running == len(self.running)
        for tenant in WEIGHTS:
            assert self.queue.shares.waiting(tenant) == sum(one.tenant == tenant for one in self.waiting)
            assert 0 < self.queue.shares.part(tenant) <= 1
            assert self.queue.wait_of(tenant, 0, self.now) >= 0

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        for one in list(self.queue):
            self.queue.remove(one)
        for tenant in self.running:
            self.queue.end(tenant, 0)
        assert (len(self.queue), self.queue.running, len(self.queue.shares)) == (0, 0, 0)
        assert self.queue.shares.tag("a") == 0.0


TestQueueing = Queueing.TestCase


@given(
    costs=st.lists(st.tuples(st.sampled_from(sorted(WEIGHTS)), st.floats(1, 50)), min_size=1, max_size=200),
    count=st.integers(1, 200),
)
def test_while_two_tenants_wait_neither_is_ahead_by_more_than_one_request_of_each(
    costs: list[tuple[str, float]], count: int
) -> None:
    shares = Shares(weight)
    left = {tenant: [cost for owner, cost in costs if owner == tenant] for tenant in WEIGHTS}
    for tenant, own in left.items():
        for _ in own:
            shares.enqueue(tenant)
    always = {tenant for tenant, own in left.items() if own}
    served = dict.fromkeys(WEIGHTS, 0.0)
    for _ in range(min(count, len(costs))):
        tenant = min((name for name, own in left.items() if own), key=shares.tag)
        cost = left[tenant].pop(0)
        shares.begin(tenant, cost, waited=True)
        served[tenant] += cost / weight(tenant)
        always &= {name for name, own in left.items() if own}
        for one in always:
            for other in always:
                assert served[one] - served[other] <= 50 / weight(one) + 50 / weight(other) + 1e-6
