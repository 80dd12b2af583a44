"""What a lease holds in a store comes back whatever happens to it, until it is refused for too long."""

from __future__ import annotations

import asyncio

import pytest
from dynamo_core.errors import CannotConnect
from dynamo_leases.failures import Refused
from dynamo_leases.maintainer import LeaseMaintainer


class Memory:
    """A store that can be told to fail, and forgets what a test takes away."""

    def __init__(self) -> None:
        self.leases: dict[int, dict[str, bytes]] = {}
        self.failing: Exception | None = None
        self.taken: set[str] = set()
        self.loses_answers = False
        self.beats = 0
        self.beaten = asyncio.Event()

    def _check(self) -> None:
        if self.failing is not None:
            raise self.failing

    async def grant(self, lease: int, ttl: float) -> None:
        self._check()
        self.leases.setdefault(lease, {})

    async def keep_alive(self, lease: int) -> set[str] | None:
        self.beats += 1
        self.beaten.set()
        self._check()
        return set(self.leases[lease]) if lease in self.leases else None

    async def revoke(self, lease: int) -> None:
        self._check()
        self.leases.pop(lease, None)

    async def put(self, lease: int, key: str, value: bytes) -> bool:
        self._check()
        if lease not in self.leases:
            return False
        self.leases[lease][key] = value
        if self.loses_answers:
            raise CannotConnect("the answer was lost")
        return True

    async def reclaim(self, lease: int, key: str, value: bytes) -> bool:
        return key not in self.taken and await self.put(lease, key, value)

    async def remove(self, lease: int, key: str) -> None:
        self._check()
        self.leases.get(lease, {}).pop(key, None)


class Kept:
    """A lease whose heartbeats run while the test does."""

    def __init__(self, lost_after: float = 60.0) -> None:
        self.store = Memory()
        self.lost = asyncio.Event()
        self.maintainer = LeaseMaintainer(
            self.store, 7, ttl=0.06, heartbeat=0.02, lost_after=lost_after, on_lost=self.lost.set
        )

    async def __aenter__(self) -> Kept:
        await self.maintainer.register()
        self._keeping = asyncio.ensure_future(self.maintainer.keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._keeping.cancel()
        await asyncio.wait([self._keeping])

    async def beats(self, times: int) -> None:
        wanted = self.store.beats + times
        async with asyncio.timeout(10):
            while self.store.beats < wanted:
                self.store.beaten.clear()
                await self.store.beaten.wait()

    async def holds(self, records: dict[str, bytes]) -> None:
        """Return once the store has exactly these records of the lease."""
        async with asyncio.timeout(10):
            while self.store.leases.get(7) != records:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_a_lease_that_the_store_has_forgotten_comes_back_with_its_records() -> None:
    async with Kept() as kept:
        await kept.maintainer.put("a", b"1")
        await kept.maintainer.put("b", b"2")
        await kept.maintainer.remove("b")

        kept.store.leases.clear()

        await kept.holds({"a": b"1"})


async def test_a_put_registers_a_lease_that_the_store_has_forgotten() -> None:
    async with Kept() as kept:
        await kept.maintainer.put("a", b"1")
        kept.store.leases.clear()

        await kept.maintainer.put("b", b"2")

        assert kept.store.leases[7] == {"a": b"1", "b": b"2"}


async def test_missing_records_are_put_again_and_extra_ones_removed() -> None:
    async with Kept() as kept:
        await kept.maintainer.put("a", b"1")

        kept.store.leases[7] = {"stranger": b""}

        await kept.holds({"a": b"1"})


async def test_a_record_that_was_never_confirmed_is_taken_back() -> None:
    async with Kept() as kept:
        kept.store.loses_answers = True
        with pytest.raises(CannotConnect, match="the answer was lost"):
            await kept.maintainer.put("a", b"1")
        kept.store.loses_answers = False

        await kept.holds({})


async def test_a_record_whose_key_another_lease_took_is_given_up() -> None:
    async with Kept() as kept:
        await kept.maintainer.put("a", b"1")
        kept.store.taken = {"a"}
        kept.store.leases[7].clear()
        await kept.beats(3)

        kept.store.taken = set()
        await kept.beats(3)

        assert kept.store.leases[7] == {}


async def test_an_unreachable_store_does_not_lose_the_lease() -> None:
    async with Kept(lost_after=0.0) as kept:
        await kept.maintainer.put("a", b"1")
        kept.store.failing = CannotConnect("away")
        kept.store.leases.clear()
        await kept.beats(5)

        kept.store.failing = None
        await kept.holds({"a": b"1"})

        assert not kept.lost.is_set()


async def test_a_lease_that_is_refused_for_too_long_is_lost_and_keeps_nothing() -> None:
    async with Kept(lost_after=0.05) as kept:
        await kept.maintainer.put("a", b"1")

        kept.store.failing = Refused("no")
        async with asyncio.timeout(10):
            await kept.lost.wait()

        with pytest.raises(CannotConnect, match="the lease is lost"):
            await kept.maintainer.put("b", b"2")


async def test_only_consecutive_refusals_count() -> None:
    async with Kept(lost_after=0.05) as kept:
        for _ in range(4):
            # One refusal lasts for no time, however busy the machine is; all of them together last for too long.
            kept.store.failing = Refused("no")
            await kept.beats(1)
            kept.store.failing = None
            await kept.beats(2)

        assert not kept.lost.is_set()


async def test_an_unexpected_error_does_not_end_the_heartbeats() -> None:
    async with Kept() as kept:
        kept.store.failing = RuntimeError("surprise")
        await kept.beats(2)

        kept.store.failing = None
        await kept.maintainer.put("a", b"1")
        kept.store.leases.clear()
        await kept.holds({"a": b"1"})


async def test_a_closed_lease_removes_its_records_and_refuses_new_ones() -> None:
    async with Kept() as kept:
        await kept.maintainer.put("a", b"1")

        await kept.maintainer.close()

        assert kept.store.leases == {}
        with pytest.raises(ValueError, match="closed"):
            await kept.maintainer.put("b", b"2")
        async with asyncio.timeout(10):
            await kept._keeping
