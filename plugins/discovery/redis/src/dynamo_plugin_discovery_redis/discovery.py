"""`RedisDiscovery`: the plugin. Leases and watches of one process over a server shared with others."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TypeVar

from dynamo_core import Discovery, Lease, MetricsScope, PluginConfig, TaskSet, WatchEvent, jitter, wait_for_store
from dynamo_core.errors import CannotConnect
from dynamo_leases import Fanout, HeartbeatThread, Poller, check_record, check_ttl, heartbeat_interval, new_lease_id
from dynamo_redis import RedisFailure, config_error

from dynamo_plugin_discovery_redis.config import RedisConfig
from dynamo_plugin_discovery_redis.lease import RedisLease
from dynamo_plugin_discovery_redis.reader import Reader
from dynamo_plugin_discovery_redis.store import Store
from dynamo_plugin_discovery_redis.view import View

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Seconds between two attempts to hear of changes; varied by half.
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
        self._heartbeats = HeartbeatThread()
        self._leases: set[RedisLease] = set()
        self._view = View(config.ttl)
        self._fanout = Fanout()
        self._poller = Poller(self._poll_once, config.poll)
        self._tasks = TaskSet()

    async def start(self) -> None:
        """Make sure that the server can be used.

        Raises:
            ConfigError: it refuses what the settings say, or a file that they name cannot be used.
            CannotConnect: it cannot be reached within `start_timeout`.
        """
        self._open()
        await wait_for_store(
            self._probe,
            timeout=self._settings.start_timeout,
            hopeless=lambda error: config_error(error, "discovery"),
            unreachable="discovery.url: {}; start the server, or name the right one",
            tell=self.wait_for,
        )

    async def lease(self, ttl: float | None = None) -> Lease:
        """See `Discovery.lease`.

        Raises:
            CannotConnect: the store cannot be written.
            ValueError: discovery is closed.
        """
        settings = self._settings
        seconds = settings.ttl if ttl is None else ttl
        check_ttl(seconds)
        self._check_open()
        lease = RedisLease(
            self._open()[0],
            new_lease_id(),
            ttl=seconds,
            heartbeat=heartbeat_interval(seconds, settings.heartbeat),
            in_thread=self._in_thread,
            on_change=self._poller.poll_soon,
        )
        await self._in_thread(lease.register)
        if self._fanout.is_closed():
            await lease.aclose()
            self._check_open()
        self._leases = {other for other in self._leases if not other.ended} | {lease}
        self._heartbeats.add(lease)
        return lease

    def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
        """See `Discovery.watch`. Before a store that cannot be read there is no snapshot: `STALE` until it can."""
        return self._fanout.watch(prefix, self._refresh)

    async def put_value(self, key: str, value: bytes | None) -> None:
        """See `Discovery.put_value`.

        Raises:
            ValueError: the key or the value is too large, or discovery is closed.
            CannotConnect: the store cannot be written.
        """
        check_record(key, value or b"")
        self._check_open()
        store, _ = self._open()
        await self._in_thread(lambda: store.put_value(key, value))
        self._poller.poll_soon()

    async def aclose(self) -> None:
        self._fanout.close()
        self._poller.stop()
        if self._opened is not None:
            self._opened[1].end()
        leases, self._leases = self._leases, set()
        await asyncio.gather(*(lease.aclose() for lease in leases))
        await self._tasks.aclose()
        await self._poller.aclose()
        await asyncio.to_thread(self._heartbeats.stop, STEPS * self._settings.timeout)
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

    async def _probe(self) -> None:
        """Read, write and listen once, so that a missing permission is found before anything has started."""
        store, reader = self._open()
        reading = await self._in_time(reader.read())
        self._fanout.publish(self._view.read(reading, time.monotonic()), synced=self._view.is_synced())
        async with aclosing(reader.changes()) as changes:
            await self._in_time(anext(changes))
        await self._in_thread(store.probe)

    async def _in_thread(self, work: Callable[[], None]) -> None:
        """Run what blocks; a caller that is cancelled does not stop it."""
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RuntimeError:
            # The threads have ended, with `aclose`: only a lease that outlived it can come here.
            raise ValueError("discovery is closed") from None
        await self._in_time(running)

    async def _in_time(self, waiting: Awaitable[T]) -> T:
        """Bound all steps together, and looking up the host's name; the library bounds each step."""
        try:
            async with asyncio.timeout(STEPS * self._settings.timeout):
                return await waiting
        except TimeoutError as error:
            where = f"{self._settings.host}:{self._settings.port}"
            raise CannotConnect(f"Redis at {where} does not answer", cause=error) from error

    def _check_open(self) -> None:
        if self._fanout.is_closed():
            raise ValueError("discovery is closed")

    async def _refresh(self) -> None:
        """See `Poller.poll`; from the first one on, changes are listened for."""
        if self._fanout.is_closed():
            return
        _, reader = self._open()
        if not self._tasks:
            self._tasks.spawn(self._keep_listening(reader), name="discovery-changes")
        await self._poller.poll()

    async def _poll_once(self) -> None:
        _, reader = self._open()
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
        self._fanout.publish(events, synced=self._view.is_synced())

    async def _keep_listening(self, reader: Reader) -> None:
        """Look soon after each change; without this, only at the next poll."""
        # See `Reader.end` for why being cancelled is not enough.
        while not self._fanout.is_closed():
            try:
                async with aclosing(reader.changes()) as changes:
                    async for _ in changes:
                        self._poller.poll_soon()
            except CannotConnect as error:
                refused = isinstance(error, RedisFailure) and error.refused
                (log.warning if refused else log.debug)("changes are heard of late: %s", error)
            except Exception:
                log.exception("changes are heard of late")
            await asyncio.sleep(jitter(RETRY))
