"""Several frontend processes on one port: who answers, who is counted, and what happens when one ends or dies."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.asking import read_to_end
from tests.e2e.sessions import server_of
from tests.e2e.threads import Threads

CONFIG = """
frontend: {processes: 2}
router: {use: least-loaded}
client: {drain_grace: 0.5}
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 5}
    replicas: 2
    grace_period: 0.5
transport: {use: tcp}
discovery: {use: file, path: "%s", ttl: 2}
"""


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "mock-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, **more}


class Frontends:
    """A server whose frontend is two processes, and each of them by its own port. `folder` is its discovery's.

    Ready once each process has heard of `peers` others: those of other servers on the folder count too.
    """

    def __init__(self, server: Any, folder: Path, peers: int = 1) -> None:
        self.server = server
        self.folder = folder
        assert server.until(lambda: len(self.processes()) == 2, 20), server.log
        assert server.until(lambda: self.metric("dynamo_frontend_load_peers") == [peers] * 2, 20)

    def processes(self) -> dict[int, str]:
        """Return those that answer on the shared port now: pid and the address of their own port."""
        found = {}
        for _ in range(30):
            process = self.server_health()["process"]
            found[process["pid"]] = process["system_url"]
            if len(found) == 2:
                break
        return found

    def server_health(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.server.request("GET", "/health")[2])
        return answer

    def metric(self, name: str) -> list[float]:
        """Return a metric of each process, scraped where each says that it can be."""
        return [scrape(url, name) for url in self.processes().values()]

    def restarted(self, pid: int) -> bool:
        """Return whether another process has taken the place of one."""
        return bool(self.server.until(lambda: pid not in (now := self.processes()) and len(now) == 2, 30))


def scrape(url: str, name: str) -> float:
    """Return the sum of all samples of a metric."""
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}[ {{]", line))


@pytest.fixture(scope="module")
def frontends(serve_for_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Frontends:
    folder = tmp_path_factory.mktemp("discovery")
    return Frontends(serve_for_module(CONFIG % folder), folder)


class Load(Threads):
    """Clients that ask without pause: some with a connection for each request, some that keep theirs."""

    def __init__(self, port: int) -> None:
        self.failures: list[str] = []
        self.done = 0
        self._port = port
        super().__init__(*(partial(self._run, keep) for keep in (False, False, True, True)))

    def _run(self, keep: bool) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        turn = 0
        while not self.over.is_set():
            turn += 1
            stream = turn % 2 == 0
            try:
                connection.request(
                    "POST",
                    "/v1/chat/completions",
                    json.dumps(chat(stream=stream)),
                    {"content-type": "application/json"},
                )
                response = connection.getresponse()
                body = response.read()
                if response.status != 200 or (stream and not body.endswith(b"data: [DONE]\n\n")):
                    self.failures.append(f"{response.status} {body[-200:]!r}")
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(f"{'kept' if keep else 'new'} {error!r}")
                connection.close()
            if not keep:
                connection.close()
            self.done += 1
        connection.close()


def open_stream(server: Any, until_content: Any, tokens: int) -> socket.socket:
    """Return a stream of which some text has come."""
    stream: socket.socket = server.raw("POST", "/v1/chat/completions", chat(max_tokens=tokens, stream=True))
    until_content(stream)
    return stream


def test_each_process_answers_on_the_port_and_is_scraped_on_one_of_its_own(frontends: Frontends) -> None:
    before = frontends.metric("dynamo_frontend_requests_total")

    statuses = [frontends.server.request("POST", "/v1/chat/completions", chat())[0] for _ in range(30)]

    def counted() -> float:
        return sum(frontends.metric("dynamo_frontend_requests_total")) - sum(before)

    assert statuses == [200] * 30
    assert frontends.server.until(lambda: counted() == 30, 5), counted()
    assert all(now > 0 for now in frontends.metric("dynamo_frontend_requests_total")), "both had a part"


def test_a_killed_frontend_loses_only_its_own_connections(frontends: Frontends, until_content: Any) -> None:
    server = frontends.server
    killed, other = frontends.processes()
    streams = [open_stream(server, until_content, tokens=800) for _ in range(8)]
    served_by_other = [server_of(stream, (killed, other)) == other for stream in streams]

    os.kill(killed, signal.SIGKILL)
    assert server.until(lambda: not Path(f"/proc/{killed}").exists(), 5)
    statuses = [server.request("POST", "/v1/chat/completions", chat())[0] for _ in range(10)]
    answers = [read_to_end(stream) for stream in streams]

    assert statuses == [200] * 10
    assert [answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for answer in answers] == served_by_other
    assert frontends.restarted(killed), server.log


@pytest.mark.timeout(300)
def test_ending_one_after_the_other_fails_no_request(frontends: Frontends) -> None:
    with Load(frontends.server.port) as load:
        for pid in list(frontends.processes()):
            os.kill(pid, signal.SIGTERM)
            assert frontends.restarted(pid), frontends.server.log

    assert load.failures == []
    assert load.done > 50


def test_a_second_server_on_the_port_is_refused_even_if_it_would_share(frontends: Frontends, tmp_path: Path) -> None:
    path = tmp_path / "second.yaml"
    path.write_text(CONFIG % (tmp_path / "discovery"))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "dynamo_runtime.cli.main",
            "serve",
            str(path),
            "--http-port",
            str(frontends.server.port),
        ],
        env={key: value for key, value in os.environ.items() if not key.startswith("DYN_")},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 2
    assert f"127.0.0.1:{frontends.server.port}: the port is in use" in done.stderr
    assert "runs as pid" not in done.stderr
    assert "Traceback" not in done.stderr
