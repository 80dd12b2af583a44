"""The line between a supervisor and its children: a pair of sockets.

The parent sends wishes and, by closing, tells of its death; the child says once that it serves, or why it cannot.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, MutableMapping
from contextlib import suppress

from dynamo_core.runtime.signals import Signals, give_up

#: Tells a child the descriptor of its end of the line.
VARIABLE = "DYN_SUPERVISOR_FD"

#: The wish to end without the patience for load balancers and late callers.
HURRY = b"h"
#: The wish to cut what still runs.
CUT = b"c"
#: What a child says once it serves.
READY = b"r"
#: What stands before the reason why a child cannot run with its config; and the most bytes of both.
REASON = b"x"
LONGEST_REASON = 4096

#: Seconds that a child whose parent has died may take to end.
ORPHAN_GRACE = 3.0


def supervised(env: MutableMapping[str, str] | None = None) -> int | None:
    """The descriptor of the line, if this process was started by a supervisor.

    Taken out of the environment: a process that an engine starts is not the supervisor's.
    """
    value = (os.environ if env is None else env).pop(VARIABLE, "")
    return int(value) if value.isdigit() else None


class ParentPipe:
    """The child's end. A thread reads it, so that a busy or stuck event loop does not keep an orphan alive."""

    def __init__(self, descriptor: int, signals: Signals) -> None:
        self._descriptor = descriptor
        self._signals = signals
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Begins to listen. The thread ends with the process."""
        threading.Thread(target=self._listen, name="parent pipe", daemon=True).start()

    def say_ready(self) -> None:
        """Tells the supervisor that this process serves: its config works."""
        with suppress(OSError):
            os.write(self._descriptor, READY)

    def say_reason(self, reason: str) -> None:
        """Tells the supervisor why this process cannot run with its config."""
        with suppress(OSError):
            os.write(self._descriptor, (REASON + reason.encode("utf-8", "replace"))[:LONGEST_REASON])

    def _listen(self) -> None:
        while True:
            try:
                data = os.read(self._descriptor, 1)
            except OSError:
                data = b""
            # The deadline here and now: the loop may be what does not go on.
            if data == CUT:
                self._signals.expect_end()
                self._tell(Signals.cut)
            elif data in (HURRY, b""):
                self._signals.expect_end(hurried=True)
                self._tell(Signals.arrived, True)
            if not data:
                timer = threading.Timer(ORPHAN_GRACE, give_up, ["the supervisor is gone"])
                timer.daemon = True
                timer.start()
                return

    def _tell(self, what: Callable[..., None], *arguments: bool) -> None:
        try:
            self._loop.call_soon_threadsafe(what, self._signals, *arguments)
        except RuntimeError:
            # The loop is closed: the process is ending already.
            return
