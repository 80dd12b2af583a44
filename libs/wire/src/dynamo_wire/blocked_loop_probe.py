"""A thread that watches whether an event loop runs. Answers to probes report it to callers.

It does nothing while no caller probes. A thread can only answer while it gets Python's interpreter lock: an engine that
holds the lock for longer than callers wait looks like a dead process.
"""

from __future__ import annotations

import asyncio
import contextvars
from time import monotonic

#: Seconds within which a loop that is not blocked runs a callback of another thread.
ANSWER_TIME = 0.15


class LoopWatch:
    """Watches the loop in which it is made. `busy` is called in another thread's loop, and only in one."""

    def __init__(self) -> None:
        self._watched = asyncio.get_running_loop()
        #: What the watched loop was asked and has not answered yet, and since when.
        self._asked: asyncio.Future[None] | None = None
        self._since = 0.0

    async def busy(self) -> float:
        """Return seconds for which the watched loop is known not to have run; 0 if it runs.

        Raises:
            RuntimeError: the loop has been closed.
        """
        asked = self._asked
        if asked is None or asked.done():
            here = asyncio.get_running_loop()
            asked = here.create_future()
            self._watched.call_soon_threadsafe(_answer, here, asked, context=contextvars.Context())
            self._asked, self._since = asked, monotonic()
        try:
            async with asyncio.timeout(ANSWER_TIME):
                await asyncio.shield(asked)
        except TimeoutError:
            return monotonic() - self._since
        return 0.0


def _answer(asking: asyncio.AbstractEventLoop, asked: asyncio.Future[None]) -> None:
    """Run in the watched loop."""
    try:
        asking.call_soon_threadsafe(_done, asked)
    except RuntimeError:
        # The asking thread has ended meanwhile.
        return


def _done(asked: asyncio.Future[None]) -> None:
    if not asked.done():
        asked.set_result(None)
