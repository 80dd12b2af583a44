"""Admissions that break one promise each, and what of the kit must find it.

Not collected with the other tests: `test_the_kits_find_broken_parts` runs this file and compares.
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


class Broken(AdmissionKit):
    """The kit over one admission."""

    LIMIT = LIMIT
    admission: ClassVar[type[Small]] = Small
    #: The checks that must fail, and no others may.
    FAILS: ClassVar[frozenset[str]] = frozenset()
    #: The seconds that a check waits which must fail, and any other.
    PATIENCE = (1.0, 10.0)

    @pytest.fixture
    def make_admission(self) -> AdmissionFactory:
        return lambda services: self.admission(PluginConfig(), services)

    def held(self, admission: Any) -> int:
        held: int = admission.out + len(admission.queue)
        return held


class TestWithoutAFault(Broken):
    pass


class TestLetsEverybodyIn(Broken):
    class admission(Small):  # noqa: N801 - the part that is exchanged, as the attribute is named
        def full(self, pools: Sequence[Any]) -> bool:
            return False

    FAILS = frozenset(
        {
            "test_a_request_is_refused_while_all_workers_are_busy",
            "test_a_refusal_says_when_to_come_back",
            "test_every_pool_that_is_needed_must_have_a_free_worker",
            "test_it_lets_in_again_once_a_worker_is_free",
            "test_the_deadline_of_who_asks_bounds_a_wait",
            "test_a_refusal_leaves_nothing_behind",
            "test_a_request_that_is_given_up_while_it_asks_leaves_nothing_behind",
        }
    )


class TestWantsAllWorkersFree(Broken):
    class admission(Small):  # noqa: N801
        def full(self, pools: Sequence[Any]) -> bool:
            return any(len(pool.eligible()) < len(pool.instances) for pool in pools)

    FAILS = frozenset({"test_one_free_worker_is_enough", "test_it_lets_in_again_once_a_worker_is_free"})


class TestLooksAtTheFirstPoolOnly(Broken):
    class admission(Small):  # noqa: N801
        def full(self, pools: Sequence[Any]) -> bool:
            return super().full(pools[:1])

    FAILS = frozenset({"test_every_pool_that_is_needed_must_have_a_free_worker"})


class TestTakesAnEmptyPoolForAFullOne(Broken):
    class admission(Small):  # noqa: N801
        def full(self, pools: Sequence[Any]) -> bool:
            return any(not pool.eligible() for pool in pools)

    FAILS = frozenset({"test_a_pool_without_workers_is_not_an_overload"})


class TestRemembersTheLoadOfAnotherModel(Broken):
    class admission(Small):  # noqa: N801
        busy = 0

        def is_busy(self, model: str, ranks: Sequence[RankLoad]) -> bool:
            busy = super().is_busy(model, ranks)
            self.busy = self.busy + 1 if busy else 0
            return busy

        def full(self, pools: Sequence[Any]) -> bool:
            return super().full(pools) or self.busy > 1

    FAILS = frozenset({"test_a_model_is_not_refused_for_the_load_of_another"})


class TestTakesWhatIsAtTheThresholdForMore(Broken):
    class admission(Small):  # noqa: N801
        def is_busy(self, model: str, ranks: Sequence[RankLoad]) -> bool:
            own = self.services.thresholds.of(model)
            share = own.active_decode_blocks_threshold
            return super().is_busy(model, ranks) or (
                share is not None
                and all(rank.active_decode_blocks >= share * (rank.kv_total_blocks or 1) for rank in ranks)
            )

    FAILS = frozenset({"test_a_load_at_the_threshold_is_not_over_it"})


class TestStaysClosedOnceItWas(Broken):
    class admission(Small):  # noqa: N801
        closed = False

        def full(self, pools: Sequence[Any]) -> bool:
            self.closed = self.closed or (len(pools) == 1 and super().full(pools))
            return self.closed or super().full(pools)

    FAILS = frozenset(
        {
            "test_it_lets_in_again_once_a_worker_is_free",
            "test_a_request_that_is_given_up_while_it_asks_leaves_nothing_behind",
        }
    )


class TestNeverLetsAnybodyIn(Broken):
    class admission(Small):  # noqa: N801
        def full(self, pools: Sequence[Any]) -> bool:
            return True

    FAILS = frozenset(
        {
            "test_a_request_is_let_in_while_workers_are_free",
            "test_one_free_worker_is_enough",
            "test_every_pool_that_is_needed_must_have_a_free_worker",
            "test_a_pool_without_workers_is_not_an_overload",
            "test_a_model_is_not_refused_for_the_load_of_another",
            "test_it_lets_in_again_once_a_worker_is_free",
            "test_a_load_at_the_threshold_is_not_over_it",
            "test_a_released_permit_leaves_nothing_behind",
            "test_permits_are_released_in_any_order",
            "test_a_request_that_is_given_up_while_it_asks_leaves_nothing_behind",
            "test_a_place_is_free_again_for_exactly_one_once_it_is_released",
        }
    )


class TestDoesNotSayWhenToComeBack(Broken):
    class admission(Small):  # noqa: N801
        def retry_after(self, model: str) -> float:
            return 0.0

    FAILS = frozenset({"test_a_refusal_says_when_to_come_back"})


class TestWaitsForever(Broken):
    class admission(Small):  # noqa: N801
        async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[Any]) -> Permit:
            while self.full(pools):  # noqa: ASYNC110 - without an end, as is the point
                await asyncio.sleep(0.01)
            return await super().admit(request, principal, pools)

    FAILS = frozenset(
        {
            "test_a_request_is_refused_while_all_workers_are_busy",
            "test_a_refusal_says_when_to_come_back",
            "test_every_pool_that_is_needed_must_have_a_free_worker",
            "test_it_lets_in_again_once_a_worker_is_free",
            "test_the_deadline_of_who_asks_bounds_a_wait",
            "test_a_refusal_leaves_nothing_behind",
        }
    )


class TestIgnoresTheDeadlineOfWhoAsks(Broken):
    class admission(Small):  # noqa: N801
        async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[Any]) -> Permit:
            if principal.deadline is not None:
                await asyncio.sleep(0.6)
            return await super().admit(request, Principal(), pools)

    FAILS = frozenset({"test_the_deadline_of_who_asks_bounds_a_wait"})


class TestCannotBeClosedWithoutAStart(Broken):
    class admission(Small):  # noqa: N801
        started = False

        async def start(self) -> None:
            self.started = True

        async def aclose(self) -> None:
            if not self.started:
                raise RuntimeError("not started")

    FAILS = frozenset({"test_it_can_be_closed_twice_and_without_a_start"})


class TestCountsWhoIsRefused(Broken):
    class admission(Small):  # noqa: N801
        async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[Any]) -> Permit:
            try:
                return await super().admit(request, principal, pools)
            except ServiceOverloaded:
                self.out += 1
                raise

    FAILS = frozenset(
        {"test_a_refusal_leaves_nothing_behind", "test_every_pool_that_is_needed_must_have_a_free_worker"}
    )


class TestCountsWhoLooks(Broken):
    class admission(Small):  # noqa: N801
        looks = 0

        def precheck(self, model: str, principal: Principal, pools: Sequence[Any]) -> None:
            self.looks += 1
            # Only who looks and does not come is forgotten.
            self.out += self.looks == 5

        async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[Any]) -> Permit:
            self.looks -= 1
            return await super().admit(request, principal, pools)

    FAILS = frozenset({"test_a_look_before_holds_nothing"})


class TestKeepsThePlaceOfWhoGaveUp(Broken):
    class admission(Small):  # noqa: N801
        async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[Any]) -> Permit:
            try:
                return await super().admit(request, principal, pools)
            except asyncio.CancelledError:
                self.queue.append(asyncio.get_running_loop().create_future())
                raise

    FAILS = frozenset({"test_a_request_that_is_given_up_while_it_asks_leaves_nothing_behind"})


class Forgetful(Place):
    """Releases what came first only."""

    __slots__ = ()

    def release(self, output_tokens: int) -> None:
        if self.admission.out == LIMIT or not self.admission.last:
            super().release(output_tokens)
        self.admission.last = self.admission.out > 0


class TestForgetsPermitsThatAreReleasedLast(Broken):
    class admission(Small):  # noqa: N801
        place = Forgetful

    FAILS = frozenset({"test_permits_are_released_in_any_order"})


class ByTokens(Place):
    """Is not released by a long answer."""

    __slots__ = ()

    def release(self, output_tokens: int) -> None:
        if output_tokens < 4:
            super().release(output_tokens)


class TestDoesNotCountReleasesWithTokens(Broken):
    class admission(Small):  # noqa: N801
        place = ByTokens

    FAILS = frozenset({"test_a_released_permit_leaves_nothing_behind"})


class TestLetsInTwoForOneThatLeaves(Broken):
    class admission(Small):  # noqa: N801
        bonus = 0

        def pass_on(self) -> None:
            for ticket in self.queue:
                if not ticket.done():
                    ticket.set_result(None)
            self.bonus += 1 if len(self.queue) > 1 else 0
            self.out -= 1 if len(self.queue) > 1 else 0

    FAILS = frozenset({"test_a_place_is_free_again_for_exactly_one_once_it_is_released"})


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
    admission = Metered


class TestALimitWithoutAFault(BrokenLimit):
    pass


class TestALimitThatComesBackWithoutAFault(BrokenLimit):
    class admission(Metered):  # noqa: N801
        def over(self) -> DynamoError:
            return RateLimited("eight requests a minute", retry_after=60.0)


class TestSaysThatWorkersAreBusyForALimit(BrokenLimit):
    class admission(Metered):  # noqa: N801
        def over(self) -> DynamoError:
            return ServiceOverloaded(retry_after=7.0)

    FAILS = frozenset({"test_a_client_over_its_limit_is_told_so"})


class TestSaysNothingOfTheLimit(BrokenLimit):
    class admission(Metered):  # noqa: N801
        def over(self) -> DynamoError:
            return QuotaExceeded(" ")

    FAILS = frozenset({"test_a_client_over_its_limit_is_told_so"})


class TestDoesNotSayWhenTheLimitIsWholeAgain(BrokenLimit):
    class admission(Metered):  # noqa: N801
        def over(self) -> DynamoError:
            return RateLimited("eight requests a minute", retry_after=0.0)

    FAILS = frozenset({"test_a_client_over_its_limit_is_told_so"})


class TestCountsWhatItRefusesForALimit(BrokenLimit):
    class admission(Metered):  # noqa: N801
        def over(self) -> DynamoError:
            self.out += 1
            return super().over()

    FAILS = frozenset({"test_a_refusal_for_a_limit_leaves_nothing_behind"})


class TestHasNoLimitThoughItSaysSo(BrokenLimit):
    class admission(Metered):  # noqa: N801
        async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[Any]) -> Permit:
            self.spent = 0
            return await super().admit(request, principal, pools)

    FAILS = frozenset({"test_a_client_over_its_limit_is_told_so", "test_a_refusal_for_a_limit_leaves_nothing_behind"})


class TestRefusesByLoadThoughItSaysNot(BrokenLimit):
    class admission(Metered):  # noqa: N801
        ARMS_THRESHOLDS = True

        def full(self, pools: Sequence[Any]) -> bool:
            return Small.full(self, pools)

    FAILS = frozenset({"test_one_that_does_not_refuse_by_load_lets_in_while_all_workers_are_busy"})


class TestKeepsThePlaceOfOneThatGaveUpAtItsLimit(BrokenLimit):
    class admission(Metered):  # noqa: N801
        async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[Any]) -> Permit:
            try:
                return await super().admit(request, principal, pools)
            except asyncio.CancelledError:
                self.queue.append(asyncio.get_running_loop().create_future())
                raise

    FAILS = frozenset({"test_a_request_that_is_given_up_while_it_asks_leaves_nothing_behind"})
