"""The policy as core uses it: permits, loads and deadlines, on an event loop whose time the tests make."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest
from dynamo_core import (
    AdmissionServices,
    Permit,
    PreprocessedRequest,
    Principal,
    RankLoad,
    RoutingHints,
    StopConditions,
    Thresholds,
)
from dynamo_core.errors import ServiceOverloaded
from dynamo_core.protocol import Instance, ModelCard
from dynamo_plugin_admission_fair_queue.admission import FairQueueAdmission
from dynamo_plugin_admission_fair_queue.config import FairQueueConfig, TenantSettings
from dynamo_plugin_admission_fair_queue.meters import OTHERS
from dynamo_runtime.dispatch.pools.pool import Pool
from dynamo_telemetry import Metrics
from hypothesis import given, settings
from hypothesis import strategies as st

T = TypeVar("T")
IDLE, BUSY = RankLoad(0, 100), RankLoad(100, 100)


class MadeTime(asyncio.SelectorEventLoop):
    """Time stands still unless a test moves it. It must never be idle: a test that waits for real hangs."""

    now = 1000.0

    def time(self) -> float:
        return self.now


class Values:
    """One threshold for every model."""

    def of(self, model: str) -> Thresholds:
        return Thresholds(active_decode_blocks_threshold=0.5)


class House:
    """An admission, one model with two workers, and everybody who asks."""

    def __init__(self, loop: MadeTime, **config: Any) -> None:
        self.loop = loop
        self.metrics = Metrics()
        services = AdmissionServices(self.metrics, thresholds=Values(), retry_after=lambda model: 7.0)
        self.admission = FairQueueAdmission(FairQueueConfig(**config), services)
        self.pool = Pool("m", "aggregated")
        for number in (1, 2):
            self.pool.add(Instance(instance_id=number), ModelCard(name="m", instance_id=number))

    def load(self, load: RankLoad, *workers: int) -> None:
        """Report a load as the worker monitor does."""
        for number in workers or (1, 2):
            self.pool.set_busy(number, self.admission.is_busy("m", [load]))

    async def ask(self, tenant: str = "a", *, tokens: int = 1, wants: int | None = None, **who: Any) -> Permit:
        principal = Principal(tenant=tenant, **who)
        request = PreprocessedRequest(
            model="m", token_ids=[1] * tokens, stop_conditions=StopConditions(max_tokens=wants)
        )
        self.admission.precheck("m", principal, (self.pool,))
        return await self.admission.admit(request, principal, (self.pool,))

    def asks(self, *args: Any, **options: Any) -> asyncio.Task[Permit]:
        return self.loop.create_task(self.ask(*args, **options))

    async def after(self, seconds: float = 0.0) -> None:
        """Let time go by, and everything happen that is due."""
        self.loop.now += seconds
        for _ in range(10):
            await asyncio.sleep(0)

    async def reconfigure(self, **changes: Any) -> None:
        await self.admission.reconfigure(self.admission.config.model_copy(update=changes))

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def run(check: Callable[[House], Coroutine[Any, Any, T]], **config: Any) -> T:
    """Run a check; whatever it leaves waiting is ended, and nothing must be held then."""

    async def whole(loop: MadeTime) -> T:
        house = House(loop, **config)
        try:
            return await check(house)
        finally:
            await house.admission.aclose()
            await house.after()

    with asyncio.Runner(loop_factory=MadeTime) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, MadeTime)
        return runner.run(whole(loop))


Check = Callable[[House], Coroutine[Any, Any, None]]


def at_manual_time(**config: Any) -> Callable[[Check], Callable[[], None]]:
    """Make a test of a check of a house with these settings."""
    return lambda check: lambda: run(check, **config)


async def refused(asked: Awaitable[Permit]) -> ServiceOverloaded:
    with pytest.raises(ServiceOverloaded) as error:
        await asked
    return error.value


@at_manual_time()
async def test_waiting_requests_pass_to_the_router_without_workers_in_service(house: House) -> None:
    house.load(BUSY)
    asked = house.asks()
    await house.after()
    for number in (1, 2):
        house.pool.add(Instance(instance_id=number, state="cordoned"), house.pool.cards[number])
    # As the monitor does when a record is another one.
    house.load(BUSY)
    await house.after()

    (await asked).release(0)
    (await house.ask()).release(0)


@at_manual_time(requests_per_worker=1)
async def test_a_worker_out_of_service_has_no_places(house: House) -> None:
    house.pool.add(Instance(instance_id=2, state="draining"), house.pool.cards[2])
    first, second = house.asks(), house.asks()
    await house.after()
    before = (first.done(), second.done())
    (await first).release(0)
    await house.after()

    (await second).release(0)
    assert before == (True, False)


@at_manual_time()
async def test_each_free_worker_lets_in_one_waiter_until_loads_are_looked_at_again(
    house: House,
) -> None:
    house.load(BUSY)
    asked = [house.asks() for _ in range(5)]
    await house.after()
    house.load(IDLE)
    await house.after()
    at_first = sum(task.done() for task in asked)
    house.load(IDLE, 1)
    await house.after()

    assert (at_first, sum(task.done() for task in asked)) == (2, 4)


@at_manual_time()
async def test_a_request_over_max_wait_is_refused_with_retry_after(house: House) -> None:
    house.load(BUSY)
    asked = house.asks()
    await house.after()
    await house.after(29.9)
    assert not asked.done()
    await house.after(0.2)

    assert (await refused(asked)).retry_after == 7
    assert house.admission.held == 0
    assert house.sample("dynamo_admission_refusals_total", model="m", tenant="a", reason="waited") == 1


@at_manual_time()
async def test_no_request_waits_past_its_clients_deadline(house: House) -> None:
    house.load(BUSY)
    asked = house.asks(deadline=house.loop.time() + 2)
    await house.after(2.1)
    late = house.asks(deadline=house.loop.time() - 1)
    await house.after()

    await refused(asked)
    await refused(late)
    assert house.sample("dynamo_admission_refusals_total", model="m", tenant="a", reason="deadline") == 2


@at_manual_time(requests_per_worker=1)
async def test_a_request_that_would_miss_its_deadline_is_refused_at_once(house: House) -> None:
    permits = [await house.ask() for _ in range(2)]
    waiting = [house.asks() for _ in range(30)]
    await house.after()
    # One a second is let in.
    for one in waiting[:9]:
        permits.pop().release(1)
        await house.after(1)
        permits.append(await one)

    hurried = house.asks(deadline=house.loop.time() + 5)
    patient = house.asks(deadline=house.loop.time() + 29)
    quiet = house.asks("b", deadline=house.loop.time() + 5)
    await house.after()

    await refused(hurried)
    assert (patient.done(), quiet.done()) == (False, False)


@at_manual_time(max_queue=1)
async def test_a_full_queue_refuses_before_the_prompt_is_looked_at(house: House) -> None:
    house.load(BUSY)
    waiting = house.asks()
    await house.after()

    with pytest.raises(ServiceOverloaded):
        house.admission.precheck("m", Principal(tenant="a"), (house.pool,))

    assert not waiting.done()
    assert house.sample("dynamo_admission_refusals_total", model="m", tenant="a", reason="full") == 1


@at_manual_time(max_queue=3)
async def test_a_quiet_tenant_takes_a_place_of_a_loud_one(house: House) -> None:
    house.load(BUSY)
    loud = [house.asks("loud") for _ in range(3)]
    await house.after()
    quiet = house.asks("quiet")
    await house.after()

    assert [task.done() for task in loud] == [False, False, True]
    assert house.sample("dynamo_admission_queue_requests", model="m", tenant="loud", priority="normal") == 2
    await refused(loud[2])
    house.load(IDLE, 1)
    await house.after()
    house.load(IDLE, 1)
    await house.after()
    assert quiet.done()


@at_manual_time(requests_per_worker=1)
async def test_a_retry_goes_first_within_its_tenant(house: House) -> None:
    permits = [await house.ask() for _ in range(2)]
    first = house.asks()
    await house.after(1)
    retry = house.asks(retries=1)
    await house.after()
    permits.pop().release(0)
    await house.after()

    assert (first.done(), retry.done()) == (False, True)


@at_manual_time(tenants={"a": TenantSettings(concurrency=1)})
async def test_a_tenant_has_its_limit_while_others_go_on(house: House) -> None:
    held = await house.ask("a")
    second = house.asks("a")
    await house.after()
    other = await house.ask("b")

    assert not second.done()
    held.release(1)
    await house.after()
    (await second).release(1)
    other.release(1)


@at_manual_time(requests_per_worker=5, headroom=0.2)
async def test_places_are_kept_for_tenants_that_have_less_than_their_share(house: House) -> None:
    loud = [house.asks("loud") for _ in range(12)]
    await house.after()
    let_in = sum(task.done() for task in loud)
    quiet = [await house.ask("quiet") for _ in range(2)]
    third = house.asks("quiet")
    await house.after()

    assert let_in == 8
    assert not third.done()
    # What comes back is for the quiet tenant, and kept for it.
    (await loud[0]).release(1)
    await house.after()
    assert third.done()
    (await loud[1]).release(1)
    await house.after()
    assert sum(task.done() for task in loud) == 8
    for permit in [*quiet, await third]:
        permit.release(1)
    await house.after()
    assert sum(task.done() for task in loud) == 10


@at_manual_time(default_tenant=TenantSettings(tokens_per_second=10, burst_tokens=10))
async def test_a_tenant_without_tokens_waits_until_it_has_some(house: House) -> None:
    (await house.ask(tokens=50, wants=100)).release(0)
    asked = house.asks()
    await house.after(3)
    early = asked.done()
    await house.after(2)

    assert early is False
    (await asked).release(0)


@at_manual_time(default_tenant=TenantSettings(tokens_per_second=10, burst_tokens=10))
async def test_no_timer_is_kept_for_a_tenant_without_waiting_requests(house: House) -> None:
    (await house.ask(tokens=50)).release(0)
    asked = house.asks()
    await house.after()
    before = house.admission._timer
    asked.cancel()
    await house.after()

    assert (before is None, house.admission._timer) == (False, None)


@at_manual_time()
async def test_a_permit_counts_once_however_often_it_is_released(house: House) -> None:
    first, second = await house.ask(), await house.ask()
    first.release(1)
    first.release(1)

    assert house.admission.held == 1
    second.release(1)


@at_manual_time(default_tenant=TenantSettings(tokens_per_second=10, burst_tokens=10))
async def test_a_tenant_in_debt_is_refused_with_the_time_of_its_debt(house: House) -> None:
    (await house.ask(tokens=410)).release(0)

    error = await refused(house.ask())

    assert error.retry_after == pytest.approx(40, abs=0.1)
    assert "tenant" in str(error)
    assert house.sample("dynamo_admission_refusals_total", model="m", tenant="a", reason="rate") == 1


@at_manual_time()
async def test_expected_tokens_come_from_the_request_or_past_answers(house: House) -> None:
    model = house.admission._model("m")
    asked = PreprocessedRequest(model="m", token_ids=[1, 2, 3])
    before = model.cost(asked)
    for _ in range(200):
        (await house.ask()).release(10)
    learned = model.cost(asked)
    asked.stop_conditions.max_tokens = 4
    bounded = model.cost(asked)
    asked.stop_conditions.max_tokens = None
    asked.routing = RoutingHints(expected_output_tokens=99)

    assert before == 3 + 256
    assert learned == pytest.approx(13, abs=0.1)
    assert (bounded, model.cost(asked)) == (7, 102)


@pytest.mark.parametrize("moment", ["before the line moves", "before it can run"])
def test_a_request_cancelled_at_its_admission_returns_its_permit(moment: str) -> None:
    async def check(house: House) -> None:
        held = await house.ask()
        others = [await house.ask()]
        asked, behind = house.asks(), house.asks()
        await house.after()
        held.release(1)
        # The line moves in the next turn, and who is let in runs in the one after that.
        if moment == "before the line moves":
            asked.cancel()
        else:
            house.loop.call_soon(asked.cancel)
        await house.after()

        assert asked.cancelled()
        others.append(await behind)
        assert house.admission.held == 2
        for permit in others:
            permit.release(0)
        assert house.admission.held == 0

    run(check, requests_per_worker=1)


@at_manual_time()
async def test_closing_refuses_waiting_requests(house: House) -> None:
    house.load(BUSY)
    asked = house.asks()
    await house.after()
    await house.admission.aclose()

    await refused(asked)
    await refused(house.ask())
    assert house.admission.held == 0


@at_manual_time()
async def test_metrics_follow_the_queue_and_do_not_grow_without_bound(house: House) -> None:
    house.load(BUSY)
    asked = [house.asks(f"t{number}", priority=1) for number in range(80)]
    await house.after()

    depth = "dynamo_admission_queue_requests"
    assert house.sample(depth, model="m", tenant="t0", priority="high") == 1
    assert house.sample(depth, model="m", tenant=OTHERS, priority="high") == 16
    for task in asked:
        task.cancel()
    await house.after()
    assert house.sample(depth, model="m", tenant="t0", priority="high") == 0
    assert house.sample(depth, model="m", tenant=OTHERS, priority="high") == 0


@at_manual_time(requests_per_worker=1)
async def test_more_places_admit_waiting_requests_and_fewer_end_none(house: House) -> None:
    asked = [house.asks() for _ in range(6)]
    await house.after()
    before = sum(task.done() for task in asked)
    await house.reconfigure(requests_per_worker=2)
    await house.after()
    more = sum(task.done() for task in asked)
    await house.reconfigure(requests_per_worker=1)
    await house.after()

    assert (before, more, sum(task.done() for task in asked)) == (2, 4, 4)
    for task in asked[:4]:
        (await task).release(1)
    await house.after()
    assert sum(task.done() for task in asked) == 6


@at_manual_time(max_queue=1)
async def test_new_queue_limits_apply_to_later_requests(house: House) -> None:
    house.load(BUSY)
    house.asks()
    await house.after()
    assert (await refused(house.ask())).retry_after == 7.0

    await house.reconfigure(max_queue=2, max_wait=1.0)
    asked = house.asks()
    await house.after()
    assert not asked.done()
    await house.after(1.1)

    await refused(asked)


@at_manual_time()
async def test_a_rate_begins_with_savings_however_much_the_tenant_had_used_before(house: House) -> None:
    held = await house.ask("a", tokens=5000, wants=0)
    await house.reconfigure(tenants={"a": TenantSettings(tokens_per_second=10)})

    (await house.ask("a", tokens=50, wants=0)).release(0)
    held.release(0)
    assert house.admission.held == 0


@at_manual_time(tenants={"a": TenantSettings(tokens_per_second=10, burst_tokens=10)}, max_wait=100)
async def test_a_debt_is_paid_at_the_rate_of_its_time(house: House) -> None:
    (await house.ask("a", tokens=100, wants=0)).release(0)
    # It owes 90, and pays 50 of them before the rate changes.
    await house.after(5.0)
    await house.reconfigure(tenants={"a": TenantSettings(tokens_per_second=1, burst_tokens=10)})

    asked = house.asks("a")
    await house.after(39.0)
    assert not asked.done()
    await house.after(1.1)
    (await asked).release(0)


_STEPS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(["a", "b", "c"]), st.integers(-1, 1), st.integers(0, 3)),
    st.tuples(st.just("release"), st.integers(0, 50), st.integers(0, 500)),
    st.tuples(st.just("cancel"), st.integers(0, 50)),
    st.tuples(st.just("load"), st.booleans(), st.sampled_from([(1,), (2,), (1, 2)])),
    st.tuples(st.just("wait"), st.floats(0, 8)),
    st.tuples(st.just("turn")),
    st.tuples(st.just("reconfigure"), st.floats(0.1, 10), st.none() | st.floats(1, 200), st.floats(0, 0.5)),
)


@settings(deadline=None)
@given(
    steps=st.lists(_STEPS, max_size=60),
    queue=st.integers(0, 4),
    workers=st.none() | st.integers(1, 3),
    limited=st.booleans(),
)
def test_limits_hold_and_nothing_is_left_in_any_history(
    steps: list[tuple[Any, ...]], queue: int, workers: int | None, limited: bool
) -> None:
    tenants = {"c": TenantSettings(concurrency=2, tokens_per_second=100, burst_tokens=10)} if limited else {}

    async def check(house: House) -> None:
        tasks: list[asyncio.Task[Permit]] = []
        out: list[Permit] = []
        for step, *values in steps:
            if step == "ask":
                tasks.append(
                    house.asks(values[0], priority=values[1], retries=values[2], deadline=house.loop.time() + 5)
                )
            elif step == "release" and out:
                out.pop(values[0] % len(out)).release(values[1])
            elif step == "cancel" and tasks:
                tasks[values[0] % len(tasks)].cancel()
            elif step == "load":
                house.load(BUSY if values[0] else IDLE, *values[1])
            elif step == "wait":
                await house.after(values[0])
            elif step == "turn":
                await house.after()
            elif step == "reconfigure":
                weight, rate, headroom = values
                other = house.admission.config.tenant("c").model_copy(
                    update={"weight": weight, "tokens_per_second": rate}
                )
                await house.reconfigure(tenants={"b": TenantSettings(weight=weight), "c": other}, headroom=headroom)
            running = house.admission._model("m").queue.running
            assert workers is None or running <= workers * 2
            assert len(house.admission._model("m").queue) <= queue
            assert not limited or house.admission._limits.running("c") <= 2
            for task in [one for one in tasks if one.done()]:
                tasks.remove(task)
                if not task.cancelled() and task.exception() is None:
                    out.append(task.result())
        for task in tasks:
            task.cancel()
        await house.after()
        for permit in out + [one.result() for one in tasks if not one.cancelled() and one.exception() is None]:
            permit.release(1)
        await house.after()
        model = house.admission._model("m")
        assert (house.admission.held, len(model.queue.shares), model.queue.running) == (0, 0, 0)
        for name in ("a", "b", "c"):
            assert house.admission._limits.running(name) == 0
            assert house.sample("dynamo_admission_running_requests", model="m", tenant=name) == 0
            for rank in ("low", "normal", "high"):
                assert house.sample("dynamo_admission_queue_requests", model="m", tenant=name, priority=rank) == 0
        assert house.admission._timer is None

    run(check, max_queue=queue, requests_per_worker=workers, tenants=tenants)
