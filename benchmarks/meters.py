"""What the process under test used: CPU time from the kernel's own accounting, and its largest memory."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from benchmarks.http1 import BadResponse, Endpoint, fetch

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_CPU_LINE = re.compile(rb"^process_cpu_seconds_total\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds since the process started, and its largest resident memory so far in MiB; None = not known."""

    cpu_seconds: float | None
    peak_rss_mib: float | None


class Meter(Protocol):
    """Reads the usage of a target."""

    async def read(self) -> Usage:
        """Return the usage up to now."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessMeter:
    """Reads `/proc/<pid>/stat` (all threads, those that ended included) in steps of 10 ms, and VmHWM.

    With `children`, processes below it that live at the time of reading are added.
    """

    pid: int
    children: bool = False

    async def read(self) -> Usage:
        """Raise ProcessLookupError when the process is gone."""
        pids = [self.pid, *(_descendants(self.pid) if self.children else ())]
        return Usage(sum(map(cpu_seconds, pids)), sum(map(peak_rss_mib, pids)))


@dataclass(frozen=True, slots=True)
class MetricsMeter:
    """Reads `process_cpu_seconds_total` from `GET /metrics`: for a server whose pid is not known here."""

    endpoint: Endpoint

    async def read(self) -> Usage:
        """Return the readings; CPU is None when the server does not publish it."""
        try:
            reply = await fetch(self.endpoint, "/metrics", timeout=10.0)
        except (OSError, TimeoutError, BadResponse):
            return Usage(None, None)
        line = _CPU_LINE.search(reply.body) if reply.status == 200 else None
        return Usage(float(line[1]) if line else None, None)


def cpu_seconds(pid: int) -> float:
    """Return utime + stime of a process. Raise ProcessLookupError when it is gone."""
    # The name in brackets may hold spaces and brackets; the fields after its last bracket are plain.
    fields = read_proc(pid, "stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def peak_rss_mib(pid: int) -> float:
    """Return the largest resident memory a process has had. Raise ProcessLookupError when it is gone."""
    for line in read_proc(pid, "status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started and that live. Raise ProcessLookupError when it is gone."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                found += map(int, (task / "children").read_text().split())
            except OSError:
                continue
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} is gone") from None
    return found


def _descendants(pid: int) -> list[int]:
    return [known for child in children_of(pid) for known in (child, *_descendants(child))]


def read_proc(pid: int, name: str) -> str:
    """Return a file of a process under /proc. Raise ProcessLookupError when it is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"process {pid} is gone") from None
