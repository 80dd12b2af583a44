"""Deadlines of one length: however many requests wait for theirs, the event loop has one timer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType

log = logging.getLogger(__name__)


class Alarms:
    """Calls back `delay` seconds after `set`, unless `cancel` comes first.

    All delays are equal, so alarms go off in the order in which they were set: the first one is always the next. To set
    or cancel one costs an entry in a dictionary. The loop's timer is set when the first alarm is, and again only when
    it has gone off, not for every request.
    """

    __slots__ = ("_delay", "_last", "_timer", "_waiting")

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._last = 0
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[int, tuple[float, Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def set(self, callback: Callable[[], None]) -> int:
        """Sets an alarm and returns its number. A callback may set and cancel others."""
        loop = asyncio.get_running_loop()
        number = self._last = self._last + 1
        due = loop.time() + self._delay
        self._waiting[number] = (due, callback)
        if self._timer is None:
            self._timer = loop.call_at(due, self._go_off)
        return number

    def cancel(self, number: int) -> None:
        """Takes an alarm back; one that went off, or was taken back before, does not mind."""
        self._waiting.pop(number, None)

    def within(self) -> Within:
        """``with alarms.within():`` bounds what is awaited in the block, as `asyncio.timeout` does.

        Raises:
            TimeoutError: it took longer; what was awaited has been cancelled.
        """
        return Within(self)

    def _go_off(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        waiting = self._waiting
        # The loop may round a timer down: what is due within its resolution is due.
        now = loop.time() + 0.001
        while waiting:
            number, (due, callback) = next(iter(waiting.items()))
            if due > now:
                if self._timer is None:
                    self._timer = loop.call_at(due, self._go_off)
                return
            del waiting[number]
            try:
                callback()
            except Exception:
                log.exception("what was to be done at a deadline failed")


class Within:
    """The block of `Alarms.within`. Used once."""

    __slots__ = ("_alarms", "_before", "_late", "_number", "_task")

    def __init__(self, alarms: Alarms) -> None:
        self._alarms = alarms
        self._late = False
        self._number = 0
        self._before = 0
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> None:
        task = self._task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline needs a task that can be cancelled")
        self._before = task.cancelling()
        self._number = self._alarms.set(self._expire)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if not self._late:
            self._alarms.cancel(self._number)
            return
        # Another may have cancelled the task too; that one must be heard.
        if task is not None and task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _expire(self) -> None:
        if self._task is not None:
            self._late = True
            self._task.cancel()
