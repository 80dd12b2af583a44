"""Real processes: `dynamo serve` as a user starts it, on a free port of the loopback."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner, Result
from dynamo_runtime.cli.main import cli

START_DEADLINE = 90.0
STOP_DEADLINE = 40.0
#: How much longer things may take than on a machine that does nothing else: tests run beside other tests.
SHARED = 5.0


def clean_environment(**extra: str) -> dict[str, str]:
    """Return the environment without this run's own settings and authorities, which take a while to load."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")}
    return kept | {"PYTHONUNBUFFERED": "1", "SSL_CERT_FILE": os.devnull} | extra


class Log:
    """The lines that a process writes, as they come."""

    def __init__(self, stream: IO[str] | None) -> None:
        assert stream is not None
        self.lines: list[str] = []
        self._stream = stream
        self._grown = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __str__(self) -> str:
        return "".join(self.lines)

    def until(self, pattern: str, seconds: float) -> re.Match[str] | None:
        """Return where a pattern is found; nowhere if the process ends without it, or takes longer."""
        with self._grown:
            self._grown.wait_for(lambda: re.search(pattern, str(self)) or not self._reader.is_alive(), seconds)
        return re.search(pattern, str(self))

    def whole(self) -> None:
        """Return once the process, which has ended, has no more to say."""
        self._reader.join(5)

    def close(self) -> None:
        self.whole()
        self._stream.close()

    def _read(self) -> None:
        for line in self._stream:
            with self._grown:
                self.lines.append(line)
                self._grown.notify_all()
        # Whoever waits finds out that nothing more comes when it looks again.
        threading.Thread(target=self._notify, daemon=True).start()

    def _notify(self) -> None:
        self._reader.join()
        with self._grown:
            self._grown.notify_all()


class Process:
    """A process of Python in a session of its own, and what it logs."""

    def __init__(
        self, words: Sequence[str | Path], env: Mapping[str, str], *, stdout: int = subprocess.DEVNULL
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *words], env=env, stderr=subprocess.PIPE, stdout=stdout, text=True, start_new_session=True
        )
        self._log = Log(self.process.stderr)
        self.lines = self._log.lines

    @property
    def log(self) -> str:
        return str(self._log)

    def found(self, pattern: str) -> re.Match[str]:
        """Return where the log has a pattern, once it does."""
        found = self._log.until(pattern, START_DEADLINE)
        if found is None:
            self.end()
            pytest.fail(f"{pattern!r} is not in the log:\n{self.log}")
        return found

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Return whether the condition holds within that many seconds of an idle machine.

        It asks often, as /metrics is cached for a second.
        """
        deadline = time.monotonic() + SHARED * seconds
        while time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.05)
        return False

    def wait(self) -> int:
        """Return the exit code, once it has ended by itself."""
        code = self.process.wait(STOP_DEADLINE)
        self._log.whole()
        return code

    def end(self, number: int = signal.SIGTERM) -> int:
        """End the process, however it is; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(STOP_DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(5)
        finally:
            self._log.close()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


class Server(Process):
    """A running `dynamo serve`, or another command that opens a public listener."""

    def __init__(
        self,
        config: str | None,
        folder: Path,
        *options: str,
        env: dict[str, str] | None = None,
        command: str = "serve",
        ready: str = "ready for requests",
    ) -> None:
        """Wait for the log line that begins with `ready` and names the port."""
        words: list[str] = []
        if config is not None:
            path = folder / "config.yaml"
            path.write_text(config)
            words.append(str(path))
        super().__init__(
            ["-m", "dynamo_runtime.cli.main", command, *words, "--set", "frontend.port=0", *options],
            clean_environment(**({"XDG_CACHE_HOME": str(folder / "cache")} | (env or {}))),
        )
        self.port = int(self.found(ready + r" at https?://127\.0\.0\.1:(\d+)")[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=90)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json"} | headers)
            response = connection.getresponse()
            return response.status, {key.lower(): value for key, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of a metric whose labels contain these."""
        text = self.request("GET", "/metrics")[2].decode()
        total = 0.0
        for line in text.splitlines():
            found = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)
            if found and found[1] == name and all(f'{k}="{v}"' in (found[2] or "") for k, v in labels.items()):
                total += float(found[3])
        return total

    def raw(
        self, method: str, path: str, body: Any, *, receive_buffer: int | None = None, **headers: str
    ) -> socket.socket:
        """Return a connection for one request, which has been sent; the answer is the caller's affair."""
        data = json.dumps(body).encode()
        connection = socket.socket()
        connection.settimeout(90)
        if receive_buffer is not None:
            # Before the connection is made: afterwards the window is agreed on.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", self.port))
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        connection.sendall(head.encode() + b"\r\n" + data)
        return connection

    def instances(self) -> dict[str, int]:
        """Return the workers that it sees: instance id and pid."""
        listed = json.loads(self.request("GET", "/health")[2])["instances"]
        return {entry["instance_id"]: entry["pid"] for entry in listed}


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """Return what arrives up to and with a mark; an end before it is a failure."""
    received = b""
    while mark not in received:
        data = connection.recv(65536)
        assert data, f"the answer ended before {mark!r}: {received!r}"
        received += data
    return received


Serve = Callable[..., Server]


def _servers(folder: Path) -> Iterator[Serve]:
    servers: list[Server] = []
    numbers = itertools.count()

    def start(config: str | None = None, *options: str, env: dict[str, str] | None = None, **how: str) -> Server:
        own = folder / f"server{next(numbers)}"
        own.mkdir()
        server = Server(config, own, *options, env=env, **how)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.end()


@pytest.fixture
def until_content() -> Callable[[socket.socket], bytes]:
    """Read a stream up to its first text."""
    return lambda connection: read_until(connection, b'"content"')


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start servers that live as long as the test."""
    yield from _servers(tmp_path)


@pytest.fixture(scope="module")
def serve_for_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Start servers that live as long as the module's tests."""
    yield from _servers(tmp_path_factory.mktemp("servers"))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the settings of the environment, and fail the test where it has begun to serve.

    A process that ends is watched, and killed if that takes long: this one goes on.
    """

    def refuse(watchdog: object, *, hurried: bool = False) -> None:
        pytest.fail("it had begun to serve: that takes a process of its own")

    for name in [name for name in os.environ if name.startswith("DYN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("dynamo_runtime.processes.watchdog.Watchdog.expect_end", refuse)


@pytest.fixture
def dynamo(in_this_process: None) -> Callable[..., Result]:
    """Run a command that starts nothing in this process: to start another takes the longest part of it."""

    def run(*words: object, env: dict[str, str] | None = None) -> Result:
        return CliRunner().invoke(cli, [str(word) for word in words], env=env, catch_exceptions=False)

    return run
