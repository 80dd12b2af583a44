"""One task that looks at a store for all watches of a process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from dynamo_core.tasks import TaskSet

log = logging.getLogger(__name__)

#: Seconds between two looks that were asked for by changes.
SOON = 0.02


class Looking:
    """Looks every `poll` seconds from the first `look` on, and soon after each call of `soon`."""

    def __init__(self, look_once: Callable[[], Awaitable[None]], poll: float) -> None:
        self._look_once = look_once
        self._poll = poll
        self._tasks = TaskSet()
        self._wanted = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._ended = False

    async def look(self) -> None:
        """Returns after a look that began after this call; at once if this has ended."""
        if self._ended:
            return
        if not self._tasks:
            self._tasks.spawn(self._keep_looking(), name="discovery-poll")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self.soon()
        await waiter

    def soon(self) -> None:
        """Asks for a look, as something has changed."""
        self._wanted.set()

    def end(self) -> None:
        """Lets the task end after the look that it is at, for libraries that swallow being cancelled."""
        self._ended = True

    async def aclose(self) -> None:
        """Ends the task, and lets go of whoever waits for a look."""
        self.end()
        await self._tasks.aclose()
        _release(self._waiting)

    async def _keep_looking(self) -> None:
        while not self._ended:
            self._wanted.clear()
            waiting, self._waiting = self._waiting, []
            begun = time.monotonic()
            try:
                await self._look_once()
            except Exception:
                # The watches must not stand still for ever because of one look.
                log.exception("the store of discovery could not be looked at")
            finally:
                _release(waiting)
            try:
                async with asyncio.timeout(self._poll):
                    await self._wanted.wait()
            except TimeoutError:
                continue
            # A burst of changes is one look.
            await asyncio.sleep(max(0.0, begun + SOON - time.monotonic()))


def _release(waiting: list[asyncio.Future[None]]) -> None:
    for waiter in waiting:
        if not waiter.done():
            waiter.set_result(None)
