"""What a user sees who starts it wrongly, and that stopping leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from dynamo_testing.servers.ports import free_port

from tests.e2e.asking import read_to_end, text_of
from tests.e2e.sessions import leading_a_session, session

ROOT = Path(__file__).parents[2]


def run_serve(folder: Path, config: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = folder / "config.yaml"
    path.write_text(config)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")}
    return subprocess.run(
        [sys.executable, "-m", "dynamo_runtime.cli.main", "serve", str(path)],
        env=kept | env,
        capture_output=True,
        text=True,
        timeout=90,
    )


Begin = Callable[..., Result]


@pytest.fixture
def begin(dynamo: Callable[..., Result], tmp_path: Path) -> Begin:
    """Start what cannot start, in this process."""

    def run(config: str, command: str = "serve", **env: str) -> Result:
        path = tmp_path / "config.yaml"
        path.write_text(config)
        return dynamo(command, path, env=env)

    return run


def complaint(told: str) -> str:
    """Return the one line that says what is wrong."""
    [line] = [line for line in told.splitlines() if line.startswith("dynamo: ")]
    assert "Traceback" not in told
    return line


#: An engine that fails as no engine should.
BROKEN = """
from dynamo_core import LLMEngine, hookimpl

DYNAMO_API = 1


class Broken(LLMEngine):
    NAME = "broken"

    def __init__(self, config, worker):
        raise ValueError("no such card")

    async def start(self, worker_id):
        pass

    async def generate(self, request, context):
        yield {}

    async def cleanup(self):
        pass


@hookimpl
def dynamo_register_engines():
    return [Broken]
"""

GOOD = """
frontend: {port: 0}
workers:
  mock: {model: {name: m}, engine: {use: mocker}}
"""


@pytest.mark.parametrize(
    ("config", "env", "words"),
    [
        (GOOD + "router: {use: rond-robin}\n", {}, ["router", "rond-robin", "round-robin"]),
        (GOOD + "rooter: {use: round-robin}\n", {}, ["config.yaml:5", "rooter", "router"]),
        (GOOD, {"DYN_ROOTER__USE": "x"}, ["DYN_ROOTER__USE", "DYN_ROUTER__USE"]),
        (GOOD.replace("use: mocker", "use: mocker, speedup: 2"), {}, ["config.yaml:4", "speedup", "speedup_ratio"]),
        (GOOD.replace("port: 0", "port: many"), {}, ["config.yaml:2", "frontend.port", "many"]),
        (GOOD, {"DYN_HTTP_PORT": "eight"}, ["DYN_HTTP_PORT", "eight"]),
    ],
    ids=["plugin", "key", "environment", "plugin-key", "type", "environment-type"],
)
def test_a_wrong_set_up_is_one_clear_line_and_exit_code_2(
    begin: Begin, config: str, env: dict[str, str], words: list[str]
) -> None:
    done = begin(config, **env)

    assert done.exit_code == 2, done.stderr
    told = complaint(done.stderr)
    for word in words:
        assert word in told


def test_a_tokenizer_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{ not json")

    done = run_serve(tmp_path, GOOD.replace("name: m", f"name: m, path: {tmp_path / 'model'}"))

    assert done.returncode == 2
    assert "tokenizer.json" in complaint(done.stderr)
    assert done.stderr.splitlines()[-1] == complaint(done.stderr)


def test_a_port_in_use_is_one_clear_line_and_exit_code_2_of_the_process(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        done = run_serve(tmp_path, GOOD.replace("port: 0", f"port: {port}"))

    assert done.returncode == 2
    assert str(port) in complaint(done.stderr)
    assert "--http-port" in complaint(done.stderr)


@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_discovery_path_that_is_a_file_fails_before_the_start(begin: Begin, tmp_path: Path, command: str) -> None:
    (tmp_path / "records").write_text("a file where a folder is needed")
    planes = f'transport: {{use: tcp}}\ndiscovery: {{use: file, path: "{tmp_path}/records"}}\n'

    done = begin(GOOD + planes, command)

    place = f"{tmp_path}/config.yaml:6: discovery.path"
    assert (done.exit_code, done.stderr) == (2, f"dynamo: {place}: {tmp_path}/records is no folder\n")


def test_the_last_line_of_a_start_that_fails_is_the_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    info = tmp_path / "acme_broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dynamo]\nengine-broken = broken\n")

    done = run_serve(tmp_path, GOOD.replace("use: mocker", "use: broken"), PYTHONPATH=str(tmp_path))

    assert done.returncode == 1, done.stderr
    assert "ValueError: no such card" in done.stderr.splitlines()[-1]


def assert_ended(server: Any) -> None:
    """Assert that the exit code and the last line say so, and that the port is closed."""
    assert server.wait() == 0
    assert server.lines[-1].endswith(": stopped\n")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), timeout=1)


def streamed(server: Any, until_content: Any, number: int, **fields: Any) -> bytes:
    """Return a stream in whose midst the server gets a signal, to its end."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    connection = server.raw("POST", "/v1/chat/completions", body)
    received: bytes = until_content(connection)
    server.signal(number)
    return received + read_to_end(connection)


def test_a_running_stream_is_finished_before_the_server_ends(serve: Any, until_content: Any) -> None:
    server = serve("workers: {mock: {model: {name: m}, engine: {use: mocker, fixed_itl_ms: 5}}}\n")

    received = streamed(server, until_content, signal.SIGTERM, max_tokens=100)

    assert len(text_of(received)) == 100
    assert b"data: [DONE]" in received
    assert_ended(server)


def test_a_stream_over_the_shutdown_timeout_ends_with_an_error(serve: Any, until_content: Any) -> None:
    server = serve(
        "client: {shutdown_timeout: 0.5}\n"
        "workers: {mock: {model: {name: m}, engine: {use: mocker, fixed_itl_ms: 20}}}\n"
    )

    received = streamed(server, until_content, signal.SIGTERM, max_tokens=4000)

    assert b'data: {"error":' in received
    assert b"shutting down" in received
    assert b"[DONE]" not in received
    assert not received.endswith(b"0\r\n\r\n")
    assert server.wait() == 0


def test_a_second_signal_cuts_running_requests(serve: Any) -> None:
    server = serve("workers: {mock: {model: {name: m}, engine: {use: mocker, fixed_itl_ms: 60000}}}\n")
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    connection = server.raw("POST", "/v1/chat/completions", body)
    assert server.until(lambda: server.metric("dynamo_mocker_running_requests") == 1, 5)

    server.signal(signal.SIGINT)
    assert server.until(lambda: "second signal" in server.log, 5)
    server.signal(signal.SIGINT)

    assert server.wait() == 0
    assert b"[DONE]" not in connection.recv(65536)
    connection.close()


#: One process with a worker that serves and one that needs minutes to start.
LATE = """
workers:
  quick: {model: {name: quick-model}, engine: {use: mocker, fixed_itl_ms: 20}}
  late: {model: {name: late-model}, engine: {use: mocker, startup_time: 600}}
"""


def test_ctrl_c_during_an_engine_start_finishes_other_requests(serve: Any, until_content: Any) -> None:
    server = serve(LATE, ready="listening")
    assert server.until(lambda: server.request("GET", "/v1/models")[2].count(b"quick-model") == 1, 5)

    received = streamed(server, until_content, signal.SIGINT, model="quick-model", max_tokens=300)

    assert b"data: [DONE]" in received
    assert server.wait() == 0
    assert "the engine of worker late is in start()" in server.log


@pytest.mark.full
@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="`make` has not set up this tree")
@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are counted in /proc")
def test_ctrl_c_leaves_nothing_behind_also_when_make_runs_it_in_a_shell() -> None:
    port = free_port()
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "MAKE", "MFLAGS", "ARGS"))}
    with leading_a_session(
        ["bash", "-c", "make serve; true"],
        cwd=ROOT,
        env=kept | {"DYN_HTTP_PORT": str(port)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        else:
            pytest.fail("make serve did not open its port")

        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)

        assert session(process.pid) == []
