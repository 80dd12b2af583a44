"""One process per part, without servers: deaths, restarts, orphans, slow readers."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.ports import free_port

from tests.e2e.asking import text_of
from tests.e2e.sessions import alive, leading_a_session, session
from tests.e2e.threads import Threads

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
    """Starts a supervisor, a worker and a frontend, and returns when the worker is seen."""

    def start(**settings: Any) -> Any:
        server = serve(config(tmp_path, **settings), "--profile", "processes")
        assert server.until(lambda: len(server.instances()) == 1, 15), server.log
        return server

    return start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the discovery of `deployment` is."""
    return tmp_path_factory.mktemp("deployment")


@pytest.fixture(scope="module")
def running(serve_for_module: Any, folder: Path) -> Any:
    return serve_for_module(config(folder, itl=10, replicas=2), "--profile", "processes")


@pytest.fixture
def deployment(running: Any) -> Any:
    """A frontend with two workers, all of which are alive, whatever became of those before them."""
    assert running.until(lambda: whole(running), 15), running.log
    return running


def whole(server: Any) -> bool:
    """Whether it sees two workers, and both are there: one that was killed is seen until its lease ends."""
    pids = server.instances().values()
    return len(pids) == 2 and all(map(alive, pids))


class Readers:
    """Clients that read streams, all of which have begun."""

    def __init__(self, server: Any, count: int, max_tokens: int) -> None:
        self._results: queue.Queue[bytes] = queue.Queue()
        opened = [threading.Event() for _ in range(count)]
        body = chat(max_tokens=max_tokens, stream=True)
        self._threads = [threading.Thread(target=self._read, args=(server, body, event)) for event in opened]
        for thread in self._threads:
            thread.start()
        assert all(event.wait(60) for event in opened)

    def streams(self) -> list[bytes]:
        """What came, once nothing more does; those that broke come first."""
        for thread in self._threads:
            thread.join(90)
        received = [self._results.get(timeout=1) for _ in self._threads]
        return sorted(received, key=lambda data: b"[DONE]" in data)

    def _read(self, server: Any, body: dict[str, Any], opened: threading.Event) -> None:
        connection = server.raw("POST", "/v1/chat/completions", body)
        received = b""
        try:
            while data := connection.recv(65536):
                received += data
                if b'"content"' in received:
                    opened.set()
        except ConnectionError:
            pass
        finally:
            connection.close()
        self._results.put(received)


def test_a_worker_that_is_killed_takes_only_its_own_streams_along(deployment: Any) -> None:
    server = deployment
    readers = Readers(server, 2, max_tokens=300)
    instance, pid = next(iter(server.instances().items()))

    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    answers = [server.request("POST", "/v1/chat/completions", chat())[0] for _ in range(10)]
    gone = server.until(lambda: instance not in server.instances(), 6)
    back = server.until(lambda: len(server.instances()) == 2, 15)

    broken, complete = readers.streams()
    assert complete.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert len(text_of(complete)) == 300
    assert b'data: {"error":' in broken
    assert b"[DONE]" not in broken
    assert not broken.endswith(b"0\r\n\r\n")
    assert answers == [200] * 10
    assert gone, f"still listed {time.monotonic() - killed:.1f} s after its death"
    assert back, "the supervisor starts it again"


def test_answers_are_equal_in_one_process_and_in_several(serve: Any, deployment: Any, tmp_path: Path) -> None:
    one = serve(config(tmp_path, itl=1, replicas=2))

    for seed in range(5):
        body = chat(seed=seed, max_tokens=40)
        texts = [
            json.loads(server.request("POST", "/v1/chat/completions", body)[2])["choices"][0]["message"]["content"]
            for server in (one, deployment)
        ]
        assert texts[0] == texts[1]


def test_a_worker_that_is_told_to_end_finishes_its_streams(deployment: Any) -> None:
    server = deployment
    readers = Readers(server, 2, max_tokens=100)
    instance, pid = next(iter(server.instances().items()))

    os.kill(pid, signal.SIGTERM)

    assert server.until(lambda: instance not in server.instances(), 5)
    assert all(b"data: [DONE]" in stream for stream in readers.streams())


#: Seconds for which a frontend that ends still takes requests.
DRAIN_GRACE = 0.5


class Load(Threads):
    """Clients that ask without pause, each request on whichever of several frontends says that it is ready."""

    def __init__(self, servers: list[Any], clients: int = 4) -> None:
        self.servers = list(servers)
        self.failures: list[str] = []
        self.done = 0
        super().__init__(*(partial(self._run, number) for number in range(clients)))

    def _run(self, number: int) -> None:
        turn = number
        while not self.over.is_set():
            turn += 1
            looked = time.monotonic()
            server = self._ready(turn)
            if server is None:
                continue
            stream = turn % 2 == 0
            try:
                status, _, body = server.request("POST", "/v1/chat/completions", chat(stream=stream, max_tokens=4))
                if status != 200 or (stream and not body.endswith(b"data: [DONE]\n\n")):
                    self.failures.append(f"{status} {body[-200:]!r}")
            except (OSError, http.client.HTTPException) as error:
                # A client that was held up for longer than the grace comes to a frontend that has gone in order.
                if not isinstance(error, ConnectionRefusedError) or time.monotonic() - looked < DRAIN_GRACE:
                    self.failures.append(repr(error))
            self.done += 1

    def _ready(self, turn: int) -> Any:
        """As a load balancer does: only where /ready says so."""
        for offset in range(len(self.servers)):
            server = self.servers[(turn + offset) % len(self.servers)]
            try:
                if server.request("GET", "/ready")[0] == 200:
                    return server
            except (OSError, http.client.HTTPException):
                continue
        return None


@pytest.mark.timeout(300)
def test_a_rolling_restart_of_workers_and_of_a_frontend_fails_no_request(
    serve: Any, deployment: Any, folder: Path
) -> None:
    first = deployment
    second = serve(config(folder), "--profile", "processes", command="frontend")
    assert second.until(lambda: len(second.instances()) == 2, 10)

    with Load([first, second]) as load:
        for instance, pid in list(first.instances().items()):
            os.kill(pid, signal.SIGTERM)
            # As whoever rolls a fleet does: the next one only when the last is seen to be back, by every frontend.
            for frontend in (first, second):
                assert frontend.until(lambda gone=instance, seen=frontend: gone not in seen.instances(), 10)
                assert frontend.until(lambda seen=frontend: len(seen.instances()) == 2, 20)
        second.signal(signal.SIGTERM)
        assert second.wait() == 0
        load.servers = [first]
        time.sleep(0.5)

    assert load.failures == []
    assert load.done > 50


#: What a system that ends waits for.
WAITS = ["(client.drain_grace)", "(grace_period)"]


def test_killing_the_supervisor_leaves_no_process(processes: Any) -> None:
    server = processes()
    leader = server.process.pid
    assert len(session(leader)) == 3

    os.kill(leader, signal.SIGKILL)

    assert server.until(lambda: not session(leader), 5), session(leader)


def test_a_stop_of_an_idle_system_says_what_it_waits_for(processes: Any) -> None:
    server = processes()

    server.signal(signal.SIGTERM)

    assert server.wait() == 0
    assert [wait for wait in WAITS if wait in server.log] == WAITS


def test_ctrl_c_that_only_the_supervisor_hears_ends_an_idle_system_without_waiting(processes: Any) -> None:
    server = processes()

    server.signal(signal.SIGINT)

    assert server.wait() == 0
    assert [wait for wait in WAITS if wait in server.log] == []


def test_ctrl_c_while_a_worker_starts_ends_every_process_soon_and_says_what_was_waited_for(
    serve: Any, tmp_path: Path
) -> None:
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


def test_a_part_that_cannot_run_ends_the_whole_with_its_reason(tmp_path: Path, serve: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(pytest.fail.Exception, match=f"(?s){port}.*cannot run with this config"):
            serve(config(tmp_path), "--profile", "processes", "--set", f"admin.port={port}")


def test_a_taken_port_is_told_before_any_process_starts(tmp_path: Path, serve: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(pytest.fail.Exception) as raised:
            serve(config(tmp_path), "--profile", "processes", "--set", f"frontend.port={port}")

    assert f"127.0.0.1:{port}: the port is in use" in str(raised.value)
    assert "runs as pid" not in str(raised.value)


@pytest.fixture(scope="module")
def system_port() -> int:
    """Where the worker of `quick` tells its own health."""
    return free_port()


@pytest.fixture(scope="module")
def quick(serve_for_module: Any, system_port: int, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A frontend with one worker, whose answers come at once, and which no test ends."""
    text = config(tmp_path_factory.mktemp("quick"), itl=0.2, stall=2)
    server = serve_for_module(text, "--profile", "processes", "--set", f"workers.mock.system_port={system_port}")
    assert server.until(lambda: len(server.instances()) == 1, 15), server.log
    return server


def test_a_worker_process_tells_its_own_health_and_metrics(quick: Any, system_port: int) -> None:
    quick.request("POST", "/v1/chat/completions", chat())

    answers = []
    for path in ("/health", "/metrics"):
        connection = http.client.HTTPConnection("127.0.0.1", system_port, timeout=60)
        connection.request("GET", path)
        answers.append(connection.getresponse().read().decode())
        connection.close()

    health = json.loads(answers[0])
    assert health["status"] == "ready"
    assert health["endpoints"] == {"dynamo.backend.generate": "ready"}
    assert "dynamo_component_requests_total{" in answers[1]
    assert "dynamo_frontend" not in answers[1]


def test_a_reader_that_stops_is_cut_off_and_disturbs_nobody(quick: Any) -> None:
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


def test_ctrl_c_lets_running_streams_finish_and_ends_every_process_in_order(processes: Any) -> None:
    server = processes(itl=10)
    readers = Readers(server, 1, max_tokens=100)

    os.killpg(server.process.pid, signal.SIGINT)

    assert all(b"data: [DONE]" in stream for stream in readers.streams())
    assert server.wait() == 0
    assert session(server.process.pid) == []
    assert "killed" not in server.log


def test_while_all_workers_are_dead_of_whatever_signal_requests_are_told_to_come_back(deployment: Any) -> None:
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


def test_a_log_that_nobody_reads_keeps_no_process_alive(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config(tmp_path, itl=0.1))
    port = free_port()
    serve = [sys.executable, "-m", "dynamo_runtime.cli.main", "serve", str(path), "--profile", "processes"]
    with leading_a_session([*serve, "--http-port", str(port)], stderr=subprocess.PIPE) as process:
        fill_the_log(port)

        process.send_signal(signal.SIGTERM)
        process.wait(60)

        assert session(process.pid) == []


def fill_the_log(port: int) -> None:
    """Asks until the access log has filled the pipe that nobody reads, which holds 64 KiB."""
    asked = 0
    deadline = time.monotonic() + 90
    while asked < 400 and time.monotonic() < deadline:
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
    assert asked == 400
