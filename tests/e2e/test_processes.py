"""One process per part, without servers: deaths, restarts, orphans, slow readers."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.servers.ports import free_port

from tests.e2e.asking import Stream
from tests.e2e.sessions import alive, leading_a_session, session

CONFIG = """
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: %(itl)s}
    replicas: %(replicas)s
    grace_period: 0.5
client: {drain_grace: 0.5, write_stall: %(stall)s}
frontend: {write_buffer: 65536}
profiles:
  processes:
    transport: {use: tcp}
    discovery: {use: file, path: "%(folder)s", ttl: 2}
"""


def config(folder: Path, *, itl: float = 5, stall: float = 30, replicas: int = 1) -> str:
    return CONFIG % {"folder": folder / "discovery", "itl": itl, "stall": stall, "replicas": replicas}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "mock-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, **more}


@pytest.fixture
def processes(serve: Any, tmp_path: Path) -> Callable[..., Any]:
    """Start a supervisor, a worker and a frontend, and return when the worker is seen."""

    def start(**settings: Any) -> Any:
        server = serve(config(tmp_path, **settings), "--profile", "processes")
        assert server.until(lambda: len(server.instances()) == 1, 15), server.log
        return server

    return start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the discovery of `deployment` is."""
    return tmp_path_factory.mktemp("deployment")


@pytest.fixture(scope="module")
def running(serve_for_module: Any, folder: Path) -> Any:
    return serve_for_module(config(folder, itl=10, replicas=2), "--profile", "processes")


@pytest.fixture
def deployment(running: Any) -> Any:
    """Return a frontend with two workers, all of which are alive, whatever became of those before them."""
    assert running.until(lambda: whole(running), 15), running.log
    return running


def whole(server: Any) -> bool:
    """Return whether it sees two workers, and both are there: one that was killed is seen until its lease ends."""
    pids = server.instances().values()
    return len(pids) == 2 and all(map(alive, pids))


#: What a system that ends waits for.
WAITS = ["(client.drain_grace)", "(grace_period)"]


def test_killing_the_supervisor_leaves_no_process(processes: Any) -> None:
    server = processes()
    leader = server.process.pid
    assert len(session(leader)) == 3

    os.kill(leader, signal.SIGKILL)

    assert server.until(lambda: not session(leader), 5), session(leader)


@pytest.mark.parametrize(("number", "waits"), [(signal.SIGTERM, WAITS), (signal.SIGINT, [])])
def test_idle_system_ends_and_says_what_it_waits_for(processes: Any, number: int, waits: list[str]) -> None:
    server = processes()

    server.signal(number)

    assert server.wait() == 0
    assert [wait for wait in WAITS if wait in server.log] == waits


def test_ctrl_c_during_a_worker_start_ends_every_process_soon(serve: Any, tmp_path: Path) -> None:
    late = "  late: {model: {name: late-model}, engine: {use: mocker, startup_time: 600}}\nclient:"
    server = serve(config(tmp_path).replace("client:", late, 1), "--profile", "processes", ready="listening")
    assert server.until(lambda: len(server.instances()) == 1, 15)
    # The other worker takes a lease, too, and then its engine starts.
    assert server.until(lambda: len(list((tmp_path / "discovery" / "leases").iterdir())) == 2, 15)

    os.killpg(server.process.pid, signal.SIGINT)

    assert server.wait() == 0
    assert session(server.process.pid) == []
    assert "waiting for workers.late-0" in server.log
    assert "the engine of worker late is in start()" in server.log


@pytest.fixture(scope="module")
def quick(serve_for_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a frontend with one worker, whose answers come at once, and which no test ends."""
    text = config(tmp_path_factory.mktemp("quick"), itl=0.2, stall=2)
    server = serve_for_module(text, "--profile", "processes")
    assert server.until(lambda: len(server.instances()) == 1, 15), server.log
    return server


def test_a_stalled_reader_is_cut_without_disturbing_others(quick: Any) -> None:
    server, name = quick, "dynamo_frontend_disconnected_clients"
    before = server.metric(name)
    long = chat(max_tokens=8000, stream=True, logprobs=True, top_logprobs=20)
    slow = server.raw("POST", "/v1/chat/completions", long, receive_buffer=4096)
    slow.recv(1024)

    times = []
    for _ in range(10):
        begun = time.monotonic()
        assert server.request("POST", "/v1/chat/completions", chat())[0] == 200
        times.append(time.monotonic() - begun)
    cut = server.until(lambda: server.metric(name) == before + 1, 15)
    slow.close()

    assert cut, "the reader was not cut off"
    assert max(times) < 5
    assert server.until(lambda: server.metric("dynamo_frontend_active_requests") == 0, 5)


def test_ctrl_c_finishes_running_streams_and_ends_processes_in_order(processes: Any) -> None:
    server = processes(itl=10)
    stream = Stream(server, max_tokens=100)
    stream.begun()

    os.killpg(server.process.pid, signal.SIGINT)

    assert len(stream.text()) == 100
    assert server.wait() == 0
    assert session(server.process.pid) == []
    assert "killed" not in server.log


def test_requests_get_503_while_all_workers_are_dead(deployment: Any) -> None:
    server = deployment

    # One of them has a name.
    for pid, number in zip(server.instances().values(), (signal.SIGKILL, 36), strict=True):
        os.kill(pid, number)
    statuses = {server.request("POST", "/v1/chat/completions", chat())[0] for _ in range(10)}

    assert statuses <= {503, 200}
    assert server.until(lambda: server.request("POST", "/v1/chat/completions", chat())[0] == 200, 15)
    assert server.until(lambda: whole(server), 15), "both are started again"


def test_a_model_of_the_config_is_unavailable_and_not_unknown_while_its_workers_start(
    serve: Any, deployment: Any, folder: Path
) -> None:
    late = "  late: {model: {name: late-model}, engine: {use: mocker, startup_time: 600}}\nclient:"
    text = config(folder).replace("client:", late, 1)
    server = serve(text, "--profile", "processes", command="frontend", ready="listening")
    assert server.until(lambda: len(server.instances()) == 2, 15)

    statuses = [
        server.request("POST", "/v1/chat/completions", chat() | {"model": model})[0]
        for model in ("mock-model", "late-model", "nobody")
    ]

    assert statuses == [200, 503, 404]
    assert server.request("GET", "/ready")[0] == 503


def test_a_config_that_is_broken_while_running_does_not_take_the_whole_down(processes: Any) -> None:
    server = processes()
    path = Path(server.process.args[4])
    good = path.read_text()
    assert server.until(lambda: "ready for requests" in server.log, 5)

    path.write_text(good + "nonsense: 1\n")
    os.kill(next(iter(server.instances().values())), signal.SIGKILL)
    assert server.until(lambda: "ended with exit code 2" in server.log, 15), server.log
    path.write_text(good)

    assert server.until(lambda: [*map(alive, server.instances().values())] == [True], 20)
    assert server.request("POST", "/v1/chat/completions", chat())[0] == 200


def test_an_unread_log_keeps_no_process_alive(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config(tmp_path, itl=0.1))
    port = free_port()
    serve = [sys.executable, "-m", "dynamo_runtime.cli.main", "serve", str(path), "--profile", "processes"]
    with leading_a_session([*serve, "--http-port", str(port)], stderr=subprocess.PIPE, pipesize=4096) as process:
        fill_the_log(port)

        process.send_signal(signal.SIGTERM)
        process.wait(60)

        assert session(process.pid) == []


def fill_the_log(port: int) -> None:
    """Ask until the access log has filled the pipe that nobody reads, which holds 4 KiB."""
    asked = 0
    deadline = time.monotonic() + 90
    while asked < 40 and time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(chat(max_tokens=1)), {"content-type": "application/json"}
            )
            asked += connection.getresponse().status == 200
        except OSError:
            time.sleep(0.1)
        finally:
            connection.close()
    assert asked == 40
