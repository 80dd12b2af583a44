"""A script beside a supervisor: when the supervisor has died, it kills the children that do not end.

The children end by themselves if they can. One that is stopped, or whose interpreter is stuck, cannot, and one that has
just been forked does not know yet. So this process needs nothing of them: each has a mark in its environment. Standard
input is a pipe whose other end only the supervisor has. Only the standard library is imported.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

#: The variable that holds the mark.
MARK = "_DYNAMO_SUPERVISOR"
#: Seconds that children have to end: a little more than they give themselves.
GRACE = 4.0
PAUSE = 0.1


def marked_processes(mark: str) -> list[int]:
    """Return the processes of this user that have the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        # Those of others cannot be read, nor can one that has just gone.
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def main(mark: str) -> None:
    """Wait for the end of the supervisor, and then for that of its children."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A signal to all processes is for the supervisor.
        signal.signal(number, signal.SIG_IGN)
    os.read(0, 1)
    killing = time.monotonic() + GRACE
    # What the system cannot end within a few seconds, it does not end soon.
    while time.monotonic() < killing + GRACE and (pids := marked_processes(mark)):
        if time.monotonic() >= killing:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE)


if __name__ == "__main__":
    main(*sys.argv[1:])
