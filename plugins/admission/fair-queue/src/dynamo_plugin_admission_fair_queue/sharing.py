"""Reports the usage of tenants to other frontends, and applies theirs, in the background."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from dynamo_core import TaskSet, pauses
from dynamo_core.errors import CannotConnect

from dynamo_plugin_admission_fair_queue.meters import SharingMeters
from dynamo_plugin_admission_fair_queue.peers import Peers
from dynamo_plugin_admission_fair_queue.shared_config import SharedConfig
from dynamo_plugin_admission_fair_queue.tenant_quotas import TenantLimits
from dynamo_plugin_admission_fair_queue.usage_codec import PeerSnapshot, encode

log = logging.getLogger(__name__)

#: Seconds until an unchanged report is sent again, a third of `ttl` if that is less; and the longest pause of failures.
_AGAIN = 1.0


class Store(ABC):
    """The store of frontends' reports. Every method raises `CannotConnect` if the store cannot be asked."""

    @abstractmethod
    async def exchange(self, report: bytes | None, known: Mapping[str, int]) -> PeerSnapshot:
        """Publish a report unless it is None, and read those of peers; `known` are the stamps of the last one."""

    @abstractmethod
    async def publish(self, report: bytes) -> None:
        """Publish a report."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the connection; another use makes a new one."""


class Sharing:
    """Owns the task. Decisions never wait for it: they use what `limits` know. Calls `wake` after a change."""

    def __init__(
        self,
        config: SharedConfig,
        limits: TenantLimits,
        store: Store,
        meters: SharingMeters,
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._limits = limits
        self._store = store
        self._meters = meters
        self._wake = wake
        self._peers = Peers(limits, config.ttl)
        self._tasks = TaskSet()
        self._timer: asyncio.TimerHandle | None = None
        self._exchanged = asyncio.Event()
        self._closed = False
        self._failures = 0
        self._pauses = self._begin_pauses()
        # The number of changes that peers know of, and when the report is sent again without further ones.
        self._reported = -1
        self._due = 0.0

    def _begin_pauses(self) -> Iterator[float]:
        return pauses(2 * self._config.interval, _AGAIN, most=1.0)

    async def start(self) -> None:
        """Begin, and return after the first exchange, also if it failed."""
        self._tasks.spawn(self._run(), name="share-limits")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.deadline):
                await self._exchanged.wait()

    async def aclose(self) -> None:
        """End, and report that this frontend counts no more. Safe twice, and without `start`."""
        reached = self._exchanged.is_set() and not self._failures and not self._closed
        self._closed = True
        await self._tasks.aclose()
        self._peers.clear()
        self._arm()
        if reached:
            # If the report is lost, the last one expires.
            with suppress(CannotConnect, TimeoutError, ValueError):
                async with asyncio.timeout(self._config.deadline):
                    tenants = self._limits.report(asyncio.get_running_loop().time())
                    await self._store.publish(encode(tenants, leaving=True))
        await self._store.aclose()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            # A flag besides, as a library may swallow a cancellation.
            while not self._closed:
                began, pause = loop.time(), self._config.interval
                try:
                    async with asyncio.timeout(self._config.deadline):
                        await self._round()
                except Exception as error:
                    self._failed(error)
                    pause = next(self._pauses)
                else:
                    self._succeeded()
                self._meters.peers(len(self._peers), stale=self._failures > 0)
                self._exchanged.set()
                await asyncio.sleep(max(0.0, began + pause - loop.time()))
        finally:
            # However the task ends: reports that are not renewed must not hold up requests for ever.
            self._peers.clear()
            self._wake()

    async def _round(self) -> None:
        loop = asyncio.get_running_loop()
        changes, report = self._limits.changes, None
        if changes != self._reported or loop.time() >= self._due:
            report = encode(self._limits.report(loop.time()))
        snapshot = await self._store.exchange(report, self._peers.stamps)
        now = loop.time()
        if report is not None:
            self._reported, self._due = changes, now + min(_AGAIN, self._config.ttl / 3)
        if self._peers.apply(snapshot, now):
            self._wake()
        self._arm()

    def _arm(self) -> None:
        """Plan the moment at which the next silent peer stops to count, even if the server hangs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        until = self._peers.until
        if until is not None:
            self._timer = asyncio.get_running_loop().call_at(until, self._expire)

    def _expire(self) -> None:
        if self._peers.expire(asyncio.get_running_loop().time()):
            self._wake()
        self._meters.peers(len(self._peers), stale=self._failures > 0)
        self._arm()

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures > 1 or self._closed:
            return
        text = f"Redis did not answer within {self._config.deadline:g} s" if isinstance(error, TimeoutError) else error
        known = isinstance(error, (CannotConnect, TimeoutError, ValueError))
        log.warning(
            "limits of tenants are not shared for now, each frontend keeps them for itself: %s",
            text,
            exc_info=None if known else error,
        )

    def _succeeded(self) -> None:
        if self._failures:
            log.info("limits of tenants are shared again")
        self._failures = 0
        self._pauses = self._begin_pauses()
