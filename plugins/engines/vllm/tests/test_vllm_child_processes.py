"""No process of vLLM's outlives the worker, however that ends. Processes here are real; vLLM is not needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from dynamo_plugin_engine_vllm import reaper
from dynamo_plugin_engine_vllm.child_processes import MARK, ChildProcesses

SLEEP = "import signal, time; print(signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True); time.sleep(600)"

#: A worker whose child has a child of its own, all of them deaf to polite requests.
WORKER = """
import signal, subprocess, sys, time
# A shell that runs the tests in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from dynamo_plugin_engine_vllm.child_processes import ChildProcesses
deaf = "import signal, subprocess, sys, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; "
grandchild = deaf + "time.sleep(600)"
child = deaf + "subprocess.Popen([sys.executable, '-c', %r]); time.sleep(600)" % grandchild
offspring = ChildProcesses()
offspring.build(lambda: subprocess.Popen([sys.executable, "-c", child], start_new_session=True), {})
while len(offspring.pids) < 2:
    time.sleep(0.01)
print(offspring._mark, offspring.folder, flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], bool], seconds: float = 40) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_is_killed_leaves_nothing_behind(number: signal.Signals) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert worker.stdout is not None
        mark, folder = worker.stdout.readline().split()
        assert len(reaper.marked_pids(mark)) == 2

        worker.send_signal(number)
        worker.wait(20)
        worker.stdout.close()
    finally:
        worker.kill()
        worker.wait(20)

    assert until(lambda: not reaper.marked_pids(mark))
    assert until(lambda: not Path(folder).exists())


def test_child_processes_are_marked_without_changing_our_environment() -> None:
    children = ChildProcesses()
    try:
        child = children.build(lambda: subprocess.Popen(["sleep", "600"]), {"TOLD_TO_VLLM": "yes"})
        told = Path(f"/proc/{child.pid}/environ")

        # For a moment a process that becomes another program has none.
        assert until(lambda: b"TOLD_TO_VLLM=yes\0" in told.read_bytes())
        assert children.pids == [child.pid]
        assert MARK not in os.environ
        assert "TOLD_TO_VLLM" not in os.environ

        assert children.kill() == 1
        assert child.wait(10) == -signal.SIGKILL
    finally:
        children.close()
    children.close()
    assert not children.folder.exists()


def test_ctrl_c_is_not_for_vllms_processes() -> None:
    children = ChildProcesses()
    try:
        child = children.build(
            lambda: subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.PIPE, text=True), {}
        )
        assert child.stdout is not None
        assert "SIGINT" in child.stdout.readline()
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        children.kill()
        child.wait(10)
        child.stdout.close()
    finally:
        children.close()


def test_each_engine_ends_its_own_only() -> None:
    first, second = ChildProcesses(), ChildProcesses()
    try:
        mine = first.build(lambda: subprocess.Popen(["sleep", "600"]), {})
        other = second.build(lambda: subprocess.Popen(["sleep", "600"]), {})

        assert first.kill() == 1
        mine.wait(10)
        assert other.poll() is None
        second.kill()
        other.wait(10)
    finally:
        first.close()
        second.close()


def test_the_folder_of_sockets_is_for_this_user_and_its_names_are_short_enough() -> None:
    children = ChildProcesses()
    try:
        assert children.folder.stat().st_mode & 0o077 == 0
        assert len(str(children.folder / "inproc-events_dp1000")) < 107
    finally:
        children.close()
