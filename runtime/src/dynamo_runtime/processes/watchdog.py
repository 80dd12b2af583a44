"""A watchdog for processes that cannot end themselves: a thread that watches clock, signals and event loop."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress

from dynamo_telemetry import logs

log = logging.getLogger(__name__)

#: Exit code of a process that did not end within its deadline, or whose event loop stood still.
OVERDUE = 70

#: Looks at the loop per `stall`, and the most seconds between two.
LOOKS = 8
LONGEST_LOOK = 5.0
#: If code that never gives up the interpreter's lock has stopped this thread too, a bare one ends the process: when the
#: loop has stood still so many times `stall`, or so many seconds after the deadline.
BARE_STALLS = 2
BARE_SECONDS = 5.0
#: The same after the deadline of a start that was interrupted.
BARE_INTERRUPTED = 0.8


def give_up(why: str) -> None:
    """End the process now, whatever it is doing."""
    log.error("%s; the process ends now", why)
    logs.shutdown_logging()
    os._exit(OVERDUE)


def stacks() -> str:
    """Return what every thread is doing, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        parts.append(f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


def threads_left() -> str:
    """Return the threads that keep the interpreter from exiting, in a few words for the log; empty without any."""
    current, main = threading.current_thread(), threading.main_thread()
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread not in (current, main)]
    return f"threads that have not ended: {', '.join(sorted(left))}" if left else ""


class Watchdog:
    """Watches until it is closed. From `expect_end` on the process has `deadline` seconds, whatever its loop does.

    With `interrupted` the process is starting until `started` is called: until then an end that is hurried has that
    many seconds instead. `doing` says what the process is at, for the log; it is called in any thread. `end` is what
    ends the process; a test may put something milder there, and then there is no bare thread either.
    """

    def __init__(
        self,
        deadline: float,
        *,
        interrupted: float | None = None,
        doing: Callable[[], str] = str,
        end: Callable[[str], None] = give_up,
    ) -> None:
        self._deadline = deadline
        self._interrupted = interrupted
        self._doing = doing
        self._end = end
        self._bare = end is give_up
        self._loop = asyncio.get_running_loop()
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._numbers: frozenset[int] = frozenset()
        #: What the loop is woken by at a signal: ours, and what was there before.
        self._wakes = -1
        self._before: int | None = None
        self._lock = threading.Lock()
        self._expected_at = 0.0
        self._ends_at: float | None = None
        self._stall = 0.0
        self._looks_at: float | None = None
        self._missed = 0
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching, unless the end is expected: what comes after the loop may get stuck too. Safe twice."""
        self.forget_signals()
        with self._lock:
            if self._ends_at is None or not self._thread.is_alive():
                self._stall, self._looks_at = 0.0, None
                self._theirs.close()
        if self._ends_at is None and self._bare:
            faulthandler.cancel_dump_traceback_later()

    def listen_to(self, numbers: Iterable[int]) -> None:
        """Take any of these signals for the beginning of the end, also while the loop does not go on.

        SIGINT for one that is hurried.

        Called in the main thread when the loop has its handlers: the loop gets to know of each signal through here.
        """
        self._numbers = frozenset(numbers)
        self._wakes = self._theirs.fileno()
        self._before = signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)

    def forget_signals(self) -> None:
        """Take `listen_to` back. Safe twice."""
        if self._before is None:
            return
        before, self._before = self._before, None
        current = signal.set_wakeup_fd(before)
        if current != self._wakes:
            # Other code has put its own there since.
            signal.set_wakeup_fd(current)

    def expect_end(self, *, hurried: bool = False) -> None:
        """Start the deadline, once; the loop may take its time from now on. Called in any thread.

        While the process starts, an end that is `hurried` has the deadline of an interrupted start, also if another one
        runs already.
        """
        with self._lock:
            interrupted = self._interrupted if hurried else None
            seconds = self._deadline if interrupted is None else interrupted
            now = time.monotonic()
            if self._ends_at is not None and self._ends_at <= now + seconds:
                return
            if self._ends_at is None:
                self._expected_at = now
            self._end_at(now + seconds, BARE_SECONDS if interrupted is None else BARE_INTERRUPTED)
        if interrupted is not None:
            log.info("interrupted while starting: %s; what has not ended in %g s is given up", self._doing(), seconds)
        self._wake()

    def started(self) -> None:
        """Record that the start is over: an expected end has the whole deadline. Called in any thread."""
        with self._lock:
            self._interrupted = None
            if self._ends_at is not None:
                self._end_at(self._expected_at + self._deadline, BARE_SECONDS)
        self._wake()

    def _end_at(self, at: float, bare: float) -> None:
        self._ends_at = at
        self._stall, self._looks_at = 0.0, None
        self._guard(max(0.0, at - time.monotonic()) + bare)

    def watch_loop(self, stall: float) -> None:
        """End the process when the loop stands still for `stall` seconds; not once its end is expected."""
        with self._lock:
            if self._ends_at is None:
                self._stall = stall
                self._looks_at = time.monotonic()
                self._missed = 0
                self._answered.set()
        self._wake()

    # In the thread.

    def _wake(self) -> None:
        with suppress(OSError):
            self._theirs.send(b"\0")

    def _run(self) -> None:
        with self._ours:
            self._watch()
        # Unless `end` ended the process.
        with self._lock:
            self._theirs.close()

    def _watch(self) -> None:
        while True:
            self._ours.settimeout(self._timeout())
            try:
                data = self._ours.recv(4096)
            except TimeoutError:
                data = b"\0"
            if not data:
                return
            arrived = bytes(number for number in data if number)
            if arrived:
                self._pass_on(arrived)
                if not self._numbers.isdisjoint(arrived):
                    self.expect_end(hurried=signal.SIGINT in arrived)
            why = self._overdue()
            if why:
                self._end(why)
                return

    def _timeout(self) -> float | None:
        with self._lock:
            times = [at for at in (self._ends_at, self._looks_at) if at is not None]
        # Never 0, which would mean not to wait for anything.
        return max(0.001, min(times) - time.monotonic()) if times else None

    def _pass_on(self, numbers: bytes) -> None:
        before = self._before
        if before is not None and before >= 0:
            with suppress(OSError):
                os.write(before, numbers)

    def _overdue(self) -> str:
        """Return why the process must end now; empty if it need not."""
        now = time.monotonic()
        with self._lock:
            ends_at, looks_at, stall = self._ends_at, self._looks_at, self._stall
        if ends_at is not None and now >= ends_at:
            doing = self._doing()
            return f"not stopped within {ends_at - self._expected_at:.6g} s" + (f": {doing}" if doing else "")
        if looks_at is None or now < looks_at:
            return ""
        pause = min(stall / LOOKS, LONGEST_LOOK)
        if self._answered.is_set():
            self._missed = 0
            self._answered.clear()
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._answered.set)
        else:
            # Counted, not timed: a process that was suspended is not stuck.
            self._missed += 1
            if self._missed * pause >= stall:
                log.error("the event loop stands still; every thread:\n%s", stacks())
                return f"the event loop stood still for {stall:g} s"
        with self._lock:
            if self._looks_at is not None:
                self._looks_at = now + pause
                self._guard(stall * BARE_STALLS + pause)
        return ""

    def _guard(self, seconds: float) -> None:
        """Restart the bare thread, which needs no lock of the interpreter: it shows the stacks and exits with 1."""
        if self._bare:
            # Without a stderr of its own there is nothing to write to.
            with suppress(AttributeError, OSError, RuntimeError, ValueError):
                faulthandler.dump_traceback_later(seconds, exit=True)
