"""Tells other frontends what tenants have here, and hears what they have there, in the background."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from dynamo_core.backoff import pauses
from dynamo_core.errors import CannotConnect
from dynamo_core.tasks import TaskSet

from dynamo_plugin_admission_fair_queue.limits import TenantLimits
from dynamo_plugin_admission_fair_queue.meters import SharingMeters
from dynamo_plugin_admission_fair_queue.others import Others
from dynamo_plugin_admission_fair_queue.shared_config import SharedConfig
from dynamo_plugin_admission_fair_queue.told import Look, encode

log = logging.getLogger(__name__)

#: Seconds after which the same is told again, unless a third of `ttl` is less, and the longest pause after a failure.
_AGAIN = 1.0


class Store(ABC):
    """Where frontends tell each other. Every method raises `CannotConnect` if it cannot be asked."""

    @abstractmethod
    async def exchange(self, told: bytes | None, known: Mapping[str, int]) -> Look:
        """Tells something unless it is None, and looks at the others; `known` are the stamps of the last look."""

    @abstractmethod
    async def tell(self, told: bytes) -> None:
        """Tells something."""

    @abstractmethod
    async def aclose(self) -> None:
        """Ends the connection; another use makes a new one."""


class Sharing:
    """Owns the task. Decisions never wait for it: they go by what `limits` know. `wake` is called after a change."""

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
        self._others = Others(limits, config.ttl)
        self._tasks = TaskSet()
        self._timer: asyncio.TimerHandle | None = None
        self._looked = asyncio.Event()
        self._closed = False
        self._failures = 0
        self._pauses = self._begin_pauses()
        # The number of changes that others know of, and when it is told again although there are no more.
        self._told = -1
        self._due = 0.0

    def _begin_pauses(self) -> Iterator[float]:
        return pauses(2 * self._config.interval, _AGAIN, most=1.0)

    async def start(self) -> None:
        """Begins, and returns when the others have been looked at, or could not be."""
        self._tasks.spawn(self._run(), name="share-limits")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.deadline):
                await self._looked.wait()

    async def aclose(self) -> None:
        """Ends, and tells the others that nothing of this frontend counts any more. Safe twice, and without `start`."""
        reached = self._looked.is_set() and not self._failures and not self._closed
        self._closed = True
        await self._tasks.aclose()
        self._others.clear()
        self._arm()
        if reached:
            # If they do not hear it, what was told last expires.
            with suppress(CannotConnect, TimeoutError, ValueError):
                async with asyncio.timeout(self._config.deadline):
                    tenants = self._limits.tell(asyncio.get_running_loop().time())
                    await self._store.tell(encode(tenants, leaving=True))
        await self._store.aclose()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            # A flag besides, as a library may swallow a cancelling.
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
                self._meters.others(len(self._others), stale=self._failures > 0)
                self._looked.set()
                await asyncio.sleep(max(0.0, began + pause - loop.time()))
        finally:
            # However this ends: what nobody renews must not hold up anybody for ever.
            self._others.clear()
            self._wake()

    async def _round(self) -> None:
        loop = asyncio.get_running_loop()
        changes, told = self._limits.changes, None
        if changes != self._told or loop.time() >= self._due:
            told = encode(self._limits.tell(loop.time()))
        look = await self._store.exchange(told, self._others.stamps)
        now = loop.time()
        if told is not None:
            self._told, self._due = changes, now + min(_AGAIN, self._config.ttl / 3)
        if self._others.hear(look, now):
            self._wake()
        self._arm()

    def _arm(self) -> None:
        """Sees to it that who is silent stops to count in time, even if the server hangs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        until = self._others.until
        if until is not None:
            self._timer = asyncio.get_running_loop().call_at(until, self._expire)

    def _expire(self) -> None:
        if self._others.expire(asyncio.get_running_loop().time()):
            self._wake()
        self._meters.others(len(self._others), stale=self._failures > 0)
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
