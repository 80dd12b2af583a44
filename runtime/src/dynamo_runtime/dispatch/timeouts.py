"""Timeouts of one length that share a timer of the event loop; and the stall timeout made of them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from dynamo_core.errors import DynamoError, ResponseTimeout

log = logging.getLogger(__name__)

#: A stream is checked so often in its stall timeout, and at least once in so many seconds. A worker that stalls is
#: given up within the timeout and one such pause.
CHECKS = 4
LONGEST_CHECK = 1.0


class FixedTimeouts:
    """Calls back `delay` seconds after `set`, unless `cancel` comes first.

    All delays are equal, so timeouts expire in the order in which they were set: the first one is always the next. To
    set or cancel one costs an entry in a dictionary. The loop's timer is set when the first timeout is, and again only
    when it has gone off, not for every request.
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
        """Set a timeout and return its number. A callback may set and cancel others."""
        loop = asyncio.get_running_loop()
        number = self._last = self._last + 1
        due = loop.time() + self._delay
        self._waiting[number] = (due, callback)
        if self._timer is None:
            self._timer = loop.call_at(due, self._expire_due)
        return number

    def cancel(self, number: int) -> None:
        """Cancel a timeout. Do nothing if it has expired or was cancelled before."""
        self._waiting.pop(number, None)

    def timeout(self) -> Timeout:
        """Bound what is awaited in a block ``with timeouts.timeout():``, as `asyncio.timeout` does.

        Raises:
            TimeoutError: it took longer; what was awaited has been cancelled.
        """
        return Timeout(self)

    def _expire_due(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        waiting = self._waiting
        # The loop may round a timer down: what is due within its resolution is due.
        now = loop.time() + 0.001
        while waiting:
            number, (due, callback) = next(iter(waiting.items()))
            if due > now:
                if self._timer is None:
                    self._timer = loop.call_at(due, self._expire_due)
                return
            del waiting[number]
            try:
                callback()
            except Exception:
                log.exception("what was to be done at a deadline failed")


class Timeout:
    """The block of `FixedTimeouts.timeout`. Used once."""

    __slots__ = ("_before", "_late", "_number", "_task", "_timeouts")

    def __init__(self, timeouts: FixedTimeouts) -> None:
        self._timeouts = timeouts
        self._late = False
        self._number = 0
        self._before = 0
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> None:
        task = self._task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline needs a task that can be cancelled")
        self._before = task.cancelling()
        self._number = self._timeouts.set(self._expire)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if not self._late:
            self._timeouts.cancel(self._number)
            return
        # The task may have been cancelled from outside too; that must not be lost.
        if task is not None and task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _expire(self) -> None:
        if self._task is not None:
            self._late = True
            self._task.cancel()


class Watched(Protocol):
    """A stream as a timer sees it."""

    #: The worker that serves the current attempt, and whether it was asked to send no more for now.
    instance_id: int | None
    source_paused: bool

    @property
    def arrived(self) -> int:
        """The number of items and events so far, taken by the reader or not."""

    def fail_attempt(self, error: DynamoError) -> None:
        """Record that the current attempt has failed."""


class StallTimeout:
    """The stall timeout of all streams of a pipeline: a worker that has accepted may be silent for `seconds`."""

    __slots__ = ("_seconds", "checks", "timeouts")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        pause = min(seconds / CHECKS, LONGEST_CHECK)
        #: Checks in a row that find nothing new before a worker is given up.
        self.checks = math.ceil(seconds / pause)
        self.timeouts = FixedTimeouts(pause)

    def error(self, instance_id: int | None) -> DynamoError:
        """Return why a worker is given up."""
        return ResponseTimeout(f"worker {instance_id or 0:016x} has sent nothing for {self._seconds:g} s")


class StallTimer:
    """Watches the current attempt of one stream, from its acceptance on.

    Counts checks that found nothing new, instead of comparing times: a frontend that was suspended itself blames no
    worker. Silence of a paused source is the reader's doing.
    """

    __slots__ = ("_arrived", "_number", "_quiet", "_stream", "_timeout")

    def __init__(self, timeout: StallTimeout, stream: Watched) -> None:
        self._timeout = timeout
        self._stream = stream
        self._number = 0
        self._arrived = -1
        self._quiet = 0

    def start(self) -> None:
        """Watch the attempt that was just accepted."""
        self.cancel()
        self._arrived, self._quiet = self._stream.arrived, 0
        self._number = self._timeout.timeouts.set(self._check)

    def cancel(self) -> None:
        """Watch no more, until `start`. Safe twice."""
        number, self._number = self._number, 0
        if number:
            self._timeout.timeouts.cancel(number)

    def _check(self) -> None:
        stream, timeout = self._stream, self._timeout
        self._number = 0
        arrived = stream.arrived
        if arrived != self._arrived or stream.source_paused:
            self._arrived, self._quiet = arrived, 0
        else:
            self._quiet += 1
            if self._quiet >= timeout.checks:
                stream.fail_attempt(timeout.error(stream.instance_id))
                return
        self._number = timeout.timeouts.set(self._check)
