"""`Lane`: threads with a connection each, which owners use in turn."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar
from weakref import WeakValueDictionary

from dynamo_core.errors import Unavailable

T = TypeVar("T")


class Lane:
    """Runs transactions in `threads` threads, of each owner one at a time.

    An owner with many calls therefore delays another one by the calls that run now, and not by its whole queue.
    """

    def __init__(self, threads: int, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="response-store")
        self._room = asyncio.Semaphore(threads)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._idle: list[sqlite3.Connection] = []

    async def run(self, owner: str, question: Callable[[sqlite3.Connection], T]) -> T:
        """Return the answer to `question`, asked in a transaction when it is the owner's turn.

        Raises:
            Unavailable: the file cannot be used, or the lane is closed.
        """
        # The semaphore is first come, first served; the lock lets one call of each owner come.
        turn = self._turns.setdefault(owner, asyncio.Lock())
        async with turn, self._room:
            try:
                future = self._executor.submit(self._ask, question)
            except RuntimeError as error:
                raise Unavailable("the response store is closed", cause=error) from error
            return await asyncio.wrap_future(future)

    async def aclose(self) -> None:
        """Finish the calls that run, and close the connections. Safe twice."""
        await asyncio.to_thread(self._executor.shutdown)
        while self._idle:
            self._idle.pop().close()

    def _ask(self, question: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._idle.pop() if self._idle else self._connect()
        try:
            with connection:
                answer = question(connection)
        except BaseException:
            # An error of the file may be one of this connection only.
            with suppress(sqlite3.Error):
                connection.close()
            raise
        self._idle.append(connection)
        return answer
