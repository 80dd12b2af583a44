"""A discovery that asks its store from a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import ClassVar, Generic, Protocol, TypeVar

from dynamo_core import Discovery, Lease, LoopThread, MetricsScope, PluginConfig, TaskSet, WatchEvent, wait_for_store
from dynamo_core.errors import CannotConnect, ConfigError

from dynamo_leases.fanout import Fanout
from dynamo_leases.follower import Follower, OnChange
from dynamo_leases.lease import StoreLease, new_lease_id
from dynamo_leases.maintainer import LeaseMaintainer, LeaseStore
from dynamo_leases.records import check_record
from dynamo_leases.times import check_ttl, heartbeat_interval

log = logging.getLogger(__name__)

#: Seconds that ending the thread may take.
STOP_TIMEOUT = 5.0


class RemoteStore(LeaseStore, Protocol):
    """A session's operations on the store, beside those of leases."""

    async def put_value(self, key: str, value: bytes | None) -> None:
        """Write a value that outlives its writer; None removes it."""
        ...

    async def probe(self) -> None:
        """Check that every operation is permitted that discovery needs, and leave nothing behind."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


S = TypeVar("S", bound=RemoteStore)


class Session(Generic[S]):
    """The part of a discovery in its thread: the store with its connections, the heartbeats, and the follower."""

    def __init__(self, store: S, follower: Follower, *, lost_after: float) -> None:
        self.store = store
        self._follower = follower
        self._lost_after = lost_after
        self._tasks = TaskSet()
        self._following = False

    async def refresh(self) -> None:
        """Read what is there, and follow from the first call on."""
        await self._follower.refresh()
        if not self._following:
            self._following = True
            self._tasks.spawn(self._follower.follow(), name="discovery-follow")

    async def maintain(self, lease: RemoteLease, ttl: float, heartbeat: float) -> LeaseMaintainer:
        """Register a lease and keep it alive."""
        maintainer = LeaseMaintainer(
            self.store, lease.id, ttl=ttl, heartbeat=heartbeat, lost_after=self._lost_after, on_lost=lease.mark_lost
        )
        await maintainer.register()
        self._tasks.spawn(maintainer.keep(), name="discovery-heartbeat")
        return maintainer

    async def aclose(self) -> None:
        """End what runs, and close the connections."""
        await self._tasks.aclose()
        await self.store.aclose()


class RemoteLease(StoreLease):
    """A lease as the process sees it; its `LeaseMaintainer` does the work in the thread."""

    def __init__(self, thread: LoopThread, lease_id: int, ttl: float) -> None:
        """`ttl` in seconds."""
        super().__init__(lease_id, ttl)
        self._thread = thread
        self._maintainer: LeaseMaintainer | None = None
        self._closed = False

    @property
    def ended(self) -> bool:
        return self._closed or self._lost.is_set()

    def bind(self, maintainer: LeaseMaintainer) -> None:
        """Name the maintainer, which lives in the thread."""
        self._maintainer = maintainer

    async def put(self, key: str, value: bytes) -> None:
        check_record(key, value)
        await self._thread.run(self._held().put(key, value))

    async def remove(self, key: str) -> None:
        await self._thread.run(self._held().remove(key))

    async def aclose(self) -> None:
        if self._closed or self._maintainer is None:
            return
        self._closed = True
        try:
            await self._thread.run(self._maintainer.close())
        except (CannotConnect, ValueError) as error:
            log.warning("lease %016x expires: %s", self._id, error)

    def _held(self) -> LeaseMaintainer:
        if self._maintainer is None or self._closed:
            raise ValueError("the lease is closed")
        return self._maintainer


class RemoteDiscovery(Discovery, ABC, Generic[S]):
    """Discovery in a store that a thread of its own asks.

    An engine that blocks the process's loop while it starts keeps its lease. From the first watch on, the thread
    follows the store for all watches.
    """

    #: The error of a store that cannot be reached at the start, with `{}` for the reason.
    UNREACHABLE: ClassVar[str]

    def __init__(
        self,
        config: PluginConfig,
        metrics: MetricsScope,
        *,
        ttl: float,
        heartbeat: float | None,
        start_timeout: float,
    ) -> None:
        """Take the times as configured, in seconds."""
        super().__init__(config, metrics)
        self._ttl = ttl
        self._heartbeat = heartbeat
        self._start_timeout = start_timeout
        self._thread = LoopThread(f"discovery-{self.NAME}", self._end)
        self._opening = asyncio.Lock()
        self._session: Session[S] | None = None
        self._leases: set[RemoteLease] = set()
        self._fanout = Fanout()

    @abstractmethod
    async def _connect(self, on_change: OnChange) -> Session[S]:
        """Make the session; called in the thread, once unless it fails.

        Raises:
            ConfigError: a setting cannot be used.
        """

    @staticmethod
    @abstractmethod
    def _as_config_error(error: CannotConnect) -> ConfigError | None:
        """Return the error if waiting would not help, with the key and the remedy; None if it may."""

    async def start(self) -> None:
        """Make sure that the store can be used.

        Raises:
            ConfigError: it refuses what the settings say, or a file that they name cannot be used.
            CannotConnect: it cannot be reached within the time to start.
        """
        await wait_for_store(
            self._probe,
            timeout=self._start_timeout,
            hopeless=self._as_config_error,
            unreachable=self.UNREACHABLE,
            tell=self.wait_for,
        )

    async def lease(self, ttl: float | None = None) -> Lease:
        """See `Discovery.lease`.

        Raises:
            CannotConnect: the store cannot be written.
            ValueError: discovery is closed.
        """
        seconds = self._ttl if ttl is None else ttl
        check_ttl(seconds)
        session = await self._open()
        # The process draws the id, so that a store that has forgotten the lease grants it again under the same id.
        lease = RemoteLease(self._thread, new_lease_id(), seconds)
        lease.bind(
            await self._thread.run(session.maintain(lease, seconds, heartbeat_interval(seconds, self._heartbeat)))
        )
        if self._fanout.is_closed():
            await lease.aclose()
            self._check_open()
        self._leases = {other for other in self._leases if not other.ended} | {lease}
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
        session = await self._open()
        await self._thread.run(session.store.put_value(key, value))

    async def aclose(self) -> None:
        self._fanout.close()
        leases, self._leases = self._leases, set()
        await asyncio.gather(*(lease.aclose() for lease in leases))
        await asyncio.to_thread(self._thread.stop, STOP_TIMEOUT)

    async def _probe(self) -> None:
        session = await self._open()
        await self._thread.run(session.store.probe())

    async def _refresh(self) -> None:
        try:
            await self._thread.run((await self._open()).refresh())
        except ValueError:
            # Closed meanwhile.
            if not self._fanout.is_closed():
                raise

    async def _open(self) -> Session[S]:
        async with self._opening:
            self._check_open()
            if self._session is None:
                self._session = await self._thread.run(self._connect(self._reporter()))
            return self._session

    async def _end(self) -> None:
        """Clean up at the end of the thread."""
        if self._session is not None:
            await self._session.aclose()

    def _reporter(self) -> OnChange:
        loop = asyncio.get_running_loop()

        def report(events: list[WatchEvent], synced: bool) -> None:
            try:
                loop.call_soon_threadsafe(self._publish, events, synced)
            except RuntimeError:
                log.debug("discovery changed after the event loop had ended")

        return report

    def _publish(self, events: list[WatchEvent], synced: bool) -> None:
        self._fanout.publish(events, synced=synced)

    def _check_open(self) -> None:
        if self._fanout.is_closed():
            raise ValueError("discovery is closed")
