"""A server process that tests stop, kill and start again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from dynamo_testing.optional_packages import pytest

#: Seconds in which a server must start or end.
DEADLINE = 15.0


def server_binary(*names: str, folders: str = "", package: str = "") -> str:
    """Return the first of these programs that is installed.

    Without one the test is skipped, or fails where `CI` is set. `folders` are added to the path; `package` is what
    Debian calls the first, if not by its name.
    """
    for name in names:
        found = shutil.which(name, path=os.environ.get("PATH", "") + folders)
        if found is not None:
            return found
    install = f"apt-get install {package or names[0]}"
    missing = f"{names[0]} is not installed: NOTHING OF THIS PLUGIN IS TESTED; on Debian: {install}"
    if os.environ.get("CI"):
        raise pytest.fail.Exception(missing)
    raise pytest.skip.Exception(missing)


class ServerProcess(ABC):
    """A server that a test starts, on a port that stays the same."""

    def __init__(self, log: Path) -> None:
        """`log` gets what the server prints; a failure to start shows it."""
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> Sequence[str]:
        """Return how the server is started."""

    @abstractmethod
    def answers(self) -> bool:
        """Return whether it accepts clients. May raise OSError."""

    def launch(self, *more: str) -> None:
        """Start it with more arguments than its own, without waiting for it."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*self.command(), *more], stdout=log, stderr=log)  # noqa: S603

    def wait(self) -> None:
        """Return when it accepts clients."""
        deadline = time.monotonic() + DEADLINE
        while True:
            with suppress(OSError):
                if self.answers():
                    return
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.01)

    def start(self, *more: str) -> None:
        """Start it, and return when it accepts clients."""
        self.launch(*more)
        self.wait()

    def freeze(self) -> None:
        """Stop its process, which answers nothing until `resume`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def resume(self) -> None:
        """Let a frozen server go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it with all that it holds in memory. Safe twice."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(DEADLINE)


S = TypeVar("S", bound=ServerProcess)


@contextmanager
def starting(folder: Path, make: Callable[..., S]) -> Iterator[Callable[..., S]]:
    """Start servers that are killed at the end. `make` gets a folder of the server's own before its arguments."""
    made: list[S] = []

    def start(*arguments: Any, **how: Any) -> S:
        own = folder / f"server{len(made)}"
        own.mkdir()
        made.append(make(own, *arguments, **how))
        made[-1].start()
        return made[-1]

    yield start
    for server in made:
        server.kill()
