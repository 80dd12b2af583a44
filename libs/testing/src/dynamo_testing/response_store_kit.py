"""The kit for response stores: every promise about owners, lives, bounds and writers as one check.

The author's whole test file::

    import pytest
    from dynamo_testing.response_store_kit import ResponseStoreFactory, ResponseStoreKit

    class TestMine(ResponseStoreKit):
        @pytest.fixture
        def make_store(self) -> ResponseStoreFactory:
            return lambda services: MyStore(MyConfig(), services)

Stores that the fixture makes share what they keep, as those of two processes do. One that is bounded is made with a
small bound, which the class tells in bytes by `BOUND`. One whose server can be away tells how to take it away and bring
it back: `take_away` and `bring_back`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import ClassVar, TypeAlias

from dynamo_core.contracts.response_store import ResponseStore, ResponseStoreServices, StoreFull
from dynamo_core.errors import CannotConnect, Unavailable
from dynamo_telemetry.metrics import Metrics

from dynamo_testing.optional_packages import pytest

__all__ = ["ResponseStoreFactory", "ResponseStoreKit"]

#: Makes the store under test, not yet started.
ResponseStoreFactory: TypeAlias = Callable[[ResponseStoreServices], ResponseStore]

#: Seconds: longer than any check takes, and short enough to wait for.
LONG, SHORT = 600.0, 0.3
_WRITERS, _ROUNDS = 4, 5
#: Texts that a careless store would take apart.
_HOSTILE = ("a:b", "a/b", "a{b}c", "a b\n", "%s", "*", "ä'\";--", "x" * 512)


@pytest.mark.asyncio
class ResponseStoreKit:
    """All checks of a response store. Subclass it as ``Test…``, and write the fixture `make_store`."""

    #: Seconds within which a call must end, the server being away or not.
    WAIT: ClassVar[float] = 10.0
    #: The bytes that all records may take, of a store that is made with a bound of at least a kilobyte; None: none.
    BOUND: ClassVar[int | None] = None

    @pytest.fixture
    def make_store(self) -> ResponseStoreFactory:
        """Make the store from its services. Every author writes this one."""
        raise NotImplementedError("write a fixture `make_store` that returns a function of ResponseStoreServices")

    async def take_away(self, store: ResponseStore) -> None:
        """Make what the store keeps its records in unreachable."""
        pytest.skip("take_away is not written: nothing tells how the store can be away")

    async def bring_back(self, store: ResponseStore) -> None:
        """End the outage."""

    @pytest.fixture
    def owner(self) -> str:
        """Return an owner that no other check has."""
        return f"kit/{secrets.token_hex(8)}"

    @pytest.fixture
    async def store(self, make_store: ResponseStoreFactory) -> AsyncIterator[ResponseStore]:
        """Yield a started store."""
        async with make_store(_services()) as store:
            await store.start()
            yield store

    @pytest.fixture
    async def other(self, make_store: ResponseStoreFactory, store: ResponseStore) -> AsyncIterator[ResponseStore]:
        """Yield a second one of another process; the same where processes do not share records."""
        if not store.CROSS_PROCESS:
            yield store
            return
        async with make_store(_services()) as other:
            await other.start()
            yield other

    async def test_a_record_is_read_as_it_was_written(self, store: ResponseStore, owner: str) -> None:
        values = {"empty": b"", "bytes": bytes(range(256)), "long": b"x" * 512, **dict.fromkeys(_HOSTILE, b"1")}
        for key, value in values.items():
            assert await store.put(owner, {key: value}, LONG)

        assert await store.get(owner, list(values)) == list(values.values())

    async def test_records_come_in_the_order_that_was_asked_and_missing_ones_are_none(
        self, store: ResponseStore, owner: str
    ) -> None:
        await store.put(owner, {"a": b"1", "b": b"2"}, LONG)

        assert await store.get(owner, ["b", "c", "a", "b"]) == [b"2", None, b"1", b"2"]
        assert await store.get(owner, []) == []

    async def test_a_record_is_replaced(self, store: ResponseStore, owner: str) -> None:
        for value in (b"1", b"22", b""):
            await store.put(owner, {"a": value}, LONG)
            assert await store.get(owner, ["a"]) == [value]

    async def test_an_owner_sees_only_its_own_records(self, store: ResponseStore, owner: str) -> None:
        others = [f"{owner}x", f"{owner}/a", f"{owner}:a", f"x{owner}", *_HOSTILE]
        await store.put(owner, {"a": b"mine"}, LONG)

        for stranger in others:
            assert await store.get(stranger, ["a"], LONG) == [None]
            assert await store.put(stranger, {"a": b"theirs"}, LONG, {"a": None})
            await store.delete(stranger, ["a"])

        assert await store.get(owner, ["a"]) == [b"mine"]

    async def test_a_namespace_has_its_own_records(
        self, make_store: ResponseStoreFactory, store: ResponseStore, owner: str
    ) -> None:
        await store.put(owner, {"a": b"1"}, LONG)

        async with make_store(_services("kit-other")) as elsewhere:
            await elsewhere.start()
            assert await elsewhere.get(owner, ["a"]) == [None]

    async def test_a_record_expires(self, store: ResponseStore, owner: str) -> None:
        await store.put(owner, {"a": b"1"}, SHORT)
        await store.put(owner, {"b": b"1"}, LONG)

        await self._until_gone(store, owner, "a")

        assert await store.get(owner, ["b"]) == [b"1"]
        assert await store.put(owner, {"a": b"2"}, LONG, {"a": None})

    async def test_a_record_that_is_read_with_a_life_has_that_from_then_on(
        self, store: ResponseStore, owner: str
    ) -> None:
        await store.put(owner, {"short": b"1", "long": b"2"}, LONG)
        await store.put(owner, {"renewed": b"3"}, 20 * SHORT)

        await store.get(owner, ["short"], SHORT)
        await store.get(owner, ["renewed", "none"], LONG)
        await self._until_gone(store, owner, "short")

        assert await store.get(owner, ["short", "long", "renewed"]) == [None, b"2", b"3"]

    async def test_a_read_without_a_life_does_not_extend_it(self, store: ResponseStore, owner: str) -> None:
        await store.put(owner, {"a": b"1"}, SHORT)

        await self._until_gone(store, owner, "a")

    async def test_a_write_needs_all_expected_values(self, store: ResponseStore, owner: str) -> None:
        await store.put(owner, {"a": b"1"}, LONG)

        for expected in ({"a": b"2"}, {"a": None}, {"b": b"1"}, {"a": b"1", "b": b""}, {"b": None, "a": b""}):
            assert not await store.put(owner, {"a": b"3", "c": b"3"}, LONG, expected)
            assert await store.get(owner, ["a", "b", "c"]) == [b"1", None, None]
        assert await store.put(owner, {"a": b"4", "c": b"4"}, LONG, {"a": b"1", "b": None})

        assert await store.get(owner, ["a", "b", "c"]) == [b"4", None, b"4"]

    async def test_concurrent_writers_lose_no_update(
        self, store: ResponseStore, other: ResponseStore, owner: str
    ) -> None:
        async def count(at: ResponseStore) -> None:
            for _ in range(_ROUNDS):
                while True:
                    (held,) = await at.get(owner, ["n"])
                    if await at.put(owner, {"n": b"%d" % (int(held or 0) + 1)}, LONG, {"n": held}):
                        break
                    await asyncio.sleep(0)

        async with asyncio.timeout(self.WAIT), asyncio.TaskGroup() as group:
            for number in range(_WRITERS):
                group.create_task(count(other if number % 2 else store))

        assert await store.get(owner, ["n"]) == [b"%d" % (_WRITERS * _ROUNDS)]

    async def test_a_deleted_record_is_gone(self, store: ResponseStore, owner: str) -> None:
        await store.put(owner, {"a": b"1", "b": b"2", "c": b"3"}, LONG)

        await store.delete(owner, ["a", "none", "c"])
        await store.delete(owner, [])

        assert await store.get(owner, ["a", "b", "c"]) == [None, b"2", None]

    async def test_another_process_sees_a_record_once_it_is_written(
        self, store: ResponseStore, other: ResponseStore, owner: str
    ) -> None:
        for number in range(_ROUNDS):
            await store.put(owner, {"a": b"%d" % number}, LONG)
            assert await other.get(owner, ["a"]) == [b"%d" % number]

    async def test_records_outlive_the_process(self, make_store: ResponseStoreFactory, owner: str) -> None:
        first = make_store(_services())
        if not first.PERSISTENT:
            pytest.skip("PERSISTENT is not set: records end with the process")
        async with first:
            await first.start()
            await first.put(owner, {"a": b"1"}, LONG)

        async with make_store(_services()) as second:
            await second.start()
            assert await second.get(owner, ["a"]) == [b"1"]

    async def test_the_least_recently_used_record_is_evicted_first(self, store: ResponseStore, owner: str) -> None:
        size = self._bound() // 8
        await store.put(owner, {"used": bytes(size)}, LONG)
        for number in range(16):
            await store.put(owner, {f"{number}": bytes(size)}, LONG)
            await store.get(owner, ["used"], LONG)

        held = await store.get(owner, ["used", *map(str, range(16))])
        assert held[0] is not None, "a record that was just used was forgotten"
        assert held[-1] is not None, "the record that was just written was forgotten"
        assert held[1] is None, "the oldest record is still there"
        assert sum(len(value) for value in held if value is not None) <= self._bound()

    async def test_the_owner_that_holds_the_most_makes_room(self, store: ResponseStore, owner: str) -> None:
        size = self._bound() // 8
        await store.put(owner, {"old": bytes(size)}, LONG)

        for number in range(16):
            await store.put(f"{owner}/other", {f"{number}": bytes(size)}, LONG)

        assert await store.get(owner, ["old"]) == [bytes(size)], "an owner's records were forgotten for another's"

    async def test_an_oversized_write_is_refused_without_effect(self, store: ResponseStore, owner: str) -> None:
        bound = self._bound()
        await store.put(owner, {"a": b"1"}, LONG)

        with pytest.raises(StoreFull):
            await store.put(owner, {"a": bytes(bound // 2), "b": bytes(bound + 1)}, LONG)

        assert await store.get(owner, ["a", "b"]) == [b"1", None]

    async def test_calls_fail_in_time_while_the_store_is_away_and_work_once_it_is_back(
        self, store: ResponseStore, owner: str
    ) -> None:
        await store.put(owner, {"a": b"1"}, LONG)
        await self.take_away(store)
        calls = (
            lambda: store.get(owner, ["a"]),
            lambda: store.put(owner, {"b": b"1"}, LONG),
            lambda: store.delete(owner, ["a"]),
        )

        async with asyncio.timeout(3 * self.WAIT):
            for call in calls:
                with pytest.raises((Unavailable, CannotConnect)):
                    await call()
            await self.bring_back(store)
            while not await self._works(store, owner):  # noqa: ASYNC110 - the store tells of itself when it is asked
                await asyncio.sleep(SHORT)

    async def test_the_store_can_be_closed_twice_and_without_a_start(self, make_store: ResponseStoreFactory) -> None:
        for starts in (True, False):
            store = make_store(_services())
            if starts:
                await store.start()
            await store.aclose()
            await store.aclose()

    def _bound(self) -> int:
        if self.BOUND is None:
            pytest.skip("BOUND is not set: the store is not bounded, or its server bounds it")
        return self.BOUND

    async def _until_gone(self, store: ResponseStore, owner: str, key: str) -> None:
        async with asyncio.timeout(self.WAIT):
            while (await store.get(owner, [key]))[0] is not None:  # noqa: ASYNC110 - as above
                await asyncio.sleep(SHORT / 10)

    async def _works(self, store: ResponseStore, owner: str) -> bool:
        try:
            await store.put(owner, {"back": b"1"}, LONG)
            return await store.get(owner, ["back"]) == [b"1"]
        except (Unavailable, CannotConnect):
            return False


def _services(namespace: str = "kit") -> ResponseStoreServices:
    return ResponseStoreServices(Metrics(), namespace)
