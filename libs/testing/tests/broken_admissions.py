"""Admissions that break one promise each, and what of the kit must find it.

Not collected with the other tests: `test_kits_on_broken_parts` runs this file and compares.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from dynamo_core import Admission, AdmissionServices, Permit, PluginConfig, PreprocessedRequest, Principal, RankLoad
from dynamo_core.errors import DynamoError, QuotaExceeded, RateLimited, ServiceOverloaded
from dynamo_testing.admission_kit import AdmissionFactory, AdmissionKit

from libs.testing.tests.planted import Planted, needs_a_start, notes_its_start

LIMIT = 2

BUDGET = 8

QUEUE_WAIT = 0.1


class Place(Permit):
    __slots__ = ("admission",)

    def __init__(self, admission: Small) -> None:
        self.admission = admission

    def release(self, output_tokens: int) -> None:
        self.admission.out -= 1
        self.admission.pass_on()


class Small(Admission):
    """Without a fault: two requests at a time, the others wait a while; none while all workers are busy."""

    NAME = "small"
    ARMS_THRESHOLDS = True
    #: What a permit is.
    place: ClassVar[type[Place]] = Place

    def __init__(self, config: PluginConfig, services: AdmissionServices) -> None:
        super().__init__(config, services)
        self.out = 0
        self.last = False
        self.queue: deque[asyncio.Future[None]] = deque()

    def is_busy(self, model: str, ranks: Sequence[RankLoad]) -> bool:
        return self.services.thresholds.of(model).busy(ranks)

    def full(self, pools: Sequence[Any]) -> bool:
        return any(pool.instances and not pool.eligible() for pool in pools)

    def retry_after(self, model: str) -> float:
        return self.services.retry_after(model)

    def pass_on(self) -> None:
        if self.queue and not self.queue[0].done():
            self.queue[0].set_result(None)

    async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[Any]) -> Permit:
        loop = asyncio.get_running_loop()
        until = loop.time() + QUEUE_WAIT
        if principal.deadline is not None:
            until = min(until, principal.deadline)
        while self.out >= LIMIT or self.full(pools):
            ticket = loop.create_future()
            self.queue.append(ticket)
            try:
                async with asyncio.timeout_at(until):
                    await ticket
            except TimeoutError:
                raise ServiceOverloaded(retry_after=self.retry_after(request.model)) from None
            finally:
                self.queue.remove(ticket)
        self.out += 1
        return self.place(self)


class Broken(Planted, AdmissionKit):
    """The kit over one admission."""

    LIMIT = LIMIT
    PART = Small
    #: The seconds that a check waits which must fail, and any other.
    PATIENCE = (1.0, 10.0)

    @pytest.fixture
    def make_admission(self) -> AdmissionFactory:
        return lambda services: self.PART(PluginConfig(), services)

    def held(self, admission: Any) -> int:
        held: int = admission.out + len(admission.queue)
        return held


class TestWithoutAFault(Broken):
    pass


TestLetsEverybodyIn = Broken.failing(
    "test_a_request_is_refused_while_all_workers_are_busy",
    "test_a_refusal_has_a_retry_after",
    "test_every_pool_that_is_needed_must_have_a_free_worker",
    "test_requests_are_admitted_again_once_a_worker_is_free",
    "test_the_clients_deadline_bounds_a_wait",
    "test_a_refusal_leaves_nothing_behind",
    "test_a_request_cancelled_while_asking_leaves_nothing_behind",
    full=lambda real, self, pools: False,
)


TestWantsAllWorkersFree = Broken.failing(
    "test_one_free_worker_is_enough",
    "test_requests_are_admitted_again_once_a_worker_is_free",
    full=lambda real, self, pools: any(len(pool.eligible()) < len(pool.instances) for pool in pools),
)


TestLooksAtTheFirstPoolOnly = Broken.failing(
    "test_every_pool_that_is_needed_must_have_a_free_worker", full=lambda real, self, pools: real(pools[:1])
)


TestTakesAnEmptyPoolForAFullOne = Broken.failing(
    "test_a_pool_without_workers_is_not_an_overload",
    full=lambda real, self, pools: any(not pool.eligible() for pool in pools),
)


def _remembers_the_load_of_another_model_is_busy(real: Any, self: Any, model: Any, ranks: Any) -> Any:
    busy = real(model, ranks)
    self.busy = self.busy + 1 if busy else 0
    return busy


TestRemembersTheLoadOfAnotherModel = Broken.failing(
    "test_a_model_is_not_refused_for_the_load_of_another",
    busy=0,
    is_busy=_remembers_the_load_of_another_model_is_busy,
    full=lambda real, self, pools: real(pools) or self.busy > 1,
)


def _takes_what_is_at_the_threshold_for_more(real: Any, self: Any, model: Any, ranks: Any) -> Any:
    own = self.services.thresholds.of(model)
    share = own.active_decode_blocks_threshold
    return real(model, ranks) or (
        share is not None and all(rank.active_decode_blocks >= share * (rank.kv_total_blocks or 1) for rank in ranks)
    )


TestTakesWhatIsAtTheThresholdForMore = Broken.failing(
    "test_a_load_at_the_threshold_is_not_over_it", is_busy=_takes_what_is_at_the_threshold_for_more
)


def _stays_closed_once_it_was(real: Any, self: Any, pools: Any) -> Any:
    self.closed = self.closed or (len(pools) == 1 and real(pools))
    return self.closed or real(pools)


TestStaysClosedOnceItWas = Broken.failing(
    "test_requests_are_admitted_again_once_a_worker_is_free",
    "test_a_request_cancelled_while_asking_leaves_nothing_behind",
    closed=False,
    full=_stays_closed_once_it_was,
)


TestNeverLetsAnybodyIn = Broken.failing(
    "test_a_request_is_admitted_while_workers_are_free",
    "test_one_free_worker_is_enough",
    "test_every_pool_that_is_needed_must_have_a_free_worker",
    "test_a_pool_without_workers_is_not_an_overload",
    "test_a_model_is_not_refused_for_the_load_of_another",
    "test_requests_are_admitted_again_once_a_worker_is_free",
    "test_a_load_at_the_threshold_is_not_over_it",
    "test_a_released_permit_leaves_nothing_behind",
    "test_permits_are_released_in_any_order",
    "test_a_request_cancelled_while_asking_leaves_nothing_behind",
    "test_a_released_place_admits_exactly_one_request",
    full=lambda real, self, pools: True,
)


TestDoesNotSayWhenToComeBack = Broken.failing(
    "test_a_refusal_has_a_retry_after", retry_after=lambda real, self, model: 0.0
)


async def _waits_forever(real: Any, self: Any, request: Any, principal: Any, pools: Any) -> Any:
    while self.full(pools):  # noqa: ASYNC110 - without an end, as is the point
        await asyncio.sleep(0.01)
    return await real(request, principal, pools)


TestWaitsForever = Broken.failing(
    "test_a_request_is_refused_while_all_workers_are_busy",
    "test_a_refusal_has_a_retry_after",
    "test_every_pool_that_is_needed_must_have_a_free_worker",
    "test_requests_are_admitted_again_once_a_worker_is_free",
    "test_the_clients_deadline_bounds_a_wait",
    "test_a_refusal_leaves_nothing_behind",
    admit=_waits_forever,
)


async def _ignores_the_deadline_of_who_asks(real: Any, self: Any, request: Any, principal: Any, pools: Any) -> Any:
    if principal.deadline is not None:
        await asyncio.sleep(0.6)
    return await real(request, Principal(), pools)


TestIgnoresTheDeadlineOfWhoAsks = Broken.failing(
    "test_the_clients_deadline_bounds_a_wait", admit=_ignores_the_deadline_of_who_asks
)


TestCannotBeClosedWithoutAStart = Broken.failing(
    "test_the_admission_can_be_closed_twice_and_without_a_start",
    start=notes_its_start,
    aclose=needs_a_start,
)


async def _counts_who_is_refused(real: Any, self: Any, request: Any, principal: Any, pools: Any) -> Any:
    try:
        return await real(request, principal, pools)
    except ServiceOverloaded:
        self.out += 1
        raise


TestCountsWhoIsRefused = Broken.failing(
    "test_a_refusal_leaves_nothing_behind",
    "test_every_pool_that_is_needed_must_have_a_free_worker",
    admit=_counts_who_is_refused,
)


def _counts_who_looks_precheck(real: Any, self: Any, model: Any, principal: Any, pools: Any) -> Any:
    self.looks += 1
    self.out += self.looks == 5


async def _counts_who_looks_admit(real: Any, self: Any, request: Any, principal: Any, pools: Any) -> Any:
    self.looks -= 1
    return await real(request, principal, pools)


TestCountsWhoLooks = Broken.failing(
    "test_a_precheck_holds_nothing", looks=0, precheck=_counts_who_looks_precheck, admit=_counts_who_looks_admit
)


async def _keeps_the_place_of_who_gave_up(real: Any, self: Any, request: Any, principal: Any, pools: Any) -> Any:
    try:
        return await real(request, principal, pools)
    except asyncio.CancelledError:
        self.queue.append(asyncio.get_running_loop().create_future())
        raise


TestKeepsThePlaceOfWhoGaveUp = Broken.failing(
    "test_a_request_cancelled_while_asking_leaves_nothing_behind", admit=_keeps_the_place_of_who_gave_up
)


class Forgetful(Place):
    """Releases what came first only."""

    __slots__ = ()

    def release(self, output_tokens: int) -> None:
        if self.admission.out == LIMIT or not self.admission.last:
            super().release(output_tokens)
        self.admission.last = self.admission.out > 0


TestForgetsPermitsThatAreReleasedLast = Broken.failing("test_permits_are_released_in_any_order", place=Forgetful)


class ByTokens(Place):
    """Is not released by a long answer."""

    __slots__ = ()

    def release(self, output_tokens: int) -> None:
        if output_tokens < 4:
            super().release(output_tokens)


TestDoesNotCountReleasesWithTokens = Broken.failing("test_a_released_permit_leaves_nothing_behind", place=ByTokens)


def _lets_in_two_for_one_that_leaves(real: Any, self: Any) -> Any:
    for ticket in self.queue:
        if not ticket.done():
            ticket.set_result(None)
    self.bonus += 1 if len(self.queue) > 1 else 0
    self.out -= 1 if len(self.queue) > 1 else 0


TestLetsInTwoForOneThatLeaves = Broken.failing(
    "test_a_released_place_admits_exactly_one_request", bonus=0, pass_on=_lets_in_two_for_one_that_leaves
)


# Limits of clients.


class Metered(Small):
    """Without a fault: two requests at a time, eight in all, whatever the load of the workers."""

    NAME = "metered"
    ARMS_THRESHOLDS = False
    REFUSES_BY_LOAD = False

    def __init__(self, config: PluginConfig, services: AdmissionServices) -> None:
        super().__init__(config, services)
        self.spent = 0

    def full(self, pools: Sequence[Any]) -> bool:
        return False

    def over(self) -> DynamoError:
        return QuotaExceeded("all eight requests are used up")

    async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[Any]) -> Permit:
        if self.spent == BUDGET:
            raise self.over()
        permit = await super().admit(request, principal, pools)
        self.spent += 1
        return permit


class BrokenLimit(Broken):
    """The kit over one that has limits."""

    BUDGET = BUDGET
    PART = Metered


class TestALimitWithoutAFault(BrokenLimit):
    pass


TestALimitThatComesBackWithoutAFault = BrokenLimit.failing(
    over=lambda real, self: RateLimited("eight requests a minute", retry_after=60.0)
)


TestSaysThatWorkersAreBusyForALimit = BrokenLimit.failing(
    "test_a_client_over_its_limit_is_refused_with_the_reason",
    over=lambda real, self: ServiceOverloaded(retry_after=7.0),
)


TestSaysNothingOfTheLimit = BrokenLimit.failing(
    "test_a_client_over_its_limit_is_refused_with_the_reason", over=lambda real, self: QuotaExceeded(" ")
)


TestDoesNotSayWhenTheLimitIsWholeAgain = BrokenLimit.failing(
    "test_a_client_over_its_limit_is_refused_with_the_reason",
    over=lambda real, self: RateLimited("eight requests a minute", retry_after=0.0),
)


def _counts_what_it_refuses_for_a_limit(real: Any, self: Any) -> Any:
    self.out += 1
    return real()


TestCountsWhatItRefusesForALimit = BrokenLimit.failing(
    "test_a_refusal_for_a_limit_leaves_nothing_behind", over=_counts_what_it_refuses_for_a_limit
)


async def _has_no_limit_though_it_says_so(real: Any, self: Any, request: Any, principal: Any, pools: Any) -> Any:
    self.spent = 0
    return await real(request, principal, pools)


TestHasNoLimitThoughItSaysSo = BrokenLimit.failing(
    "test_a_client_over_its_limit_is_refused_with_the_reason",
    "test_a_refusal_for_a_limit_leaves_nothing_behind",
    admit=_has_no_limit_though_it_says_so,
)


TestRefusesByLoadThoughItSaysNot = BrokenLimit.failing(
    "test_an_admission_that_ignores_load_admits_while_workers_are_busy",
    ARMS_THRESHOLDS=True,
    full=lambda real, self, pools: Small.full(self, pools),
)


async def _keeps_the_place_of_one_that_gave_up_at_its_limit(
    real: Any, self: Any, request: Any, principal: Any, pools: Any
) -> Any:
    try:
        return await real(request, principal, pools)
    except asyncio.CancelledError:
        self.queue.append(asyncio.get_running_loop().create_future())
        raise


TestKeepsThePlaceOfOneThatGaveUpAtItsLimit = BrokenLimit.failing(
    "test_a_request_cancelled_while_asking_leaves_nothing_behind",
    admit=_keeps_the_place_of_one_that_gave_up_at_its_limit,
)
