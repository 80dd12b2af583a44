"""`EtcdDiscovery`: the plugin. Leases and watches of one process over a cluster shared with others."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import ssl
import time
from collections.abc import AsyncGenerator

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.discovery import Discovery, Lease, WatchEvent, WatchKind
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.errors import CannotConnect
from dynamo_core.tasks import TaskSet

from dynamo_plugin_discovery_etcd.client import Client, tls_context
from dynamo_plugin_discovery_etcd.config import EtcdConfig
from dynamo_plugin_discovery_etcd.errors import as_config_error
from dynamo_plugin_discovery_etcd.follower import Follower, Tell
from dynamo_plugin_discovery_etcd.holding import Holding
from dynamo_plugin_discovery_etcd.lease import EtcdLease
from dynamo_plugin_discovery_etcd.store import Store
from dynamo_plugin_discovery_etcd.thread import LoopThread
from dynamo_plugin_discovery_etcd.watcher import Watcher
from dynamo_plugin_discovery_etcd.wire import Keys, check

log = logging.getLogger(__name__)

#: Seconds between two attempts to start; varied by half.
RETRY = 0.5
#: Seconds that ending the thread may take.
STOP_TIMEOUT = 5.0


class _Session:
    """What lives in the plugin's own event loop: the connections, the heartbeats, and the follower."""

    def __init__(self, settings: EtcdConfig, tls: ssl.SSLContext | None, tell: Tell) -> None:
        self._settings = settings
        self.store = Store(Client(settings, tls), Keys(settings.prefix))
        self.follower = Follower(self.store, ttl=settings.ttl, poll=settings.poll, timeout=settings.timeout, tell=tell)
        self._tasks = TaskSet()
        self._following = False

    async def look(self) -> None:
        """Reads everything, and follows from the first call on."""
        await self.follower.look()
        if not self._following:
            self._following = True
            self._tasks.spawn(self.follower.follow(), name="discovery-follow")

    async def hold(self, lease: EtcdLease, ttl: float, heartbeat: float) -> Holding:
        """Registers a lease and keeps it alive."""
        lost_after = self._settings.lost_after
        holding = Holding(
            self.store, lease.id, ttl=ttl, heartbeat=heartbeat, lost_after=lost_after, on_lost=lease.tell_lost
        )
        await holding.register()
        self._tasks.spawn(holding.keep(), name="discovery-heartbeat")
        return holding

    async def aclose(self) -> None:
        """Ends what runs, and closes the connections."""
        await self._tasks.aclose()
        await self.store.client.aclose()


class EtcdDiscovery(Discovery):
    """Discovery for the processes of one system, on any number of hosts.

    All that is asked of etcd is asked in a thread with an event loop of its own, so that an engine that blocks the
    process's loop while it starts is not taken for dead. From the first watch on, it follows the store for all watches.
    """

    NAME = "etcd"
    Config = EtcdConfig

    def __init__(self, config: PluginConfig, metrics: MetricsScope) -> None:
        super().__init__(config, metrics)
        assert isinstance(config, EtcdConfig)  # noqa: S101 - the loader validates with `Config`
        self._settings = config
        self._thread = LoopThread("discovery-etcd", self._end)
        self._opening = asyncio.Lock()
        self._session: _Session | None = None
        self._leases: set[EtcdLease] = set()
        #: The view as the process's own loop has been told it.
        self._view: dict[str, bytes] = {}
        self._stale = False
        self._watchers: set[Watcher] = set()
        self._synced = asyncio.Event()
        self._closed = asyncio.Event()

    async def start(self) -> None:
        """Makes sure that the cluster can be used.

        Raises:
            ConfigError: it refuses what the settings say, or a file that they name cannot be used.
            CannotConnect: it cannot be reached within `start_timeout`.
        """
        session = await self._open()
        deadline = time.monotonic() + self._settings.start_timeout
        told = False
        while True:
            try:
                await self._thread.run(session.store.try_out())
            except CannotConnect as error:
                if (hopeless := as_config_error(error)) is not None:
                    raise hopeless from error
                left = deadline - time.monotonic()
                if left <= 0:
                    raise CannotConnect(
                        f"discovery.endpoints: {error}; start the cluster, or name the right one", cause=error
                    ) from error
                if not told:
                    log.warning("waiting up to %.0f s for discovery: %s", left, error)
                told = True
                await asyncio.sleep(min(left, _spread(RETRY)))
            else:
                return

    async def lease(self, ttl: float | None = None) -> Lease:
        """See `Discovery.lease`. etcd counts in full seconds and has a minimum, usually 2; both round up.

        Raises:
            CannotConnect: the store cannot be written.
            ValueError: discovery is closed.
        """
        settings = self._settings
        seconds = settings.ttl if ttl is None else ttl
        if not seconds > 0:
            raise ValueError("a lease needs a ttl of more than 0 seconds")
        session = await self._open()
        # Drawn here, so that a store that has forgotten it gives it back under the same id.
        lease = EtcdLease(self._thread, secrets.randbelow(2**63 - 1) + 1)
        heartbeat = min(seconds / 3 if settings.heartbeat is None else settings.heartbeat, seconds / 2)
        lease.bind(await self._thread.run(session.hold(lease, seconds, heartbeat)))
        if self._closed.is_set():
            await lease.aclose()
            self._refuse_if_closed()
        self._leases = {other for other in self._leases if not other.over} | {lease}
        return lease

    async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
        """See `Discovery.watch`. Before a store that cannot be read there is no snapshot: `STALE` until it can."""
        if self._closed.is_set():
            return
        await self._look()
        if not self._synced.is_set() and not self._closed.is_set():
            yield WatchEvent(WatchKind.STALE)
            await self._synced.wait()
        if self._closed.is_set():
            return
        watcher = Watcher(prefix)
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
            ValueError: the key or the value is too large, or discovery is closed.
            CannotConnect: the store cannot be written.
        """
        check(key, value or b"")
        session = await self._open()
        await self._thread.run(session.store.put_value(key, value))

    async def aclose(self) -> None:
        self._closed.set()
        # Those that wait for a snapshot end too.
        self._synced.set()
        for watcher in list(self._watchers):
            watcher.wake()
        leases, self._leases = self._leases, set()
        await asyncio.gather(*(lease.aclose() for lease in leases))
        await asyncio.to_thread(self._thread.stop, STOP_TIMEOUT)

    async def _look(self) -> None:
        try:
            await self._thread.run((await self._open()).look())
        except ValueError:
            # Closed meanwhile.
            if not self._closed.is_set():
                raise

    async def _open(self) -> _Session:
        async with self._opening:
            self._refuse_if_closed()
            if self._session is None:
                tls = await asyncio.to_thread(tls_context, self._settings)
                self._session = await self._thread.run(self._made(tls, asyncio.get_running_loop()))
            return self._session

    async def _end(self) -> None:
        """The last thing that happens in the thread."""
        if self._session is not None:
            await self._session.aclose()

    async def _made(self, tls: ssl.SSLContext | None, loop: asyncio.AbstractEventLoop) -> _Session:
        def tell(events: list[WatchEvent], synced: bool) -> None:
            try:
                loop.call_soon_threadsafe(self._told, events, synced)
            except RuntimeError:
                log.debug("discovery changed after the event loop had ended")

        return _Session(self._settings, tls, tell)

    def _told(self, events: list[WatchEvent], synced: bool) -> None:
        for event in events:
            match event.kind:
                case WatchKind.PUT:
                    self._view[event.key] = event.value
                case WatchKind.DELETE:
                    self._view.pop(event.key, None)
                case WatchKind.STALE | WatchKind.FRESH:
                    self._stale = event.kind is WatchKind.STALE
                case _:
                    continue
            for watcher in self._watchers:
                watcher.offer(event)
        if synced:
            self._synced.set()

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise ValueError("discovery is closed")


def _spread(seconds: float) -> float:
    # No cryptography: it only spreads the processes over the time.
    return seconds * (0.5 + random.random())  # noqa: S311
