"""An event loop in which time passes only when no task can run, and then at once.

Whatever goes by the loop's clock (timers, sleeps, deadlines, the mocker's steps) sees exact times and never waits, and
what happens depends on nothing but the program: two runs are the same to the last digit.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _Leaping(selectors.DefaultSelector):
    """Leaps to the next timer instead of waiting for it. Time stands still while `threads` are at work."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready now; if that is nothing, it is later afterwards."""
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if self.threads:
            # What they do takes no time here, and its end wakes the loop.
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time begins at 0."""

    def __init__(self) -> None:
        self._leaping = _Leaping()
        super().__init__(self._leaping)

    def time(self) -> float:
        """Return seconds since the loop was made, as far as anybody has waited for them."""
        return self._leaping.now

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run it as ever, while no time passes until it is done."""
        future = super().run_in_executor(executor, func, *args)
        self._leaping.threads += 1
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._leaping.threads -= 1


def run_at_once(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
