"""A frontend and two workers, each a process of its own, over a real NATS server that may die, too."""

from __future__ import annotations

import http.client
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

PATH = "/v1/chat/completions"

CONFIG = """
transport:
  use: nats
  servers: ["nats://127.0.0.1:%(port)d"]
  user: tests
  password: ${env:TEST_NATS_PASSWORD}
  unavailable_wait: %(patience)s
discovery: {use: file, path: "%(folder)s", ttl: 2}
workers:
  mock:
    model: {name: mock-model, migration_limit: 3}
    engine: {use: mocker, fixed_itl_ms: %(itl)s}
    replicas: 2
    grace_period: 0.5
client: {drain_grace: 0}
"""

PASSWORD = "only-for-these-tests"


class Nats:
    """A server that keeps nothing, and can be started again on its port."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._binary = binary
        self._ports = [_free_port(), _free_port()]
        self._config = folder / "nats.conf"
        self._config.write_text(
            f'host: "127.0.0.1"\nport: {self._ports[0]}\nhttp: "127.0.0.1:{self._ports[1]}"\n'
            f'authorization {{ user: tests, password: "{PASSWORD}" }}\n'
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self._ports[0]

    def start(self) -> None:
        self._process = subprocess.Popen([self._binary, "-c", str(self._config)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                    if connection.recv(4) == b"INFO":
                        return
            except OSError:
                time.sleep(0.02)
        pytest.fail("nats-server did not start")

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10)

    def received(self) -> int:
        """How many messages were sent to it."""
        connection = http.client.HTTPConnection("127.0.0.1", self._ports[1], timeout=10)
        try:
            connection.request("GET", "/varz")
            return int(json.loads(connection.getresponse().read())["in_msgs"])
        finally:
            connection.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[Nats]:
    """A server of this test's own."""
    binary = shutil.which("nats-server", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/bin")
    if binary is None:
        missing = "nats-server is not installed; on Debian: apt-get install nats-server"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    server = Nats(binary, tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def house(serve: Any, nats: Nats, tmp_path: Path) -> Callable[..., Any]:
    """Starts a frontend and two workers, and returns when both are seen."""

    def start(*, itl: float = 10, patience: float = 4.5) -> Any:
        config = CONFIG % {"port": nats.port, "folder": tmp_path / "discovery", "itl": itl, "patience": patience}
        server = serve(config, env={"TEST_NATS_PASSWORD": PASSWORD})
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


def test_many_tokens_pass_in_few_messages(house: Any, nats: Nats) -> None:
    server = house(itl=2)
    ask(server)
    before = nats.received()

    streams = [Stream(server, max_tokens=100) for _ in range(40)]
    for stream in streams:
        stream.text()

    assert nats.received() - before < 40 * 100


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


def test_streams_go_on_when_the_server_is_back(house: Any, nats: Nats) -> None:
    server = house()
    expected = ask(server, max_tokens=200)
    streams = [Stream(server, max_tokens=200) for _ in range(4)]
    for stream in streams:
        stream.begun()

    nats.kill()
    time.sleep(1)
    nats.start()

    assert [stream.text() for stream in streams] == [expected] * 4
    assert ask(server, max_tokens=200) == expected


def test_a_request_waits_for_the_server_and_is_refused_if_it_stays_away(house: Any, nats: Nats) -> None:
    server = house(itl=1, patience=1.0)
    expected = ask(server)

    nats.kill()
    refused = server.request("POST", PATH, chat())
    nats.start()

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


def test_a_wrong_password_ends_the_start_with_one_line(serve: Any, nats: Nats, tmp_path: Path) -> None:
    config = CONFIG % {"port": nats.port, "folder": tmp_path / "discovery", "itl": 1, "patience": 1}

    with pytest.raises(pytest.fail.Exception, match=r"does not let us in .*check `user`") as caught:
        serve(config, env={"TEST_NATS_PASSWORD": "another"}, command="frontend")

    assert "Traceback" not in str(caught.value)
