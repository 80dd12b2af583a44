"""Processes as the system sees them: which are left of a session, and which has a connection."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; empty if the process is gone."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def alive(pid: int) -> bool:
    fields = stat(pid)
    return bool(fields) and fields[0] != "Z"


def session(leader: int) -> list[int]:
    """Return the processes of a session that are alive."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    # One may go at any time.
    stats = {pid: stat(pid) for pid in pids}
    return [pid for pid, fields in stats.items() if fields and fields[0] != "Z" and int(fields[3]) == leader]


@contextmanager
def leading_a_session(command: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process in a session of its own, all of which is killed at the end."""
    with subprocess.Popen(command, start_new_session=True, **how) as process:
        try:
            yield process
        finally:
            for pid in session(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.wait(5)


def server_of(client: socket.socket, pids: Iterable[int]) -> int:
    """Return the one of these processes that serves a connection on the loopback."""
    ports = client.getpeername()[1], client.getsockname()[1]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = {f"socket:[{row[9]}]" for row in rows if (_port(row[1]), _port(row[2])) == ports}
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(link) in ends:
                    return pid
    raise AssertionError("no process serves it")


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
