"""Several processes that find each other through a real etcd."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TTL = 2

CONFIG = """
transport: {use: tcp}
discovery: {use: etcd, endpoints: ["%(url)s"], ttl: %(ttl)d, poll: 0.5, timeout: 0.5}
client: {drain_grace: 0}
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, speedup_ratio: 100}
    replicas: 2
    grace_period: 0
"""


@pytest.fixture
def etcd_url(tmp_path: Path) -> Iterator[str]:
    binary = shutil.which("etcd")
    if binary is None:
        missing = "NOT TESTED: there is no etcd; install one (Debian: etcd-server), 3.4 or newer"
        if os.environ.get("CI") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    url, peer = (f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in sockets)
    for sock in sockets:
        sock.close()
    with (tmp_path / "etcd.log").open("ab") as log:
        process = subprocess.Popen(
            [binary, "--name", "one", "--data-dir", str(tmp_path / "etcd"), "--initial-cluster", f"one={peer}",
             "--listen-client-urls", url, "--advertise-client-urls", url,
             "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
             "--heartbeat-interval", "20", "--election-timeout", "200"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 15
        while not healthy(url):
            assert process.poll() is None, (tmp_path / "etcd.log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "etcd.log").read_text()
            time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait(10)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as response:
            return bool(json.load(response)["health"] == "true")
    except OSError:
        return False


def test_workers_are_found_through_etcd_and_one_that_is_killed_is_gone_within_the_ttl(
    serve: Any, etcd_url: str
) -> None:
    server = serve(CONFIG % {"url": etcd_url, "ttl": TTL})
    assert server.until(lambda: len(server.instances()) == 2, 20), server.log
    body = {"model": "mock-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    assert server.request("POST", "/v1/chat/completions", body)[0] == 200
    dies, pid = next(iter(server.instances().items()))

    os.kill(pid, signal.SIGKILL)

    # etcd looks for leases that have ended every half second, and the supervisor has started another worker meanwhile.
    assert server.until(lambda: dies not in server.instances(), TTL + 3), server.log
    assert server.until(lambda: len(server.instances()) == 2, 20), server.log
    assert server.request("POST", "/v1/chat/completions", body)[0] == 200
