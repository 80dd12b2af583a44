"""A thread with an event loop of its own, which goes on while the process's loop is busy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other loops. Starts with the first; a daemon, so that a process that fails is not held up."""

    def __init__(self, name: str, closing: Callable[[], Awaitable[None]]) -> None:
        """Take `closing` as the end of the thread's work, when nothing else runs in it."""
        self._name = name
        self._closing = closing
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stopped = False

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread; if the caller is cancelled, so is the work.

        Raises:
            ValueError: the thread has been stopped.
        """
        try:
            running = self._submit(work)
        except ValueError:
            work.close()
            raise
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if self._stopped:
                current = asyncio.current_task()
                if current is None or not current.cancelling():
                    # The work was cut by `stop`, not the caller.
                    raise ValueError("discovery is closed") from None
            raise

    def stop(self, timeout: float) -> None:
        """Cancel what runs, end the thread and wait up to `timeout` seconds for it.

        Safe twice, and without `run`.
        """
        with self._lock:
            loop, stop, first = self._loop, self._stop, not self._stopped
            self._stopped = True
            if first and loop is not None and stop is not None:
                loop.call_soon_threadsafe(stop.set)
        if self._thread is not None:
            self._thread.join(timeout)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._stopped:
                raise ValueError("discovery is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
                self._thread.start()
                self._ready.wait()
            assert self._loop is not None  # noqa: S101 - set before it is ready
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _main(self) -> None:
        asyncio.run(self._wait())

    async def _wait(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._stop.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._closing()
