"""A broker or a store that is not there when a process starts: what it says meanwhile, and that it uses what comes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.servers.ports import free_port

from tests.e2e.asking import PATH, chat
from tests.e2e.brokers import Broker, Etcd, Nats, Redis
from tests.e2e.conftest import clean_environment

CONFIG = """
%(planes)s
workers:
  mock: {model: {name: mock-model}, engine: {use: mocker}, system_port: %(port)s, grace_period: 0}
client: {drain_grace: 0}
"""

FULL = pytest.mark.full

#: What needs which server: the sections of the config, with `%s` in place of its address and of a folder.
PLANES = {
    "nats": 'transport: {use: nats, servers: ["%(url)s"]}\ndiscovery: {use: file, path: "%(folder)s"}',
    "redis": 'transport: {use: redis, url: "%(url)s"}\ndiscovery: {use: file, path: "%(folder)s"}',
    "discovery in redis": 'transport: {use: tcp}\ndiscovery: {use: redis, url: "%(url)s"}',
    "discovery in etcd": 'transport: {use: tcp}\ndiscovery: {use: etcd, endpoints: ["%(url)s"]}',
    "all in one process": 'transport: {use: inproc}\ndiscovery: {use: redis, url: "%(url)s"}',
}


def config(planes: str, folder: Path, url: str, port: int = 0) -> str:
    return CONFIG % {"planes": PLANES[planes] % {"url": url, "folder": folder / "records"}, "port": port}


def broker(planes: str, folder: Path) -> Broker:
    return Nats(folder) if planes == "nats" else Etcd(folder) if "etcd" in planes else Redis(folder)


def ready(server: Any) -> tuple[int, str]:
    """Return the status of /ready, and its reason."""
    status, _, body = server.request("GET", "/ready")
    return status, json.loads(body)["message"]


@pytest.mark.parametrize(
    "planes", [pytest.param(name, marks=() if name in ("nats", "discovery in redis") else FULL) for name in PLANES]
)
def test_a_starting_process_logs_its_missing_server_and_uses_it_later(serve: Any, tmp_path: Path, planes: str) -> None:
    missing = broker(planes, tmp_path)
    options = [] if "one process" in planes else ["--only", "frontend", "--set", "client.min_initial_workers=0"]
    server = serve(config(planes, tmp_path, missing.url), *options, ready="listening")

    waits = server.until(lambda: f"127.0.0.1:{missing.port}" in ready(server)[1], 5)
    before = ready(server)
    live = server.request("GET", "/live")[0]
    status, headers, body = server.request("POST", PATH, chat())
    with missing:
        used = server.until(lambda: ready(server)[0] == 200, 20)

        assert waits, before
        assert before[0] == 503
        assert live == 200
        assert status == 503
        assert "retry-after" in headers
        assert b"127.0.0.1" not in body
        assert used, server.log
        reasons = re.findall(r"waiting up to \d+ s for (.*)", server.log)
        assert len(reasons) == len(set(reasons)) > 0
        server.end()


def test_a_waiting_worker_reports_it_on_its_system_port(serve: Any, tmp_path: Path) -> None:
    missing, port = Nats(tmp_path), free_port()
    text = config("nats", tmp_path, missing.url, port)
    worker = serve(text, "--only", "workers.mock", ready="health and metrics of this process are")

    waits = worker.until(lambda: f"127.0.0.1:{missing.port}" in ready(worker)[1], 5)
    before = ready(worker)
    health = worker.request("GET", "/health")
    live = worker.request("GET", "/live")[0]
    with missing:
        used = worker.until(lambda: ready(worker)[0] == 200, 20)

        assert waits, before
        assert before[0] == 503
        assert health[0] == 503
        assert before[1] == json.loads(health[2])["message"]
        assert live == 200
        assert used, worker.log
        assert worker.request("GET", "/health")[0] == 200
        worker.end()


def test_ctrl_c_ends_the_waiting_at_once(serve: Any, tmp_path: Path) -> None:
    missing = Nats(tmp_path)
    server = serve(config("nats", tmp_path, missing.url), "--only", "frontend", ready="listening")
    assert server.until(lambda: f"127.0.0.1:{missing.port}" in ready(server)[1], 5)

    server.signal(signal.SIGINT)

    assert server.wait() == 0


def test_a_server_that_never_comes_ends_the_process_with_its_reason(tmp_path: Path) -> None:
    url = f"nats://127.0.0.1:{free_port()}"

    done = run(tmp_path, config("nats", tmp_path, url), "--set", "transport.start_timeout=1")

    assert done.returncode == 1, done.stderr
    assert f"no NATS server was reached within 1.0 s: {url.removeprefix('nats://')}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """Yield services of other kinds, by their names, and their ports."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None: ...

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    with Nats(tmp_path_factory.mktemp("nats")) as nats, Redis(tmp_path_factory.mktemp("redis")) as redis:
        yield {"NATS": nats.port, "Redis": redis.port, "HTTP": web.server_port}
    web.shutdown()
    thread.join(5)
    web.server_close()


@pytest.mark.parametrize(
    ("planes", "scheme", "stranger", "told"),
    [
        ("nats", "nats", "Redis", "transport.servers: this is no NATS server"),
        ("discovery in redis", "redis", "HTTP", "discovery.url: this is no Redis server"),
        pytest.param("redis", "redis", "NATS", "transport.url: this is no Redis server", marks=FULL),
        pytest.param("discovery in etcd", "http", "HTTP", "discovery.endpoints: this is no etcd", marks=FULL),
    ],
)
def test_another_service_on_the_port_is_an_error_of_the_configuration(
    tmp_path: Path, strangers: dict[str, int], planes: str, scheme: str, stranger: str, told: str
) -> None:
    url = f"{scheme}://127.0.0.1:{strangers[stranger]}"

    done = run(tmp_path, config(planes, tmp_path, url))

    assert done.returncode == 2, done.stderr
    complaint = next(line for line in done.stderr.splitlines() if line.startswith("dynamo: "))
    assert told in complaint
    assert f"127.0.0.1:{strangers[stranger]}" in complaint
    assert "Traceback" not in done.stderr


def run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Return a frontend that ends by itself."""
    path = folder / "config.yaml"
    path.write_text(text)
    command = [sys.executable, "-m", "dynamo_runtime.cli.main", "frontend", str(path), "--http-port", "0", *options]
    return subprocess.run(
        command, env=clean_environment(TMPDIR=os.fspath(folder)), capture_output=True, text=True, timeout=120
    )
