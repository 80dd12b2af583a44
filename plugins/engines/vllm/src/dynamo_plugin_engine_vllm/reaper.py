"""A script beside a worker: when the worker is gone, however it ended, it ends the processes that were left.

Arguments: the mark in the environment of those processes, and a folder to remove. Standard input is a pipe whose other
end only the worker has; its end is the worker's end. It imports nothing but the standard library.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

#: Rounds of looking, so that what a dying process has just started is found too.
ROUNDS = 50
PAUSE = 0.1


def marked_pids(mark: str) -> list[int]:
    """Return the processes of this user whose environment holds the mark, this one left out."""
    wanted = mark.encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if wanted in environment and state not in "ZX":
            found.append(int(folder.name))
    return found


def kill_marked(mark: str, rounds: int = ROUNDS, spare: int | None = None) -> int:
    """Kill them, again until none is left; how many there were. `spare` is a process that is left alone."""
    killed: set[int] = set()
    for _ in range(rounds):
        there = [pid for pid in marked_pids(mark) if pid != spare]
        if not there:
            break
        for pid in there:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.add(pid)
        time.sleep(PAUSE)
    return len(killed)


def main(mark: str, folder: str) -> None:
    """Wait for the end of the worker, then clean up after it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A signal to the whole process group ends the worker, and that is what this process waits for.
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 64):
        pass
    kill_marked(mark)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
