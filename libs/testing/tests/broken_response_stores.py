"""Response stores that break one promise each, and what of the kit must find it.

Not collected with the other tests: `test_kits_on_broken_parts` runs this file and compares.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from dynamo_core import Expected, PluginConfig, ResponseStore, ResponseStoreServices, StoreFull
from dynamo_core.errors import Unavailable
from dynamo_testing.response_store_kit import ResponseStoreFactory, ResponseStoreKit

from libs.testing.tests.planted import Planted, closes_once, own

BOUND = 4096

Place = tuple[str, str, str]

Shelf = dict[Place, tuple[bytes, float]]


class Small(ResponseStore):
    """Without a fault: what all of one test share, as if it were on a server."""

    NAME = "small"

    def __init__(self, config: PluginConfig, services: ResponseStoreServices, shelf: Shelf, away: list[bool]) -> None:
        super().__init__(config, services)
        self.shelf = shelf
        self.away = away
        self.closed = 0

    def place(self, owner: str, key: str) -> Place:
        return self.services.namespace, owner, key

    def live(self, place: Place) -> bytes | None:
        value, expires = self.shelf.get(place, (b"", 0.0))
        return value if expires > self.now() else None

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def reach(self) -> None:
        if self.away[0]:
            raise Unavailable("away")

    async def wait(self) -> None:
        """Wait where another writer may come between."""

    def holds(self, owner: str, expected: Mapping[str, bytes | None]) -> bool:
        return all(self.live(self.place(owner, key)) == value for key, value in expected.items())

    def fits(self, records: Mapping[str, bytes]) -> bool:
        return sum(map(len, records.values())) <= BOUND

    def make_room(self) -> None:
        while sum(len(value) for value, _ in self.shelf.values()) > BOUND:
            held = Counter[str]()
            for (_, owner, _), (value, _) in self.shelf.items():
                held[owner] += len(value)
            [(largest, _)] = held.most_common(1)
            del self.shelf[next(place for place in self.shelf if place[1] == largest)]

    def write(self, place: Place, value: bytes, ttl: float) -> None:
        self.shelf.pop(place, None)
        self.shelf[place] = (value, self.now() + ttl)

    async def put(self, owner: str, records: Mapping[str, bytes], ttl: float, expected: Expected = None) -> bool:
        self.reach()
        if not self.holds(owner, expected or {}):
            return False
        await self.wait()
        if not self.fits(records):
            raise StoreFull("too much")
        for key, value in records.items():
            self.write(self.place(owner, key), value, ttl)
        self.make_room()
        return True

    def renew(self, place: Place, value: bytes, ttl: float) -> None:
        self.write(place, value, ttl)

    async def get(self, owner: str, keys: Sequence[str], ttl: float | None = None) -> list[bytes | None]:
        self.reach()
        places = [self.place(owner, key) for key in keys]
        found = [self.live(place) for place in places]
        for place, value in zip(places, found, strict=True):
            if value is not None and ttl is not None:
                self.renew(place, value, ttl)
        return found

    async def delete(self, owner: str, keys: Sequence[str]) -> None:
        self.reach()
        for key in keys:
            self.shelf.pop(self.place(owner, key), None)


class Broken(Planted, ResponseStoreKit):
    """The kit over one store."""

    BOUND = BOUND
    WAIT = 3.0
    PART = Small

    @pytest.fixture
    def make_store(self) -> ResponseStoreFactory:
        self.shelf: Shelf = {}
        self.away = [False]
        return lambda services: self.PART(PluginConfig(), services, self.shelf, self.away)

    async def take_away(self, store: ResponseStore) -> None:
        self.away[0] = True

    async def bring_back(self, store: ResponseStore) -> None:
        self.away[0] = False


class TestWithoutAFault(Broken):
    pass


TestTrimsWhatItKeeps = Broken.failing(
    "test_a_record_is_read_as_it_was_written",
    "test_the_least_recently_used_record_is_evicted_first",
    "test_the_owner_that_holds_the_most_makes_room",
    write=lambda real, self, place, value, ttl: real(place, value.strip(b"\x00"), ttl),
)


TestAnswersInAnOrderOfItsOwn = Broken.failing(
    "test_a_record_is_read_as_it_was_written",
    "test_records_come_in_the_order_that_was_asked_and_missing_ones_are_none",
    "test_a_record_that_is_read_with_a_life_has_that_from_then_on",
    "test_the_least_recently_used_record_is_evicted_first",
    get=lambda real, self, owner, keys, ttl=None: real(owner, sorted(keys), ttl),
)


TestKeepsTheFirst = Broken.failing(
    "test_a_record_is_replaced",
    "test_a_write_needs_all_expected_values",
    "test_concurrent_writers_lose_no_update",
    "test_another_process_sees_a_record_once_it_is_written",
    write=lambda real, self, place, value, ttl: real(place, self.live(place) or value, ttl),
)


TestJoinsOwnerAndKey = Broken.failing(
    "test_an_owner_sees_only_its_own_records",
    "test_the_owner_that_holds_the_most_makes_room",
    place=lambda real, self, owner, key: (self.services.namespace, "", owner.rstrip("x").removeprefix("x") + key),
)


TestKnowsNoNamespaces = Broken.failing(
    "test_a_namespace_has_its_own_records", place=lambda real, self, owner, key: ("", owner, key)
)


TestForgetsNothingByTime = Broken.failing(
    "test_a_record_expires",
    "test_a_record_that_is_read_with_a_life_has_that_from_then_on",
    "test_a_read_without_a_life_does_not_extend_it",
    live=lambda real, self, place: self.shelf[place][0] if place in self.shelf else None,
)


TestRenewsNothing = Broken.failing(
    "test_a_record_that_is_read_with_a_life_has_that_from_then_on",
    "test_the_least_recently_used_record_is_evicted_first",
    renew=lambda real, self, place, value, ttl: None,
)


TestRenewsWithEveryLook = Broken.failing(
    "test_a_record_expires",
    "test_a_record_that_is_read_with_a_life_has_that_from_then_on",
    "test_a_read_without_a_life_does_not_extend_it",
    get=lambda real, self, owner, keys, ttl=None: real(owner, keys, 600.0 if ttl is None else ttl),
)


async def _writes_whatever_is_expected(
    real: Any, self: Any, owner: Any, records: Any, ttl: Any, expected: Any = None
) -> Any:
    holds = self.holds(owner, expected or {})
    await real(owner, records, ttl)
    return holds


TestWritesWhateverIsExpected = Broken.failing(
    "test_a_write_needs_all_expected_values", put=_writes_whatever_is_expected
)


async def _lets_others_come_between_get(real: Any, self: Any, owner: Any, keys: Any, ttl: Any = None) -> Any:
    await asyncio.sleep(0)
    return await real(owner, keys, ttl)


TestLetsOthersComeBetween = Broken.failing(
    "test_concurrent_writers_lose_no_update",
    wait=lambda real, self: asyncio.sleep(0),
    get=_lets_others_come_between_get,
)


TestDeletesTheFirstOnly = Broken.failing(
    "test_a_deleted_record_is_gone", delete=lambda real, self, owner, keys: real(owner, keys[:1])
)


def _writes_later_live(real: Any, self: Any, place: Any) -> Any:
    value, expires = self.own.get(place, (b"", 0.0))
    return value if expires > self.now() else real(place)


def _writes_later_write(real: Any, self: Any, place: Any, value: Any, ttl: Any) -> Any:
    self.own[place] = (value, self.now() + ttl)


async def _writes_later_delete(real: Any, self: Any, owner: Any, keys: Any) -> Any:
    self.reach()
    for key in keys:
        self.own.pop(self.place(owner, key), None)


TestWritesLater = Broken.failing(
    "test_another_process_sees_a_record_once_it_is_written",
    "test_records_outlive_the_process",
    "test_concurrent_writers_lose_no_update",
    "test_the_least_recently_used_record_is_evicted_first",
    __init__=own(own=lambda self: {}),
    live=_writes_later_live,
    write=_writes_later_write,
    make_room=lambda real, self: None,
    delete=_writes_later_delete,
)


TestTakesWhateverComes = Broken.failing(
    "test_an_oversized_write_is_refused_without_effect", fits=lambda real, self, records: True
)


def _forgets_the_oldest_whoever_has_it(real: Any, self: Any) -> Any:
    while sum((len(value) for value, _ in self.shelf.values())) > BOUND:
        del self.shelf[next(iter(self.shelf))]


TestForgetsTheOldestWhoeverHasIt = Broken.failing(
    "test_the_owner_that_holds_the_most_makes_room", make_room=_forgets_the_oldest_whoever_has_it
)


def _forgets_the_newest(real: Any, self: Any) -> Any:
    while sum((len(value) for value, _ in self.shelf.values())) > BOUND:
        self.shelf.popitem()


TestForgetsTheNewest = Broken.failing(
    "test_the_least_recently_used_record_is_evicted_first", make_room=_forgets_the_newest
)


TestSaysNothingOfBeingAway = Broken.failing(
    "test_calls_fail_in_time_while_the_store_is_away_and_work_once_it_is_back", reach=lambda real, self: None
)


TestClosesOnce = Broken.failing("test_the_store_can_be_closed_twice_and_without_a_start", aclose=closes_once)
