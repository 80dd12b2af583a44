"""`RedisDiscovery`: the plugin. Leases and watches of one process over a server shared with others."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TypeVar

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.discovery import Discovery, Lease, WatchEvent, WatchKind
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.errors import CannotConnect
from dynamo_core.tasks import TaskSet

from dynamo_plugin_discovery_redis.config import RedisConfig
from dynamo_plugin_discovery_redis.connect import Refused, as_config_error
from dynamo_plugin_discovery_redis.keeper import Keeper
from dynamo_plugin_discovery_redis.lease import RedisLease, check
from dynamo_plugin_discovery_redis.reader import Reader
from dynamo_plugin_discovery_redis.store import Store
from dynamo_plugin_discovery_redis.view import View
from dynamo_plugin_discovery_redis.watcher import Watcher

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Seconds between two looks that were asked for by changes.
SOON = 0.02
#: The longest pause between two attempts to hear of changes, or to start; varied by half.
RETRY = 2.0
#: So many times `timeout` is what connecting and asking may take together, and doing it again.
STEPS = 6
#: Threads that write; a server that hangs must not take those that others need.
WRITERS = 4


class RedisDiscovery(Discovery):
    """Discovery for the processes of one system, on any number of hosts.

    Heartbeats come from a thread, so that an engine that blocks the event loop while it starts is not taken for dead.
    From the first watch on, one task looks at the store for all watches of the process, and one hears of changes.
    """

    NAME = "redis"
    Config = RedisConfig

    def __init__(self, config: PluginConfig, metrics: MetricsScope) -> None:
        super().__init__(config, metrics)
        assert isinstance(config, RedisConfig)  # noqa: S101 - the loader validates with `Config`
        self._settings = config
        self._opened: tuple[Store, Reader] | None = None
        self._threads = ThreadPoolExecutor(WRITERS, thread_name_prefix="discovery-write")
        self._keeper = Keeper()
        self._leases: set[RedisLease] = set()
        self._view = View(config.ttl)
        self._watchers: set[Watcher] = set()
        self._tasks = TaskSet()
        self._wanted = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._closed = asyncio.Event()

    async def start(self) -> None:
        """Makes sure that the server can be used.

        Raises:
            ConfigError: it refuses what the settings say, or a file that they name cannot be used.
            CannotConnect: it cannot be reached within `start_timeout`.
        """
        self._open()
        deadline = time.monotonic() + self._settings.start_timeout
        told = False
        while True:
            try:
                await self._try_out()
            except CannotConnect as error:
                if (hopeless := as_config_error(self._settings, error)) is not None:
                    raise hopeless from error
                left = deadline - time.monotonic()
                if left <= 0:
                    raise CannotConnect(
                        f"discovery.url: {error}; start the server, or name the right one", cause=error
                    ) from error
                if not told:
                    log.warning("waiting up to %.0f s for discovery: %s", left, error)
                told = True
                await asyncio.sleep(min(left, _spread(RETRY / 4)))
            else:
                return

    async def lease(self, ttl: float | None = None) -> Lease:
        """See `Discovery.lease`.

        Raises:
            CannotConnect: the store cannot be written.
            ValueError: discovery is closed.
        """
        settings = self._settings
        seconds = settings.ttl if ttl is None else ttl
        if not seconds > 0:
            raise ValueError("a lease needs a ttl of more than 0 seconds")
        self._refuse_if_closed()
        lease = RedisLease(
            self._open()[0],
            secrets.randbelow(2**63 - 1) + 1,
            ttl=seconds,
            heartbeat=min(seconds / 3 if settings.heartbeat is None else settings.heartbeat, seconds / 2),
            in_thread=self._in_thread,
            on_change=self._look_soon,
        )
        await self._in_thread(lease.register)
        if self._closed.is_set():
            await lease.aclose()
            self._refuse_if_closed()
        self._leases = {other for other in self._leases if not other.over} | {lease}
        self._keeper.add(lease)
        return lease

    async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
        """See `Discovery.watch`. Before a store that cannot be read there is no snapshot: `STALE` until it can."""
        await self._look()
        if not self._view.is_synced():
            yield WatchEvent(WatchKind.STALE)
            while not (self._view.is_synced() or self._closed.is_set()):
                await self._look(at_once=False)
        if self._closed.is_set():
            return
        watcher = Watcher(prefix)
        self._watchers.add(watcher)
        try:
            # Taken together with the registration, so that nothing falls between the two.
            snapshot = [item for item in self._view.records.items() if item[0].startswith(prefix)]
            stale = self._view.stale
            for key, value in snapshot:
                yield WatchEvent(WatchKind.PUT, key, value)
            yield WatchEvent(WatchKind.SYNCED)
            if stale:
                yield WatchEvent(WatchKind.STALE)
            while not self._closed.is_set():
                for event in await watcher.changes():
                    yield event
        finally:
            self._watchers.discard(watcher)

    async def put_value(self, key: str, value: bytes | None) -> None:
        """See `Discovery.put_value`.

        Raises:
            ValueError: the key or the value is too large, or discovery is closed.
            CannotConnect: the store cannot be written.
        """
        check(key, value or b"")
        self._refuse_if_closed()
        store, _ = self._open()
        await self._in_thread(lambda: store.put_value(key, value))
        self._look_soon()

    async def aclose(self) -> None:
        self._closed.set()
        if self._opened is not None:
            self._opened[1].end()
        for watcher in list(self._watchers):
            watcher.wake()
        leases, self._leases = self._leases, set()
        await asyncio.gather(*(lease.aclose() for lease in leases))
        await self._tasks.aclose()
        self._looked(self._waiting)
        await asyncio.to_thread(self._keeper.stop, STEPS * self._settings.timeout)
        self._threads.shutdown(wait=False)
        opened, self._opened = self._opened, None
        if opened is not None:
            store, reader = opened
            store.close()
            await reader.aclose()

    def _open(self) -> tuple[Store, Reader]:
        if self._opened is None:
            self._opened = (Store(self._settings), Reader(self._settings))
        return self._opened

    async def _try_out(self) -> None:
        """Reads, writes and listens once, so that a missing permission is found before anything has started."""
        store, reader = self._open()
        reading = await self._in_time(reader.read())
        self._view.read(reading, time.monotonic())
        async with aclosing(reader.changes()) as changes:
            await self._in_time(anext(changes))
        await self._in_thread(store.try_out)

    async def _in_thread(self, work: Callable[[], None]) -> None:
        """Runs what blocks; a caller that is cancelled does not stop it."""
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RuntimeError:
            # The threads have ended, with `aclose`: only a lease that outlived it can come here.
            raise ValueError("discovery is closed") from None
        await self._in_time(running)

    async def _in_time(self, waiting: Awaitable[T]) -> T:
        """The library bounds each step; this bounds all of them together, and looking up the host's name."""
        try:
            async with asyncio.timeout(STEPS * self._settings.timeout):
                return await waiting
        except TimeoutError as error:
            where = f"{self._settings.host}:{self._settings.port}"
            raise CannotConnect(f"Redis at {where} does not answer", cause=error) from error

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise ValueError("discovery is closed")

    # Looking at the store.

    async def _look(self, *, at_once: bool = True) -> None:
        """Returns after a look that began after this call."""
        if self._closed.is_set():
            return
        if not self._tasks:
            _, reader = self._open()
            self._tasks.spawn(self._keep_looking(reader), name="discovery-poll")
            self._tasks.spawn(self._keep_listening(reader), name="discovery-changes")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        if at_once:
            self._look_soon()
        await waiter

    def _look_soon(self) -> None:
        self._wanted.set()

    async def _keep_looking(self, reader: Reader) -> None:
        # See `Reader.end` for why being cancelled is not enough.
        while not self._closed.is_set():
            self._wanted.clear()
            waiting, self._waiting = self._waiting, []
            begun = time.monotonic()
            try:
                await self._look_once(reader)
            except Exception:
                # The watches must not stand still for ever because of one look.
                log.exception("the store of discovery could not be looked at")
            finally:
                self._looked(waiting)
            try:
                async with asyncio.timeout(self._settings.poll):
                    await self._wanted.wait()
            except TimeoutError:
                continue
            # A burst of changes is one look.
            await asyncio.sleep(max(0.0, begun + SOON - time.monotonic()))

    async def _look_once(self, reader: Reader) -> None:
        was_stale = self._view.stale
        try:
            reading = await self._in_time(reader.read())
        except CannotConnect as error:
            events = self._view.failed()
            if events:
                log.warning("discovery is stale, the last view is kept: %s", error)
        else:
            events = self._view.read(reading, time.monotonic())
            if self._view.stale and not was_stale:
                log.warning("the store of discovery has been emptied; the last view is kept until the leases are back")
            elif was_stale and not self._view.stale:
                log.info("discovery is current again")
        for event in events:
            for watcher in self._watchers:
                watcher.offer(event)

    async def _keep_listening(self, reader: Reader) -> None:
        """Looks soon after each change; without this, only at the next poll."""
        while not self._closed.is_set():
            try:
                async with aclosing(reader.changes()) as changes:
                    async for _ in changes:
                        self._look_soon()
            except CannotConnect as error:
                (log.warning if isinstance(error, Refused) else log.debug)("changes are heard of late: %s", error)
            except Exception:
                log.exception("changes are heard of late")
            await asyncio.sleep(_spread(RETRY))

    @staticmethod
    def _looked(waiting: list[asyncio.Future[None]]) -> None:
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


def _spread(seconds: float) -> float:
    # No cryptography: it only spreads the processes over the time.
    return seconds * (0.5 + random.random())  # noqa: S311
