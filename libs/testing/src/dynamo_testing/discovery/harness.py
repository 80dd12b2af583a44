"""The harness of the discovery checks: two clients of one store, and watches that add up their events."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from dynamo_core.contracts.discovery import Discovery, WatchEvent, WatchKind

from dynamo_testing.optional_packages import pytest


@dataclass(frozen=True, slots=True)
class Directories:
    """Two clients of one store, started, as in two processes; the same object if it serves one process only."""

    one: Discovery
    other: Discovery

    @property
    def apart(self) -> bool:
        """Whether they are two."""
        return self.one is not self.other


class View:
    """A watch, and the state that its events add up to."""

    def __init__(self, discovery: Discovery, prefix: str, wait: float, *, strict: bool = False) -> None:
        """Fail, if `strict`, on the end of a record that was never seen, which bursts of changes may leave out."""
        self._discovery = discovery
        self._prefix = prefix
        self._wait = wait
        self._strict = strict
        self._marks = 0
        self.watch = discovery.watch(prefix)
        self.records: dict[str, bytes] = {}
        self.log: list[WatchEvent] = []

    @property
    def kinds(self) -> list[WatchKind]:
        """The kinds of all events so far."""
        return [event.kind for event in self.log]

    def count(self, kind: WatchKind) -> int:
        """Return how many events of a kind have come."""
        return self.kinds.count(kind)

    async def read(self) -> WatchEvent:
        """Return the next event."""
        event = await anext(self.watch)
        self.log.append(event)
        if event.kind is WatchKind.PUT:
            self.records[event.key] = event.value
        elif event.kind is WatchKind.DELETE:
            assert event.key in self.records or not self._strict, f"{event.key} was never told"
            self.records.pop(event.key, None)
        return event

    async def until(self, condition: Callable[[], bool], what: str = "a condition expected") -> None:
        """Read until the condition holds."""
        try:
            async with asyncio.timeout(self._wait):
                while not condition():
                    await self.read()
        except TimeoutError:
            raise AssertionError(f"{what} within {self._wait} s; the watch said {self.log[-5:]}") from None
        except StopAsyncIteration:
            raise AssertionError(f"{what}, but the watch ended") from None

    async def synced(self) -> None:
        """Read the snapshot."""
        await self.until(lambda: self.count(WatchKind.SYNCED) > 0, "the end of the snapshot expected")

    async def shows(self, records: dict[str, bytes]) -> None:
        """Read until the view is exactly `records`."""
        await self.until(lambda: self.records == records, f"a view of {sorted(records)} expected")

    async def hears(self, kind: WatchKind, times: int = 1) -> None:
        """Read until there have been so many events of a kind."""
        await self.until(lambda: self.count(kind) >= times, f"{times} {kind.name} expected")

    async def catch_up(self) -> None:
        """Read all that happened before now: a mark that is put now is told after it."""
        self._marks += 1
        key = f"{self._prefix}~mark-{self._marks}"
        await self._discovery.put_value(key, b"")
        await self.until(lambda: key in self.records, "a mark expected")
        await self._discovery.put_value(key, None)
        await self.until(lambda: key not in self.records, "the end of a mark expected")


@pytest.fixture
async def see() -> AsyncIterator[Callable[..., View]]:
    """Open watches that live as long as the test; for a conftest to import."""
    opened: list[View] = []

    def see(discovery: Discovery, prefix: str = "", wait: float = 20.0) -> View:
        opened.append(View(discovery, prefix, wait, strict=True))
        return opened[-1]

    yield see
    for view in opened:
        await view.watch.aclose()


@dataclass(slots=True)
class Registry:
    """The two clients, and a corner of the store that no other check uses."""

    directories: Directories
    wait: float
    prefix: str = field(default_factory=lambda: f"kit-{secrets.token_hex(6)}/")

    def key(self, name: str) -> str:
        """Return a key in the corner of this check."""
        return self.prefix + name

    @asynccontextmanager
    async def viewing(self, discovery: Discovery | None = None, prefix: str | None = None) -> AsyncIterator[View]:
        """Yield a watch of the other client (or the given one) whose snapshot has been read; closed at the end."""
        view = View(discovery or self.directories.other, self.prefix if prefix is None else prefix, self.wait)
        try:
            await view.synced()
            yield view
        finally:
            async with asyncio.timeout(self.wait):
                await view.watch.aclose()

    async def snapshot(self, discovery: Discovery | None = None) -> dict[str, bytes]:
        """Return what is there now."""
        async with self.viewing(discovery) as view:
            return dict(view.records)


@pytest.mark.asyncio
class DiscoveryHarness:
    """The author's part of a discovery kit: the fixture `directories`, and optional abilities."""

    #: Seconds that anything may take before a check fails.
    WAIT: ClassVar[float] = 5.0
    #: The life of leases in seconds, for the checks that let one expire.
    TTL: ClassVar[float] = 1.0
    #: Whether `kill_owner` can be called.
    CAN_KILL_OWNER: ClassVar[bool] = False
    #: Whether `cut_store` and `restore_store` can be called.
    CAN_CUT_STORE: ClassVar[bool] = False

    @pytest.fixture
    def directories(self) -> Directories:
        """Return two clients of one store; the fixture closes them. Every author writes this one."""
        raise NotImplementedError("write a fixture `directories` that yields Directories(one=…, other=…)")

    async def kill_owner(self, directories: Directories) -> None:
        """End the process behind `directories.one` without a goodbye: its leases are not kept alive any more."""
        raise NotImplementedError

    async def cut_store(self, directories: Directories) -> None:
        """Make the store unreachable for both clients."""
        raise NotImplementedError

    async def restore_store(self, directories: Directories) -> None:
        """Make the store reachable again, with what it held."""
        raise NotImplementedError

    @pytest.fixture
    def registry(self, directories: Directories) -> Registry:
        """Return the clients, and a corner of the store for one check."""
        return Registry(directories, self.WAIT)
