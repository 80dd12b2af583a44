"""A real redis-server on the loopback, on a free port and without a disk, that tests stop, kill and start again.

A conftest imports the fixtures: ``from dynamo_testing.servers.redis_server import make_server, redis_binary, server``.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from dynamo_testing.servers.ports import free_port
from dynamo_testing.servers.server_process import ServerProcess, server_binary, starting


class RedisServer(ServerProcess):
    """A redis-server. Without arguments it has no password and no TLS."""

    def __init__(self, binary: str, folder: Path, *arguments: str, tls: bool = False) -> None:
        super().__init__(folder / "redis.log")
        self.port = free_port()
        self.tls = tls
        ports = ("--port", "0", "--tls-port", str(self.port)) if tls else ("--port", str(self.port))
        self._command = [
            binary, *ports, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder), *arguments
        ]  # fmt: skip

    @property
    def url(self) -> str:
        """Its address."""
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        return self._command

    def answers(self) -> bool:
        socket.create_connection(("127.0.0.1", self.port), 1).close()
        return True


MakeServer = Callable[..., RedisServer]


@pytest.fixture(scope="session")
def redis_binary() -> str:
    """Return the program, installed where that is possible."""
    names = ("redis-server", "valkey-server")
    if not any(map(shutil.which, names)) and os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "install", "-y", "-q", "redis-server"]
        subprocess.run(install, stdout=subprocess.DEVNULL, check=False, timeout=50)  # noqa: S603
    return server_binary(*names)


@pytest.fixture
def make_server(redis_binary: str, tmp_path: Path) -> Iterator[MakeServer]:
    """Start servers that live as long as the test."""
    with starting(tmp_path, partial(RedisServer, redis_binary)) as make:
        yield make


@pytest.fixture
def server(make_server: MakeServer) -> RedisServer:
    """Return one server, for one test."""
    return make_server()
