"""A frontend and two workers that find and call each other over one real Redis server, which may die, too."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client

PATH = "/v1/chat/completions"

CONFIG = """
transport:
  use: redis
  url: "redis://127.0.0.1:%(port)d"
  username: tests
  password: ${env:TEST_REDIS_PASSWORD}
  prefix: test
  unavailable_wait: %(patience)s
discovery:
  use: redis
  url: "redis://127.0.0.1:%(port)d"
  username: tests
  password: ${env:TEST_REDIS_PASSWORD}
  prefix: test
  ttl: 2
  timeout: 0.8
workers:
  mock:
    model: {name: mock-model, migration_limit: 3}
    engine: {use: mocker, fixed_itl_ms: %(itl)s}
    replicas: 2
    grace_period: 0.5
client: {drain_grace: 0}
"""

PASSWORD = "only-for-these-tests"


class Redis:
    """A server that keeps nothing, and can be started again on its port, empty."""

    def __init__(self, binary: str, folder: Path) -> None:
        self.port = _free_port()
        self._command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self._command += ["--user", "tests", "on", f">{PASSWORD}", "~test:*", "&test:*", "+@all"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.02)
            else:
                return
        pytest.fail("redis-server did not start")

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10)

    def received(self) -> int:
        """How many messages were published."""
        with redis_client.Redis(port=self.port) as client:
            return int(client.info("commandstats")["cmdstat_publish"]["calls"])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    """A server of this test's own."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        missing = "redis-server is not installed; on Debian: apt-get install redis-server"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    server = Redis(binary, tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def house(serve: Any, redis: Redis) -> Callable[..., Any]:
    """Starts a frontend and two workers, and returns when both are seen."""

    def start(*, itl: float = 10, patience: float = 4.5) -> Any:
        config = CONFIG % {"port": redis.port, "itl": itl, "patience": patience}
        server = serve(config, env={"TEST_REDIS_PASSWORD": PASSWORD})
        assert server.until(lambda: len(server.instances()) == 2, 20), server.log
        return server

    return start


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "mock-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "seed": 3, **more}


def ask(server: Any, **more: Any) -> str:
    status, _, body = server.request("POST", PATH, chat(**more))
    assert status == 200, body
    content: str = json.loads(body)["choices"][0]["message"]["content"]
    return content


class Stream:
    """One answer in events, read as it comes."""

    def __init__(self, server: Any, **more: Any) -> None:
        self.connection = server.raw("POST", PATH, chat(stream=True, **more))
        self.received = b""

    def begun(self) -> None:
        while self.received.count(b'"content"') < 3:
            assert self._more(), self.received

    def text(self) -> str:
        """All of it, once it has ended well."""
        while self._more():
            pass
        self.connection.close()
        assert b"data: [DONE]" in self.received, self.received[-500:]
        lines = [line[6:] for line in self.received.decode().split("\n") if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    def _more(self) -> bool:
        data = self.connection.recv(65536)
        self.received += data
        return bool(data)


def test_requests_and_streams_are_answered(house: Any) -> None:
    server = house(itl=1)

    text = ask(server)

    assert text
    assert Stream(server).text() == text
    assert PASSWORD not in server.log


def test_many_tokens_pass_in_few_messages(house: Any, redis: Redis) -> None:
    server = house(itl=2)
    ask(server)
    before = redis.received()

    streams = [Stream(server, max_tokens=100) for _ in range(40)]
    for stream in streams:
        stream.text()

    assert redis.received() - before < 40 * 100


def test_a_worker_that_is_killed_interrupts_nobody(house: Any) -> None:
    server = house()
    expected = ask(server)
    streams = [Stream(server) for _ in range(4)]
    for stream in streams:
        stream.begun()

    os.kill(next(iter(server.instances().values())), signal.SIGKILL)

    assert [stream.text() for stream in streams] == [expected] * 4
    assert ask(server) == expected


def test_a_worker_that_is_told_to_end_finishes_its_streams(house: Any) -> None:
    server = house()
    expected = ask(server)
    streams = [Stream(server) for _ in range(4)]
    for stream in streams:
        stream.begun()
    instance, pid = next(iter(server.instances().items()))

    os.kill(pid, signal.SIGTERM)

    assert server.until(lambda: instance not in server.instances(), 10)
    assert [stream.text() for stream in streams] == [expected] * 4


def test_streams_go_on_when_the_server_is_back(house: Any, redis: Redis) -> None:
    server = house()
    expected = ask(server, max_tokens=200)
    streams = [Stream(server, max_tokens=200) for _ in range(4)]
    for stream in streams:
        stream.begun()

    redis.kill()
    time.sleep(1)
    redis.start()

    assert [stream.text() for stream in streams] == [expected] * 4
    assert ask(server, max_tokens=200) == expected


def test_a_request_waits_for_the_server_and_is_refused_if_it_stays_away(house: Any, redis: Redis) -> None:
    server = house(itl=1, patience=1.0)
    expected = ask(server)

    redis.kill()
    refused = server.request("POST", PATH, chat())
    redis.start()

    assert refused[0] == 503
    assert b"message broker" in refused[2]
    assert b"127.0.0.1" not in refused[2]
    assert server.until(lambda: server.request("POST", PATH, chat())[0] == 200, 10)
    assert ask(server) == expected


def test_everything_ends_in_order(house: Any) -> None:
    server = house(itl=1)
    ask(server)

    server.signal(signal.SIGTERM)

    assert server.wait() == 0
    assert "Traceback" not in server.log
    assert "killed" not in server.log


def test_a_wrong_password_ends_the_start_with_one_line(serve: Any, redis: Redis) -> None:
    config = CONFIG % {"port": redis.port, "itl": 1, "patience": 1}

    with pytest.raises(pytest.fail.Exception, match=r"transport\.password: Redis at .* refuses the login") as caught:
        serve(config, env={"TEST_REDIS_PASSWORD": "another"}, command="frontend")

    assert "Traceback" not in str(caught.value)
