"""How a process is asked to end, and that it does."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading

from dynamo_core.telemetry import logs

log = logging.getLogger(__name__)

#: Exit code of a process that did not end within its deadline.
OVERDUE = 70


class Signals:
    """Counts requests to end while it is entered. From the first one on the process has `deadline` seconds.

    A third one, or the deadline, ends the process at once with exit code 70: something in it cannot be stopped.
    `numbers` are the signals that count; others keep their meaning.
    """

    def __init__(self, deadline: float, numbers: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)) -> None:
        self._deadline = deadline
        self._numbers = numbers
        self._count = 0
        self._changed = asyncio.Event()
        self._timer: threading.Timer | None = None
        #: Whether the first one was an operator's Ctrl-C, who does not want to wait for load balancers.
        self.hurried = False

    def __enter__(self) -> Signals:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.add_signal_handler(number, self.arrived, number is signal.SIGINT)
        return self

    def __exit__(self, *exc: object) -> None:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)
        if self._timer is not None:
            self._timer.cancel()

    async def wait(self, count: int) -> None:
        """Returns once that many have arrived."""
        while self._count < count:
            self._changed.clear()
            await self._changed.wait()

    def arrived(self, hurried: bool = False) -> None:
        """Counts one. Called in the loop's thread."""
        self._count += 1
        self._changed.set()
        if self._count == 1:
            self.hurried = hurried
            # A thread: the loop itself may be what does not go on.
            self._timer = threading.Timer(self._deadline, give_up, [f"not stopped within {self._deadline:g} s"])
            self._timer.daemon = True
            self._timer.start()
        elif self._count == 3:
            give_up("ended by a third signal")

    def cut(self) -> None:
        """As many as it takes to cut what runs, and no more. Called in the loop's thread."""
        while self._count < 2:
            self.arrived()


def give_up(why: str) -> None:
    """Ends the process now, whatever it is doing."""
    log.error("%s; the process ends now", why)
    logs.shutdown()
    os._exit(OVERDUE)


def end_with(code: int) -> int:
    """Ends logging and gives the exit code back; does not return if nobody reads the log."""
    if not logs.shutdown():
        os._exit(code)
    return code
