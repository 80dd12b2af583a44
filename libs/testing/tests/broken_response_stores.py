"""Response stores that break one promise each, and what of the kit must find it.

Not collected with the other tests: `test_the_kits_find_broken_parts` runs this file and compares.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from dynamo_core import Expected, PluginConfig, ResponseStore, ResponseStoreServices, StoreFull
from dynamo_core.errors import Unavailable
from dynamo_testing.response_store_kit import ResponseStoreFactory, ResponseStoreKit

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
        """Where another writer may come between."""

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


class Broken(ResponseStoreKit):
    """The kit over one store."""

    BOUND = BOUND
    WAIT = 3.0
    store_class: ClassVar[type[Small]] = Small
    #: The checks that must fail, and no others may.
    FAILS: ClassVar[frozenset[str]] = frozenset()

    @pytest.fixture
    def make_store(self) -> ResponseStoreFactory:
        self.shelf: Shelf = {}
        self.away = [False]
        return lambda services: self.store_class(PluginConfig(), services, self.shelf, self.away)

    async def take_away(self, store: ResponseStore) -> None:
        self.away[0] = True

    async def bring_back(self, store: ResponseStore) -> None:
        self.away[0] = False


class TestWithoutAFault(Broken):
    pass


class TestTrimsWhatItKeeps(Broken):
    class store_class(Small):  # noqa: N801 - the part that is exchanged, as the attribute is named
        def write(self, place: Place, value: bytes, ttl: float) -> None:
            super().write(place, value.strip(b"\0"), ttl)

    FAILS = frozenset(
        {
            "test_a_record_is_read_as_it_was_written",
            "test_what_was_used_longest_ago_is_forgotten_first",
            "test_the_owner_that_holds_the_most_makes_room",
        }
    )


class TestAnswersInAnOrderOfItsOwn(Broken):
    class store_class(Small):  # noqa: N801
        async def get(self, owner: str, keys: Sequence[str], ttl: float | None = None) -> list[bytes | None]:
            return await super().get(owner, sorted(keys), ttl)

    FAILS = frozenset(
        {
            "test_a_record_is_read_as_it_was_written",
            "test_records_come_in_the_order_that_was_asked_and_missing_ones_are_none",
            "test_a_record_that_is_read_with_a_life_has_that_from_then_on",
            "test_what_was_used_longest_ago_is_forgotten_first",
        }
    )


class TestKeepsTheFirst(Broken):
    class store_class(Small):  # noqa: N801
        def write(self, place: Place, value: bytes, ttl: float) -> None:
            super().write(place, self.live(place) or value, ttl)

    FAILS = frozenset(
        {
            "test_a_record_is_replaced",
            "test_nothing_is_written_unless_all_that_is_expected_is_there",
            "test_of_writers_at_the_same_time_none_loses_what_another_wrote",
            "test_another_process_sees_a_record_once_it_is_written",
        }
    )


class TestJoinsOwnerAndKey(Broken):
    class store_class(Small):  # noqa: N801
        def place(self, owner: str, key: str) -> Place:
            return self.services.namespace, "", owner.rstrip("x").removeprefix("x") + key

    FAILS = frozenset({"test_an_owner_sees_its_own_records_only", "test_the_owner_that_holds_the_most_makes_room"})


class TestKnowsNoNamespaces(Broken):
    class store_class(Small):  # noqa: N801
        def place(self, owner: str, key: str) -> Place:
            return "", owner, key

    FAILS = frozenset({"test_a_namespace_has_its_own_records"})


class TestForgetsNothingByTime(Broken):
    class store_class(Small):  # noqa: N801
        def live(self, place: Place) -> bytes | None:
            return self.shelf[place][0] if place in self.shelf else None

    FAILS = frozenset(
        {
            "test_a_record_is_gone_after_its_life",
            "test_a_record_that_is_read_with_a_life_has_that_from_then_on",
            "test_a_look_without_a_life_does_not_change_it",
        }
    )


class TestRenewsNothing(Broken):
    class store_class(Small):  # noqa: N801
        def renew(self, place: Place, value: bytes, ttl: float) -> None:
            pass

    FAILS = frozenset(
        {
            "test_a_record_that_is_read_with_a_life_has_that_from_then_on",
            "test_what_was_used_longest_ago_is_forgotten_first",
        }
    )


class TestRenewsWithEveryLook(Broken):
    class store_class(Small):  # noqa: N801
        async def get(self, owner: str, keys: Sequence[str], ttl: float | None = None) -> list[bytes | None]:
            return await super().get(owner, keys, 600.0 if ttl is None else ttl)

    FAILS = frozenset(
        {
            "test_a_record_is_gone_after_its_life",
            "test_a_record_that_is_read_with_a_life_has_that_from_then_on",
            "test_a_look_without_a_life_does_not_change_it",
        }
    )


class TestWritesWhateverIsExpected(Broken):
    class store_class(Small):  # noqa: N801
        async def put(self, owner: str, records: Mapping[str, bytes], ttl: float, expected: Expected = None) -> bool:
            holds = self.holds(owner, expected or {})
            await super().put(owner, records, ttl)
            return holds

    FAILS = frozenset({"test_nothing_is_written_unless_all_that_is_expected_is_there"})


class TestLetsOthersComeBetween(Broken):
    class store_class(Small):  # noqa: N801
        async def wait(self) -> None:
            await asyncio.sleep(0)

        async def get(self, owner: str, keys: Sequence[str], ttl: float | None = None) -> list[bytes | None]:
            await asyncio.sleep(0)
            return await super().get(owner, keys, ttl)

    FAILS = frozenset({"test_of_writers_at_the_same_time_none_loses_what_another_wrote"})


class TestDeletesTheFirstOnly(Broken):
    class store_class(Small):  # noqa: N801
        async def delete(self, owner: str, keys: Sequence[str]) -> None:
            await super().delete(owner, keys[:1])

    FAILS = frozenset({"test_a_deleted_record_is_gone"})


class TestWritesLater(Broken):
    class store_class(Small):  # noqa: N801
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            self.own: Shelf = {}

        def live(self, place: Place) -> bytes | None:
            value, expires = self.own.get(place, (b"", 0.0))
            return value if expires > self.now() else super().live(place)

        def write(self, place: Place, value: bytes, ttl: float) -> None:
            self.own[place] = (value, self.now() + ttl)

        def make_room(self) -> None:
            pass

        async def delete(self, owner: str, keys: Sequence[str]) -> None:
            self.reach()
            for key in keys:
                self.own.pop(self.place(owner, key), None)

    FAILS = frozenset(
        {
            "test_another_process_sees_a_record_once_it_is_written",
            "test_records_outlive_the_process",
            "test_of_writers_at_the_same_time_none_loses_what_another_wrote",
            "test_what_was_used_longest_ago_is_forgotten_first",
        }
    )


class TestTakesWhateverComes(Broken):
    class store_class(Small):  # noqa: N801
        def fits(self, records: Mapping[str, bytes]) -> bool:
            return True

    FAILS = frozenset({"test_what_can_never_fit_is_refused_and_changes_nothing"})


class TestForgetsTheOldestWhoeverHasIt(Broken):
    class store_class(Small):  # noqa: N801
        def make_room(self) -> None:
            while sum(len(value) for value, _ in self.shelf.values()) > BOUND:
                del self.shelf[next(iter(self.shelf))]

    FAILS = frozenset({"test_the_owner_that_holds_the_most_makes_room"})


class TestForgetsTheNewest(Broken):
    class store_class(Small):  # noqa: N801
        def make_room(self) -> None:
            while sum(len(value) for value, _ in self.shelf.values()) > BOUND:
                self.shelf.popitem()

    FAILS = frozenset({"test_what_was_used_longest_ago_is_forgotten_first"})


class TestSaysNothingOfBeingAway(Broken):
    class store_class(Small):  # noqa: N801
        def reach(self) -> None:
            pass

    FAILS = frozenset({"test_calls_fail_in_time_while_the_store_is_away_and_work_once_it_is_back"})


class TestClosesOnce(Broken):
    class store_class(Small):  # noqa: N801
        async def aclose(self) -> None:
            self.closed += 1
            if self.closed > 1:
                raise RuntimeError("it is closed already")

    FAILS = frozenset({"test_it_may_be_closed_twice_and_without_a_start"})
