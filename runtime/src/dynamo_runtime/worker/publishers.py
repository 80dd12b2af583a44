"""Publishers of an engine's cache events and load on the event plane.

Best effort: what the plane drops is counted there, and subscribers see the gap. Nothing here makes an engine wait.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress

import msgspec
from dynamo_core.contracts.discovery import Lease
from dynamo_core.contracts.engine import KvEventSource, LLMEngine, LoadSource
from dynamo_core.contracts.engine_boundary import call_async, check_sources
from dynamo_core.contracts.transports.events import EventPlane, Publisher
from dynamo_core.protocol.events import KV_EVENTS, KV_METRICS, ActiveLoad, KvEvent, RouterEvent
from dynamo_core.resources import AsyncResource
from dynamo_core.tasks import TaskSet

from dynamo_runtime.worker.kv_history import KvHistory

log = logging.getLogger(__name__)

#: Events in one message; a loop turn with more sends several messages.
MAX_BATCH = 256
#: Seconds between two messages about the cache.
EVENT_INTERVAL = 0.02
#: Seconds between two messages about loads.
LOAD_INTERVAL = 0.1
#: Seconds after which loads are told again though nothing changed, for subscribers that came later or lost one.
LOAD_REFRESH = 2.0


def new_epoch() -> int:
    """Return a number for a run of a worker, higher than those of earlier runs: milliseconds, and a random part."""
    return time.time_ns() // 1_000_000 << 16 | secrets.randbits(16)


class EnginePublishers(AsyncResource):
    """The publishers of one engine; an engine without sources has none, and costs nothing."""

    def __init__(self) -> None:
        self._publishers: list[Publisher] = []
        self._events: KvEventPublisher | None = None
        self._tasks = TaskSet()
        #: What was told of the cache, for readers that missed some of it.
        self.history = KvHistory(0, kept=False)

    async def start(
        self,
        engine: LLMEngine,
        plane: EventPlane,
        lease: Lease,
        *,
        kv_events: bool = True,
        kv_history: bool = True,
        total_blocks: int | None = None,
    ) -> None:
        """Subscribe to every source of a started engine; without `kv_events` it is not asked for those.

        Without `kv_history` what was told of the cache is not remembered. `total_blocks` are the KV blocks of each
        rank, for loads that do not tell them.

        Raises:
            DynamoError: the event plane cannot be used, or what the engine names is no list of sources.
        """
        caches = await call_async(engine, "kv_event_sources") if kv_events else ()
        check_sources(engine, "kv_event_sources", caches, KvEventSource)
        if caches:
            epoch = new_epoch()
            self.history = KvHistory(epoch, kept=kv_history)
            publisher = await self._publisher(plane, KV_EVENTS, lease)
            self._events = KvEventPublisher(lease.id, publisher, self.history, epoch)
            for cache in caches:
                self.history.begin(cache.dp_rank)
                cache.subscribe(self._events.send)
        ranks = await call_async(engine, "load_sources")
        check_sources(engine, "load_sources", ranks, LoadSource)
        if ranks:
            loads = LoadPublisher(await self._publisher(plane, KV_METRICS, lease), total_blocks)
            for rank in ranks:
                rank.subscribe(loads.send)
            self._tasks.spawn(loads.run(), name="load publisher")

    async def aclose(self) -> None:
        """Send what waits and stop publishing. Safe twice, and without `start`."""
        await self._tasks.aclose()
        if self._events is not None:
            self._events.flush()
        while self._publishers:
            try:
                await self._publishers.pop().aclose()
            except Exception as error:
                log.warning("a publisher of events could not be closed: %s", error)

    async def _publisher(self, plane: EventPlane, subject: str, lease: Lease) -> Publisher:
        publisher = await plane.publisher(subject, lease)
        self._publishers.append(publisher)
        return publisher


class KvEventPublisher:
    """A publisher that sends the first event at the end of the loop turn, and those soon after together."""

    __slots__ = ("_batch", "_encoder", "_epoch", "_flushed", "_history", "_publisher", "_worker_id")

    def __init__(self, worker_id: int, publisher: Publisher, history: KvHistory, epoch: int) -> None:
        self._worker_id = worker_id
        self._publisher = publisher
        self._history = history
        self._epoch = epoch
        self._flushed = 0.0
        self._encoder = msgspec.msgpack.Encoder()
        self._batch: list[RouterEvent] = []

    def send(self, event: KvEvent) -> None:
        """Take an event of any rank."""
        self._history.note(event)
        batch = self._batch
        batch.append(RouterEvent(self._worker_id, event, self._epoch))
        if len(batch) == 1:
            loop = asyncio.get_running_loop()
            now = loop.time()
            if now - self._flushed >= EVENT_INTERVAL:
                self._flushed = now
                loop.call_soon(self.flush)
            else:
                # Reading a message costs every router as much as a few of the events in it.
                self._flushed += EVENT_INTERVAL
                loop.call_at(self._flushed, self.flush)
        elif len(batch) == MAX_BATCH:
            self.flush()

    def flush(self) -> None:
        """Send what has gathered."""
        batch, self._batch = self._batch, []
        if batch:
            self._publisher.send(self._encoder.encode(batch))


class LoadPublisher:
    """Sends the newest load of each rank, at once if nothing was sent lately, else when its time has come."""

    __slots__ = ("_changed", "_dirty", "_encoder", "_latest", "_publisher", "_total_blocks")

    def __init__(self, publisher: Publisher, total_blocks: int | None = None) -> None:
        self._total_blocks = total_blocks
        self._publisher = publisher
        self._encoder = msgspec.msgpack.Encoder()
        self._latest: dict[int, ActiveLoad] = {}
        self._dirty: dict[int, ActiveLoad] = {}
        self._changed = asyncio.Event()

    def send(self, load: ActiveLoad) -> None:
        """Take the load of a rank; one that says nothing new is dropped."""
        if self._latest.get(load.dp_rank) != load:
            self._latest[load.dp_rank] = self._dirty[load.dp_rank] = load
            self._changed.set()

    async def run(self) -> None:
        """Send until cancelled."""
        loop = asyncio.get_running_loop()
        told = loop.time()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOAD_REFRESH):
                    await self._changed.wait()
            self._changed.clear()
            loads = [*self._dirty.values()]
            self._dirty.clear()
            if loop.time() - told >= LOAD_REFRESH:
                told = loop.time()
                loads = [*self._latest.values()]
            if self._total_blocks is not None:
                loads = [self._whole(load) for load in loads]
            if loads:
                self._publisher.send(self._encoder.encode(loads))
            await asyncio.sleep(LOAD_INTERVAL)

    def _whole(self, load: ActiveLoad) -> ActiveLoad:
        if load.kv_total_blocks is not None:
            return load
        return msgspec.structs.replace(load, kv_total_blocks=self._total_blocks)
