"""The event loop of every process here: uvloop when it is installed, plain asyncio otherwise."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")

try:
    import uvloop
except ImportError:
    LOOP_NAME = "asyncio"
    _factory = None
else:
    LOOP_NAME = "uvloop"
    _factory = uvloop.new_event_loop


def run(main: Coroutine[object, object, T]) -> T:
    """Run `main` to its end; Ctrl-C cancels it first, so its `finally` blocks run."""
    with asyncio.Runner(loop_factory=_factory) as runner:
        return runner.run(main)


def run_reporting(main: Coroutine[object, object, int], failures: tuple[type[Exception], ...], late: str = "") -> int:
    """Run `main` for its exit code: 1 after one of these failures, which is printed; `late` says a bare timeout."""
    try:
        return run(main)
    except failures as error:
        print(str(error) or late, file=sys.stderr)
        return 1


def run_until_sigterm(main: Coroutine[object, object, int]) -> int:
    """Run `main` for its exit code. SIGTERM cancels it as Ctrl-C does, to end its children; the code is then 143."""

    async def guarded() -> int:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await main

    try:
        return run(guarded())
    except asyncio.CancelledError:
        return 143
