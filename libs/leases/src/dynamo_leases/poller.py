"""One task that polls a store for all watches of a process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from dynamo_core import TaskSet

log = logging.getLogger(__name__)

#: The shortest time between two polls that changes ask for, in seconds.
SOON = 0.02


class Poller:
    """Polls every `interval` seconds from the first `poll` on, and soon after each call of `poll_soon`."""

    def __init__(self, poll_once: Callable[[], Awaitable[None]], interval: float) -> None:
        self._poll_once = poll_once
        self._interval = interval
        self._tasks = TaskSet()
        self._wanted = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._stopped = False

    async def poll(self) -> None:
        """Return after a poll that began after this call; at once if the poller has stopped."""
        if self._stopped:
            return
        if not self._tasks:
            self._tasks.spawn(self._run(), name="discovery-poll")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self.poll_soon()
        await waiter

    def poll_soon(self) -> None:
        """Ask for a poll, as something has changed."""
        self._wanted.set()

    def stop(self) -> None:
        """End the task after the poll that it is at, for libraries that swallow a cancellation."""
        self._stopped = True

    async def aclose(self) -> None:
        """End the task, and release the callers that wait for a poll."""
        self.stop()
        await self._tasks.aclose()
        _release(self._waiting)

    async def _run(self) -> None:
        while not self._stopped:
            self._wanted.clear()
            waiting, self._waiting = self._waiting, []
            begun = time.monotonic()
            try:
                await self._poll_once()
            except Exception:
                # One failed poll must not end the watches.
                log.exception("the store of discovery could not be looked at")
            finally:
                _release(waiting)
            try:
                async with asyncio.timeout(self._interval):
                    await self._wanted.wait()
            except TimeoutError:
                continue
            # A burst of changes is one poll.
            await asyncio.sleep(max(0.0, begun + SOON - time.monotonic()))


def _release(waiting: list[asyncio.Future[None]]) -> None:
    for waiter in waiting:
        if not waiter.done():
            waiter.set_result(None)
