"""The surroundings of a router under test: an event plane, a directory, and a pool and tracker that count reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.discovery import Discovery, Lease, WatchEvent, WatchKind
from dynamo_core.contracts.transports.events import EventPlane, Publisher
from dynamo_core.protocol.records import Instance
from dynamo_runtime.dispatch.load.tracker import LoadTracker
from dynamo_runtime.dispatch.pools.pool import Pool
from dynamo_telemetry.metrics import Metrics


class KitPool(Pool):
    """A pool that counts the reads of its eligible workers."""

    looks = 0

    def eligible(self, excluded: Collection[int] = ()) -> Sequence[Instance]:
        self.looks += 1
        return super().eligible(excluded)


class CountingTracker:
    """A load tracker that counts the ranks that routers read."""

    def __init__(self, tracker: LoadTracker) -> None:
        self._tracker = tracker
        self.reads = 0

    def requests(self, instance_id: int) -> int:
        self.reads += 1
        return self._tracker.requests(instance_id)

    def prefill_tokens(self, instance_id: int, dp_rank: int = 0) -> int:
        self.reads += 1
        return self._tracker.prefill_tokens(instance_id, dp_rank)

    def blocks(self, instance_id: int, dp_rank: int = 0) -> int:
        self.reads += 1
        return self._tracker.blocks(instance_id, dp_rank)

    def loads(self, ranks: Sequence[tuple[int, int]], chain: Sequence[int] = ()) -> Sequence[tuple[int, int, int]]:
        self.reads += len(ranks)
        return self._tracker.loads(ranks, chain)

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        return self._tracker.watch(callback)


class KitEvents(EventPlane):
    """Hands the events that a check sends to every subscriber."""

    def __init__(self) -> None:
        self._listeners: dict[str, list[asyncio.Queue[tuple[int, int, bytes]]]] = {}
        self._numbers: dict[str, int] = {}

    def send(self, subject: str, payload: bytes) -> None:
        """Tell all who listen to a subject."""
        number = self._numbers[subject] = self._numbers.get(subject, 0) + 1
        for listener in self._listeners.get(subject, ()):
            listener.put_nowait((1, number, payload))

    async def publisher(self, subject: str, lease: Lease) -> Publisher:
        raise NotImplementedError("routers listen")

    async def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[tuple[int, int, bytes], None]:
        listener: asyncio.Queue[tuple[int, int, bytes]] = asyncio.Queue()
        listeners = self._listeners.setdefault(subject, [])
        listeners.append(listener)
        try:
            while True:
                yield await listener.get()
        finally:
            listeners.remove(listener)


class EmptyDirectory(Discovery):
    """Empty, and stays so."""

    NAME = "kit"

    def __init__(self) -> None:
        super().__init__(PluginConfig(), Metrics())

    async def lease(self, ttl: float | None = None) -> Lease:
        raise NotImplementedError("routers look")

    async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
        yield WatchEvent(WatchKind.SYNCED)
        await asyncio.Event().wait()

    async def put_value(self, key: str, value: bytes | None) -> None:
        raise NotImplementedError("routers look")

    async def aclose(self) -> None:
        pass
