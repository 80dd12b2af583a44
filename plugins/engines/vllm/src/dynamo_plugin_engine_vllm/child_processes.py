"""The processes that vLLM starts: none of them outlives the worker, and Ctrl-C is not for them.

vLLM's processes stay behind when the one that started them is killed, and keep the GPU. So they carry a mark in their
environment, and a small process in its own session waits for the end of the worker and kills all that carry it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TypeVar

from dynamo_plugin_engine_vllm import reaper

T = TypeVar("T")

#: The variable that holds the mark.
MARK = "_DYNAMO_VLLM_MARK"
#: Longest folder name with room for the names of sockets in it: the system allows 107 bytes for the whole.
_LONGEST = 60

#: One engine is built at a time: it reads the environment, which all threads share.
_building = threading.Lock()


class ChildProcesses:
    """The processes of one engine, and a folder for their sockets. Both end with this process at the latest."""

    def __init__(self) -> None:
        self._mark = f"{MARK}={os.getpid()}-{secrets.token_hex(8)}"
        base = tempfile.gettempdir()
        #: Only this user can look into it.
        self.folder = Path(tempfile.mkdtemp(prefix="dynamo-vllm-", dir=base if len(base) < _LONGEST else "/tmp"))  # noqa: S108
        command = [sys.executable, "-I", "-S", reaper.__file__, self._mark, str(self.folder)]
        self._reaper = subprocess.Popen(  # noqa: S603 - this interpreter and a file of this package
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return reaper.marked_pids(self._mark)

    def build(self, make: Callable[[], T], environment: Mapping[str, str]) -> T:
        """Call `make` so that the processes that it starts are marked, and see `environment`. Blocks."""
        # Started below, it would unblock the signal again.
        resource_tracker.ensure_running()
        name, _, value = self._mark.partition("=")
        with _building, _without_interrupts(), _environment({**environment, name: value}):
            return make()

    def kill(self) -> int:
        """Kill the processes that are left; return their number. Blocks for moments."""
        return reaper.kill_marked(self._mark, spare=self._reaper.pid)

    def close(self) -> None:
        """End the watch. Safe twice; the processes should have ended. Blocks for moments."""
        assert self._reaper.stdin is not None  # noqa: S101 - it was made with a pipe
        with suppress(OSError):
            self._reaper.stdin.close()
        try:
            self._reaper.wait(10)
        except subprocess.TimeoutExpired:
            self._reaper.kill()
            self._reaper.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let processes that this thread starts inherit a blocked SIGINT: Ctrl-C goes to the whole terminal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
