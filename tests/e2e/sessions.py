"""Processes that lead a session, and what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name; empty if the process is gone."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def alive(pid: int) -> bool:
    fields = stat(pid)
    return bool(fields) and fields[0] != "Z"


def session(leader: int) -> list[int]:
    """The processes of a session that are alive."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if alive(pid) and int(stat(pid)[3]) == leader]


@contextmanager
def leading_a_session(command: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, all of which is killed at the end."""
    with subprocess.Popen(command, start_new_session=True, **how) as process:
        try:
            yield process
        finally:
            for pid in session(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.wait(5)
