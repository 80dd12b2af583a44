"""A real redis-server on the loopback, on a free port and without a disk, that tests stop, kill and start again.

A conftest imports the fixtures: ``from dynamo_testing.redis_server import make_server, redis_binary, server``.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dynamo_testing.ports import free_port

#: Seconds in which the server must start or end.
DEADLINE = 15.0


class RedisServer:
    """A redis-server. Without arguments it has no password and no TLS."""

    def __init__(self, binary: str, folder: Path, *arguments: str, tls: bool = False) -> None:
        self.port = free_port()
        self.tls = tls
        ports = ("--port", "0", "--tls-port", str(self.port)) if tls else ("--port", str(self.port))
        self._command = [
            binary, *ports, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder), *arguments
        ]  # fmt: skip
        self._log = folder / "redis.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}"

    def start(self, *more: str) -> None:
        """Starts it, empty, and returns when it listens."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([*self._command, *more], stdout=log, stderr=log)  # noqa: S603
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                assert self.process.poll() is None, self._log.read_text()
                assert time.monotonic() < deadline, self._log.read_text()
                time.sleep(0.01)
            else:
                return

    def stop(self) -> None:
        """It is there and does not answer, until `resume`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It answers again."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it with all that it holds."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(DEADLINE)
            self.process = None


MakeServer = Callable[..., RedisServer]


@pytest.fixture(scope="session")
def redis_binary() -> str:
    """The program; installed where that is possible."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "install", "-y", "-q", "redis-server"]
        subprocess.run(install, stdout=subprocess.DEVNULL, check=False, timeout=50)  # noqa: S603
        found = shutil.which("redis-server")
    if found is None:
        missing = "NOT TESTED: there is no redis-server (or valkey-server); install one"
        if os.environ.get("CI") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    return found


@pytest.fixture
def make_server(redis_binary: str, tmp_path: Path) -> Iterator[MakeServer]:
    """Starts servers that live as long as the test."""
    made: list[RedisServer] = []

    def make(*arguments: str, tls: bool = False) -> RedisServer:
        folder = tmp_path / f"redis{len(made)}"
        folder.mkdir()
        made.append(RedisServer(redis_binary, folder, *arguments, tls=tls))
        return made[-1]

    yield make
    for server in made:
        server.kill()


@pytest.fixture
def server(make_server: MakeServer) -> RedisServer:
    """One server, for one test."""
    return make_server()
