"""A lease as the process sees it; the work is done in the plugin's own thread."""

from __future__ import annotations

import asyncio
import logging

from dynamo_core.contracts.discovery import Lease
from dynamo_core.errors import CannotConnect

from dynamo_plugin_discovery_etcd.holding import Holding
from dynamo_plugin_discovery_etcd.thread import LoopThread
from dynamo_plugin_discovery_etcd.wire import check

log = logging.getLogger(__name__)


class EtcdLease(Lease):
    """Made by `EtcdDiscovery.lease`. Its id is that of the lease in etcd."""

    def __init__(self, thread: LoopThread, lease_id: int) -> None:
        self._thread = thread
        self._id = lease_id
        self._loop = asyncio.get_running_loop()
        self._lost = asyncio.Event()
        self._holding: Holding | None = None
        self._closed = False

    @property
    def id(self) -> int:
        return self._id

    @property
    def lost(self) -> asyncio.Event:
        return self._lost

    @property
    def over(self) -> bool:
        """Whether it is closed or lost."""
        return self._closed or self._lost.is_set()

    def bind(self, holding: Holding) -> None:
        """Says what does the work."""
        self._holding = holding

    async def put(self, key: str, value: bytes) -> None:
        check(key, value)
        await self._thread.run(self._held().put(key, value))

    async def remove(self, key: str) -> None:
        await self._thread.run(self._held().remove(key))

    async def aclose(self) -> None:
        if self._closed or self._holding is None:
            return
        self._closed = True
        try:
            await self._thread.run(self._holding.close())
        except (CannotConnect, ValueError) as error:
            log.warning("lease %x expires: %s", self._id, error)

    def tell_lost(self) -> None:
        """Sets `lost`; called from the thread."""
        try:
            self._loop.call_soon_threadsafe(self._lost.set)
        except RuntimeError:
            # The loop has been closed, and with it everybody who could wait for this.
            log.debug("lease %x was lost after its event loop had ended", self._id)

    def _held(self) -> Holding:
        if self._holding is None or self._closed:
            raise ValueError("the lease is closed")
        return self._holding
