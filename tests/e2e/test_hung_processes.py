"""Processes that are stuck in C code, stopped, or hang at their start end in time, and so does all around them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.sessions import alive, session, stat

#: In every process: SIGUSR1 has it keep the interpreter's lock for ever, and one worker does so before anything else.
STUCK = """
import ctypes, signal, sys
LIBRARY, MUTEX = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
def stick(*_):
    # The second call never returns, whatever signal comes.
    LIBRARY.pthread_mutex_lock(MUTEX), LIBRARY.pthread_mutex_lock(MUTEX)
signal.signal(signal.SIGUSR1, stick)
if "workers.late" in sys.orig_argv:
    signal.signal(signal.SIGTERM, lambda *_: None)
    stick()
"""
CONFIG = """
workers:
  mock: &worker {model: {name: mock-model}, engine: {use: mocker}, replicas: 2, grace_period: 0.5, shutdown_timeout: 1}
  late: {<<: *worker, replicas: 1}
client: {drain_grace: 0.5, shutdown_timeout: 0.5}
frontend: {processes: 2}
transport: {use: tcp}
discovery: {use: file, path: "%s", ttl: 2}
"""
#: Seconds that the pages promise for this config: until frontends are killed, and then workers.
FRONTENDS = 0.5 + 0.5 + 15 + 6
WORKERS = 0.5 + 1 + 6
ORPHANS = 5.0
#: What a machine that is busy with other tests may take in addition.
SHARED = 20.0

#: The server, and the processes that it consists of.
Hung = Callable[[], tuple[Any, list[int]]]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def reapers(supervisor: int) -> list[int]:
    """Return the processes that look after the children of a supervisor."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if "reaper.py" in command_line(pid) and stat(pid)[1:2] == [str(supervisor)]]


@pytest.fixture
def hung(serve: Any, tmp_path: Path) -> Iterator[Hung]:
    """Yield a deployment with a stuck frontend and worker, a stopped one of each, and a worker that never began."""
    everything: list[int] = []

    def start() -> tuple[Any, list[int]]:
        (tmp_path / "sitecustomize.py").write_text(STUCK)
        paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        server = serve(CONFIG % (tmp_path / "discovery"), env={"PYTHONPATH": paths})
        assert server.until(lambda: len(server.instances()) == 2, 20), server.log
        assert server.until(lambda: server.log.count("ready for requests") == 2, 20), server.log
        for part in ("--only frontend", "--only workers.mock"):
            stuck, stopped = (pid for pid in session(server.process.pid) if part in command_line(pid))
            os.kill(stuck, signal.SIGUSR1)
            os.kill(stopped, signal.SIGSTOP)
            assert server.until(lambda pid=stopped: stat(pid)[0] == "T", 5)
        started = [*session(server.process.pid), *reapers(server.process.pid)]
        everything.extend(started)
        assert len(started) == 7
        return server, started

    yield start
    for pid in filter(alive, everything):
        os.kill(pid, signal.SIGKILL)


def last_ends_within(seconds: float, server: Any, started: list[int]) -> bool:
    """Return whether all of them are gone in that time, and nothing else is left of the session."""
    deadline = time.monotonic() + seconds + SHARED
    while time.monotonic() < deadline:
        if server.process.poll() is not None and not any(map(alive, started)) and not session(server.process.pid):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.full
def test_sigterm_ends_a_deployment_with_hung_processes_in_time(hung: Hung) -> None:
    server, started = hung()

    server.signal(signal.SIGTERM)

    assert last_ends_within(FRONTENDS + WORKERS, server, started), server.log
    assert server.process.returncode == 1
    assert server.log.count("did not end in time and is killed") == 5


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 70, id="ended by a third signal", marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, id="killed", marks=pytest.mark.full),
    ],
)
def test_hung_processes_do_not_outlive_their_supervisor(hung: Hung, number: int, code: int) -> None:
    server, started = hung()

    # Signals that come before the first is heard are one.
    assert server.until(lambda: server.signal(number) or server.process.poll() is not None, 5)

    assert server.process.returncode == code
    assert last_ends_within(ORPHANS, server, started), session(server.process.pid)
