"""Processes that find each other in Redis: deaths, and a server that forgets."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CONFIG = """
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, speedup_ratio: 10}
    replicas: 2
    grace_period: 0.5
client: {drain_grace: 0.5}
transport: {use: tcp}
discovery: {use: redis, url: "redis://127.0.0.1:%(port)d", password: "${env:REDIS_PASSWORD}", ttl: 2, timeout: 0.8}
"""

CHAT = {"model": "mock-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}


class Redis:
    """A redis-server with a password and without a disk."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port: int = sock.getsockname()[1]
        self._command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._command += ["--requirepass", "secret", "--dir", str(folder)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(5)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[Redis]:
    if shutil.which("redis-server") is None:
        if os.environ.get("CI") == "1":
            pytest.fail("NOT TESTED: there is no redis-server")
        pytest.skip("NOT TESTED: there is no redis-server; install one")
    server = Redis(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def over_redis(serve: Any, redis_server: Redis) -> Callable[[], Any]:
    def start() -> Any:
        server = serve(CONFIG % {"port": redis_server.port}, env={"REDIS_PASSWORD": "secret"})
        assert server.until(lambda: len(server.instances()) == 2, 15), server.log
        return server

    return start


def ask(server: Any) -> int:
    status: int = server.request("POST", "/v1/chat/completions", CHAT)[0]
    return status


def test_a_worker_that_is_killed_leaves_and_is_started_again(over_redis: Any) -> None:
    server = over_redis()
    assert ask(server) == 200
    instance, pid = next(iter(server.instances().items()))

    os.kill(pid, signal.SIGKILL)

    assert [ask(server) for _ in range(5)] == [200] * 5
    assert server.until(lambda: instance not in server.instances(), 6), "it is still listed"
    assert server.until(lambda: len(server.instances()) == 2, 15), server.log


def test_requests_go_on_while_redis_is_away_and_after_it_has_forgotten_everything(
    over_redis: Any, redis_server: Redis
) -> None:
    server = over_redis()
    before = server.instances()

    redis_server.kill()
    deadline = time.monotonic() + 4
    answers = []
    while time.monotonic() < deadline:
        answers.append(ask(server))
        time.sleep(0.2)
    redis_server.start()

    assert set(answers) == {200}
    # Longer than a ttl: who had not registered again would be gone.
    assert not server.until(lambda: server.instances() != before, 4), server.log
    assert ask(server) == 200


def test_a_wrong_password_is_told_in_one_line(redis_server: Redis, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG % {"port": redis_server.port})
    ended = subprocess.run(
        [sys.executable, "-m", "dynamo_core.cli.main", "serve", str(tmp_path / "config.yaml"), "--only", "frontend"],
        env=os.environ | {"REDIS_PASSWORD": "other"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert ended.returncode == 2, ended.stderr
    assert "discovery.password: Redis at 127.0.0.1" in ended.stderr
    assert "Traceback" not in ended.stderr
