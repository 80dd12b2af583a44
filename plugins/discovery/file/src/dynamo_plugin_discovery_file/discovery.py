"""`FileDiscovery`: the plugin. Leases and watches of one process over a folder shared with others."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.discovery import Discovery, Lease, WatchEvent, WatchKind
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.errors import ConfigError
from dynamo_core.tasks import TaskSet
from pydantic import Field, model_validator

from dynamo_plugin_discovery_file.clock import SYSTEM, Clock
from dynamo_plugin_discovery_file.folder import RECORDS, Folder
from dynamo_plugin_discovery_file.keeper import Keeper
from dynamo_plugin_discovery_file.lease import FileLease, cannot_write
from dynamo_plugin_discovery_file.record import NO_LEASE, Record, check, encode, file_name
from dynamo_plugin_discovery_file.scanner import Scanner

log = logging.getLogger(__name__)

#: Seconds between two looks that were asked for by a change of this process's own.
SOON = 0.02
#: Seconds that ending the heartbeats may take.
STOP_TIMEOUT = 5.0


class FileConfig(PluginConfig):
    """Settings of file discovery. Times are in seconds."""

    path: str | None = Field(
        default=None, description="The folder; null means `dynamo-discovery-<user id>` below the host's temp folder."
    )
    ttl: float = Field(
        default=3.0, ge=0.1, le=3600, description="Seconds without a heartbeat after which a process counts as dead."
    )
    heartbeat: float | None = Field(
        default=None, gt=0, description="Seconds between two heartbeats; null means a third of `ttl`."
    )
    poll: float = Field(default=0.25, gt=0, description="Seconds between two looks at the folder.")

    @model_validator(mode="after")
    def _check_times(self) -> FileConfig:
        if self.heartbeat is not None and self.heartbeat > self.ttl / 2:
            raise ValueError(f"heartbeat ({self.heartbeat:g} s) must be at most half of ttl ({self.ttl:g} s)")
        if self.poll > self.ttl / 3:
            raise ValueError(f"poll ({self.poll:g} s) must be at most a third of ttl ({self.ttl:g} s)")
        return self


class FileDiscovery(Discovery):
    """Discovery for the processes of one user on one host.

    Heartbeats come from a thread, so that an engine that blocks the event loop while it starts is not taken for dead.
    One task looks at the folder for all watches of the process, from the first watch on.
    """

    NAME = "file"
    Config = FileConfig

    def __init__(self, config: PluginConfig, metrics: MetricsScope, *, clock: Clock = SYSTEM) -> None:
        super().__init__(config, metrics)
        assert isinstance(config, FileConfig)  # noqa: S101 - the loader validates with `Config`
        self._settings = config
        self._clock = clock
        self._folder = Folder(_path(config), clock)
        self._keeper = Keeper(clock)
        self._scanner = Scanner(self._folder, ttl=config.ttl, clock=clock)
        self._leases: set[FileLease] = set()
        self._view: dict[str, bytes] = {}
        self._watchers: set[_Watcher] = set()
        self._tasks = TaskSet()
        self._wanted = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._synced = asyncio.Event()
        self._stale = False
        self._closed = asyncio.Event()

    @property
    def path(self) -> Path:
        """The folder."""
        return self._folder.path

    async def start(self) -> None:
        """Makes the folder.

        Raises:
            ConfigError: it cannot be made, or must not be used: it belongs to somebody else.
        """
        try:
            await asyncio.to_thread(self._folder.prepare)
        except OSError as error:
            reason = str(error) if error.errno is None else f"{self.path} cannot be used: {error.strerror}"
            raise ConfigError(f"discovery.path: {reason}", cause=error) from error

    async def lease(self, ttl: float | None = None) -> Lease:
        """See `Discovery.lease`.

        Raises:
            CannotConnect: the folder cannot be written.
            ValueError: discovery is closed.
        """
        settings = self._settings
        seconds = settings.ttl if ttl is None else ttl
        if not seconds > 0:
            raise ValueError("a lease needs a ttl of more than 0 seconds")
        if self._closed.is_set():
            raise ValueError("discovery is closed")
        lease = FileLease(
            self._folder,
            secrets.randbelow(2**63 - 1) + 1,
            ttl=seconds,
            heartbeat=min(seconds / 3 if settings.heartbeat is None else settings.heartbeat, seconds / 2),
            clock=self._clock,
            on_change=self._look_soon,
        )
        try:
            await asyncio.to_thread(lease.register)
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        if self._closed.is_set():
            await lease.aclose()
            raise ValueError("discovery is closed")
        self._leases = {other for other in self._leases if not other.over} | {lease}
        self._keeper.add(lease)
        return lease

    async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
        """See `Discovery.watch`. Before a folder that cannot be read there is no snapshot: `STALE` until it can."""
        await self._look()
        if not self._synced.is_set():
            yield WatchEvent(WatchKind.STALE)
            while not (self._synced.is_set() or self._closed.is_set()):
                await self._look(at_once=False)
        if self._closed.is_set():
            return
        watcher = _Watcher(prefix)
        self._watchers.add(watcher)
        try:
            # Taken together with the registration, so that nothing falls between the two.
            snapshot = [item for item in self._view.items() if item[0].startswith(prefix)]
            stale = self._stale
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
            ValueError: the key or the value is too large.
            CannotConnect: the folder cannot be written.
        """
        check(key, value or b"")
        try:
            await asyncio.to_thread(self._put_value, key, value)
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        self._look_soon()

    async def aclose(self) -> None:
        self._closed.set()
        for watcher in list(self._watchers):
            watcher.wake()
        leases, self._leases = self._leases, set()
        await asyncio.gather(*(lease.aclose() for lease in leases))
        await self._tasks.aclose()
        self._looked(self._waiting)
        await asyncio.to_thread(self._keeper.stop, STOP_TIMEOUT)

    def _put_value(self, key: str, value: bytes | None) -> None:
        name = f"{RECORDS}/{file_name(key)}"
        if value is None:
            with self._folder.open() as place:
                place.remove(name)
            return
        data = encode(Record(key, value, NO_LEASE))
        try:
            with self._folder.open() as place:
                place.write(name, data)
        except FileNotFoundError:
            self._folder.prepare()
            with self._folder.open() as place:
                place.write(name, data)

    # Looking at the folder.

    async def _look(self, *, at_once: bool = True) -> None:
        """Returns after a look that began after this call."""
        if self._closed.is_set():
            return
        if not self._tasks:
            self._tasks.spawn(self._keep_looking(), name="discovery-poll")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        if at_once:
            self._look_soon()
        await waiter

    def _look_soon(self) -> None:
        self._wanted.set()

    async def _keep_looking(self) -> None:
        while True:
            self._wanted.clear()
            waiting, self._waiting = self._waiting, []
            begun = time.monotonic()
            try:
                # Reading a thousand files takes some milliseconds; requests do not wait for that.
                self._apply(await asyncio.to_thread(self._scanner.poll))
            except Exception:
                # The watches must not stand still for ever because of one look.
                log.exception("discovery folder %s could not be looked at", self.path)
            finally:
                self._looked(waiting)
            try:
                async with asyncio.timeout(self._settings.poll):
                    await self._wanted.wait()
            except TimeoutError:
                continue
            # A burst of puts is one look.
            await asyncio.sleep(max(0.0, begun + SOON - time.monotonic()))

    def _apply(self, events: list[WatchEvent]) -> None:
        if self._scanner.synced:
            self._synced.set()
        for event in events:
            match event.kind:
                case WatchKind.PUT:
                    self._view[event.key] = event.value
                case WatchKind.DELETE:
                    self._view.pop(event.key, None)
                case kind:
                    self._stale = kind is WatchKind.STALE
            for watcher in self._watchers:
                watcher.offer(event)

    @staticmethod
    def _looked(waiting: list[asyncio.Future[None]]) -> None:
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


class _Watcher:
    """Changes that wait for one watch: the newest per key, so that a slow reader holds no more than the view."""

    __slots__ = ("_pending", "_prefix", "_waiter")

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._pending: dict[str, WatchEvent] = {}
        self._waiter: asyncio.Future[None] | None = None

    def offer(self, event: WatchEvent) -> None:
        # `STALE` and `FRESH` have no key, and are for every watch; no record has the empty key.
        if event.key and not event.key.startswith(self._prefix):
            return
        self._pending.pop(event.key, None)
        self._pending[event.key] = event
        self.wake()

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def changes(self) -> list[WatchEvent]:
        """What waits, at least one change unless the watch is woken to end."""
        if not self._pending:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        changes = list(self._pending.values())
        self._pending.clear()
        return changes


def _path(config: FileConfig) -> Path:
    if config.path is not None:
        return Path(config.path).expanduser().absolute()
    return Path(tempfile.gettempdir()) / f"dynamo-discovery-{os.geteuid()}"
