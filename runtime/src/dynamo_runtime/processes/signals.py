"""Signals that ask a process to end, and the guarantee that it does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from dynamo_telemetry import logs

from dynamo_runtime.processes.watchdog import OVERDUE, Watchdog, give_up, threads_left

__all__ = ["OVERDUE", "Signals", "end_with", "give_up"]


def _nothing() -> None:
    pass


class Signals:
    """Counts requests to end while it is entered. From the first one on the process has `deadline` seconds.

    A third one, or the deadline, ends the process at once with exit code 70: something in it cannot be stopped. The
    deadline holds to the end of the process, for a thread that does not end would keep it too. `numbers` are the
    signals that count; others keep their meaning. With `interrupted` the process is starting until `started` is called,
    and has that many seconds to end after Ctrl-C. With `hangups` SIGHUP calls `hung_up` and does not end the process.
    """

    def __init__(
        self,
        deadline: float,
        numbers: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM),
        *,
        interrupted: float | None = None,
        hangups: bool = False,
    ) -> None:
        self._numbers = numbers
        self._hangups = hangups
        #: What SIGHUP does, in the loop's thread.
        self.hung_up: Callable[[], None] = _nothing
        #: Says what the process is at, for the log; called in any thread. Empty when all has been stopped.
        self.doing: Callable[[], str] = str
        self._watchdog = Watchdog(deadline, interrupted=interrupted, doing=lambda: self.doing() or threads_left())
        self._changed = asyncio.Event()
        #: How many have arrived.
        self.count = 0
        #: Whether the first one was an operator's Ctrl-C, who does not want to wait for load balancers.
        self.hurried = False

    def __enter__(self) -> Signals:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.add_signal_handler(number, self.arrived, number is signal.SIGINT)
        if self._hangups:
            loop.add_signal_handler(signal.SIGHUP, lambda: self.hung_up())
        self._watchdog.start()
        self._watchdog.listen_to(self._numbers)
        return self

    def __exit__(self, *exc: object) -> None:
        self._watchdog.close()
        loop = asyncio.get_running_loop()
        for number in (*self._numbers, *([signal.SIGHUP] if self._hangups else [])):
            loop.remove_signal_handler(number)

    async def wait(self, count: int) -> None:
        """Return once that many have arrived."""
        while self.count < count:
            self._changed.clear()
            await self._changed.wait()

    def arrived(self, hurried: bool = False) -> None:
        """Count one. Called in the loop's thread."""
        self.count += 1
        self._changed.set()
        if self.count == 1:
            self.hurried = hurried
        elif self.count == 3:
            give_up("ended by a third signal")
        self.expect_end(hurried=hurried)

    def cut(self) -> None:
        """Send as many signals as it takes to cut what runs, and no more. Called in the loop's thread."""
        while self.count < 2:
            self.arrived()

    def expect_end(self, *, hurried: bool = False) -> None:
        """Start the deadline without a signal, once: the process ends for a reason of its own. From any thread.

        While the process starts, an end that is `hurried` brings the deadline forward.
        """
        self._watchdog.expect_end(hurried=hurried)

    def started(self) -> None:
        """Give a hurried end the whole deadline from now on: there may be requests to finish."""
        self._watchdog.started()

    def watch_loop(self, stall: float) -> None:
        """End the process, also with exit code 70, when the loop stands still for `stall` seconds."""
        self._watchdog.watch_loop(stall)


def end_with(code: int) -> int:
    """End logging and give the exit code back; do not return if no process reads the log."""
    if not logs.shutdown_logging():
        os._exit(code)
    return code
