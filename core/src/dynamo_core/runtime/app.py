"""`dynamo serve`: runs an application until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from dynamo_core.errors import ConfigError, DynamoError
from dynamo_core.runtime.application import Application
from dynamo_core.settings import LoadedSettings
from dynamo_core.tasks import TaskSet
from dynamo_core.telemetry import logs

log = logging.getLogger(__name__)

#: Exit codes: all went well; something failed while starting or running; it did not end within its deadline.
OK = 0
FAILED = 1
OVERDUE = 70

#: Seconds that a process may take to end beyond the time it gives to running requests.
MARGIN = 15.0


def serve(loaded: LoadedSettings) -> int:
    """Runs everything the settings describe until SIGINT or SIGTERM; a second signal ends it at once.

    Raises:
        ConfigError: nothing was started.
    """
    settings = loaded.settings
    logs.configure(settings.log.level, settings.log.json_lines)
    try:
        return run(lambda: _serve(loaded))
    except ConfigError:
        raise
    except DynamoError as error:
        log.error("not started: %s: %s", error.kind, error)
        return FAILED
    finally:
        logs.shutdown()


def run(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Runs a coroutine on uvloop if it is installed, else on asyncio's own loop."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(loaded: LoadedSettings) -> int:
    application = Application(loaded)
    with Signals(patience(loaded)) as signals:
        if not await _unless_signalled(application.start(), signals.wait(1)):
            return OK
        log.info("ready for requests at %s", application.url)
        await signals.wait(1)
        log.info("stopping; a second signal cuts running requests, a third ends the process at once")
        if not await _unless_signalled(application.stop(), signals.wait(2)):
            log.warning("running requests were cut by a second signal")
    return OK


def patience(loaded: LoadedSettings) -> float:
    """Seconds that stopping may take before the process is ended: its own deadlines, and a margin."""
    settings = loaded.settings
    workers = [worker.grace_period + worker.drain_timeout for worker in settings.workers.values()]
    return settings.client.shutdown_timeout + max(workers, default=0.0) + MARGIN


async def _unless_signalled(action: Coroutine[Any, Any, None], signal_wait: Coroutine[Any, Any, None]) -> bool:
    """Runs `action` to its end; if the signal comes first, `action` is cancelled and waited for. Whether it ended."""
    failure: DynamoError | None = None

    async def attempt() -> None:
        nonlocal failure
        try:
            await action
        except DynamoError as error:
            failure = error

    tasks = TaskSet()
    doing = tasks.spawn(attempt(), name="lifecycle")
    waiting = tasks.spawn(signal_wait, name="signal")
    try:
        await asyncio.wait([doing, waiting], return_when=asyncio.FIRST_COMPLETED)
        ended = doing.done()
        if failure is not None:
            raise failure
        if ended:
            doing.result()
        return ended
    finally:
        await tasks.aclose()


class Signals:
    """Counts SIGINT and SIGTERM while it is entered. From the first one on the process has `deadline` seconds to end.

    A third signal, or the deadline, ends the process at once with exit code 70: something in it cannot be stopped.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._count = 0
        self._changed = asyncio.Event()
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Signals:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._arrived)
        return self

    def __exit__(self, *exc: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        if self._timer is not None:
            self._timer.cancel()

    async def wait(self, count: int) -> None:
        """Returns once that many signals have arrived."""
        while self._count < count:
            self._changed.clear()
            await self._changed.wait()

    def _arrived(self) -> None:
        self._count += 1
        self._changed.set()
        if self._count == 1:
            # A thread: the loop itself may be what does not go on.
            self._timer = threading.Timer(self._deadline, _give_up, [f"not stopped within {self._deadline:g} s"])
            self._timer.daemon = True
            self._timer.start()
        elif self._count == 3:
            _give_up("ended by a third signal")


def _give_up(why: str) -> None:
    log.error("%s; the process ends now", why)
    logs.shutdown()
    os._exit(OVERDUE)
