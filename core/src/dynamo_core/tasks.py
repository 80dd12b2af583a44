"""Owners of background tasks: nothing runs without an owner that ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

from dynamo_core.resources import AsyncResource

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Seconds after which a task that was cancelled and goes on is cancelled again: longer than anybody takes to clean up,
#: as an engine may that is stopped.
AGAIN = 60.0


class TaskSet(AsyncResource):
    """Keeps tasks, reports the ones that fail, and ends them all in `aclose`."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, T], *, name: str, context: Context | None = None) -> asyncio.Task[T]:
        """Run a coroutine as a task of this set, in a copy of the present context unless another one is given."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task %s failed", task.get_name(), exc_info=error)

    async def join(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for all tasks to end by themselves; whether they did."""
        if not self._tasks:
            return True
        _, pending = await asyncio.wait(self._tasks, timeout=timeout)
        return not pending

    async def aclose(self) -> None:
        """Cancel all tasks and return when each has ended. A task may close the set it runs in.

        One that goes on is cancelled again: up to Python 3.11 `asyncio.wait_for`, which libraries use, forgets that it
        was cancelled if what it waits for ends in the same moment.
        """
        current = asyncio.current_task()
        tasks = {task for task in self._tasks if task is not current}
        while tasks:
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=AGAIN)
            for task in tasks:
                log.warning("task %s goes on %s s after it was cancelled; cancelling it again", task.get_name(), AGAIN)
