"""The life of a worker process under every condition, with an engine that writes down what is asked of it."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.asking import read_to_end
from tests.e2e.conftest import Process, clean_environment

#: A plugin outside the tree: found by its metadata, as any installed one is.
ENGINE = """
from __future__ import annotations
import asyncio, ctypes, os, time
from contextlib import suppress
from dynamo_core import BackendError, EngineConfig, LLMEngine, LLMEngineOutput, PluginConfig, hookimpl
from prometheus_client import CollectorRegistry, Gauge

DYNAMO_API = 1


class LifeConfig(PluginConfig):
    diary: str
    start_waits: bool = False
    fail_start: bool = False
    hang: str = ""
    itl: float = 0.02


class LifeEngine(LLMEngine):
    NAME = "life"
    Config = LifeConfig

    def __init__(self, config, worker):
        super().__init__(config, worker)
        self.silent = False

    def write(self, line):
        with open(self.config.diary, "a") as diary:
            diary.write(line + "\\n")

    async def hanging(self, where):
        if self.config.hang == where:
            await asyncio.Event().wait()
        if self.config.hang == where + " in C":
            time.sleep(600)
        if self.config.hang == where + " with the lock":
            ctypes.PyDLL(None).sleep(600)
        if self.config.hang == where + " in a thread":
            await asyncio.to_thread(time.sleep, 600)
        while self.config.hang == where + " deaf":
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def start(self, worker_id):
        self.write("start")
        await self.hanging("start")
        while self.config.start_waits and not os.path.exists(self.config.diary + ".go"):
            await asyncio.sleep(0.01)
        if self.config.fail_start:
            raise BackendError.EngineShutdown("no memory")
        self.write("started")
        return EngineConfig(model="life-model")

    async def setup_metrics(self, metrics):
        own = CollectorRegistry()
        Gauge("life_temperature", "How warm.", registry=own).set(37)
        Gauge("other_temperature", "Not shown.", registry=own).set(1)
        metrics.bridge(own, prefixes=["life_"])

    async def generate(self, request, ctx):
        self.write("probe" if request.is_probe else "generate")
        if request.is_probe and os.path.exists(self.config.diary + ".silent"):
            await ctx.stopped()
            yield LLMEngineOutput.cancelled()
            return
        await self.hanging("generate")
        for number in range(request.stop_conditions.max_tokens or 1):
            hurries = request.is_probe or os.path.exists(self.config.diary + ".go")
            await asyncio.sleep(0 if hurries else self.config.itl)
            yield LLMEngineOutput([65 + number % 26])
        yield LLMEngineOutput.length()

    async def drain(self):
        self.write("drain")
        await self.hanging("drain")

    async def cleanup(self):
        self.write("cleanup")
        await self.hanging("cleanup")
        self.write("cleaned up")


@hookimpl
def dynamo_register_engines():
    return [LifeEngine]
"""

CONFIG = """
workers:
  life:
    model: {name: life-model}
    engine: {use: life, diary: "%(folder)s/diary", %(engine)s}
    grace_period: 0.3
    shutdown_timeout: 10
    %(worker)s
client: {drain_grace: 0.1}
transport: {use: tcp}
discovery: {use: file, path: "%(discovery)s", ttl: 2}
"""


def config(folder: Path, discovery: Path, engine: str = "itl: 0.02", worker: str = "") -> str:
    return CONFIG % {"folder": folder, "discovery": discovery, "engine": engine, "worker": worker}


class Life(Process):
    """A worker process, its log and the diary of its engine."""

    def __init__(
        self, folder: Path, plugin: Path, *parts: str, discovery: Path | None = None, env: dict[str, str] | None = None
    ) -> None:
        self.discovery = discovery or folder / "discovery"
        self.diary_path = folder / "diary"
        path = folder / "worker.yaml"
        path.write_text(config(folder, self.discovery, *parts))
        imports = os.pathsep.join(filter(None, [str(plugin), os.environ.get("PYTHONPATH")]))
        words = ["-m", "dynamo_runtime.cli.main", "serve", str(path), "--only", "workers.life"]
        super().__init__(words, clean_environment(**({"PYTHONPATH": imports} | (env or {}))))

    @property
    def diary(self) -> list[str]:
        return self.diary_path.read_text().splitlines() if self.diary_path.exists() else []

    def until(self, condition: Callable[[], bool], seconds: float = 18) -> bool:
        """Return once the condition holds; that it does not is a failure."""
        assert super().until(condition, seconds), f"{self.diary}\n{self.log}"
        return True

    def go(self) -> None:
        """Let its engine start that waits, and hurry with what it answers."""
        Path(f"{self.diary_path}.go").touch()

    def serving(self) -> Life:
        self.found("serving life-model")
        return self

    @property
    def system(self) -> str:
        """The address of its own health and metrics, as its record in discovery tells."""
        for path in self.discovery.rglob("*"):
            record = path.read_bytes() if path.is_file() else b""
            if b'"pid":%d,' % self.process.pid in record and (found := re.search(rb'"system_url":"([^"]+)"', record)):
                return found[1].decode()
        raise AssertionError("no record in discovery")

    def ask(self, path: str, system: str | None = None) -> tuple[int, str]:
        try:
            with urllib.request.urlopen((system or self.system) + path, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder to import the engine from."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "life_engine.py").write_text(ENGINE)
    metadata = folder / "life_engine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: life-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[dynamo]\nengine-life = life_engine\n")
    return folder


@pytest.fixture
def live(tmp_path: Path, plugin: Path) -> Iterator[Callable[..., Life]]:
    """Start workers that live as long as the test."""
    lives: list[Life] = []

    def start(*parts: str, discovery: Path | None = None, **env: str) -> Life:
        lives.append(Life(tmp_path, plugin, *parts, discovery=discovery, env=env))
        return lives[-1]

    yield start
    for life in lives:
        life.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def shared(serve_for_module: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return a frontend, and where workers meet it."""
    folder = tmp_path_factory.mktemp("frontend")
    discovery = folder / "discovery"
    return serve_for_module(config(folder, discovery), command="frontend", ready="listening"), discovery


@pytest.fixture
def frontend(shared: tuple[Any, Path], live: Callable[..., Life]) -> Callable[..., tuple[Life, Any]]:
    """Start the one worker of a frontend that knows no other, and has no request left for one."""
    server, discovery = shared
    idle = server.until(lambda: server.instances() == {} and server.metric("dynamo_frontend_active_requests") == 0, 20)
    assert idle, server.log

    def start(*parts: str, **env: str) -> tuple[Life, Any]:
        life = live(*parts, discovery=discovery, **env).serving()
        assert server.until(lambda: server.request("GET", "/ready")[0] == 200, 20), server.log
        assert list(server.instances().values()) == [life.process.pid]
        return life, server

    return start


def phases(log: str) -> list[str]:
    return re.findall(r"Phase (\d):", log)


WHOLE = ["start", "started", "drain", "cleanup", "cleaned up"]


def test_an_idle_worker_ends_in_order(live: Any) -> None:
    life = live().serving()

    life.signal(signal.SIGTERM)

    assert life.wait() == 0, life.log
    assert life.diary == WHOLE
    assert phases(life.log) == ["1", "2", "3"]


def test_a_signal_during_the_engine_start_lets_it_finish_without_serving(live: Any) -> None:
    life = live("start_waits: true", DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="60")
    life.until(lambda: life.diary == ["start"])

    life.signal(signal.SIGTERM)
    life.until(lambda: "a second signal cuts" in life.log)
    life.go()

    assert life.wait() == 0, life.log
    assert life.diary == WHOLE
    assert "serving life-model" not in life.log


@pytest.mark.parametrize(
    ("signals", "grace"),
    [
        pytest.param([signal.SIGTERM], "0.3", id="the grace period is over"),
        pytest.param([signal.SIGINT], "60", id="ctrl-c"),
        pytest.param([signal.SIGTERM] * 2, "60", id="a second signal", marks=pytest.mark.full),
    ],
)
def test_start_that_is_cut_is_cleaned_up(live: Any, signals: list[int], grace: str) -> None:
    timeouts = {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "60", "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": grace}
    life = live("hang: start", **timeouts)
    life.until(lambda: life.diary == ["start"])

    for number in signals:
        life.signal(number)
        life.until(lambda: "a second signal cuts" in life.log or number == signal.SIGINT)  # noqa: B023 - used at once

    assert life.wait() == 0, life.log
    assert life.diary == ["start", "cleanup", "cleaned up"]
    assert "the engine of worker life is in start()" in life.log


@pytest.mark.parametrize(
    ("hang", "waits_for"),
    [
        pytest.param("start in C", "the engine of worker life is in start()", id="blocks the loop"),
        pytest.param(
            "start deaf",
            "the engine of worker life is in start()",
            id="swallows the cancelling",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "start in a thread", "threads that have not ended", id="goes on in a thread", marks=pytest.mark.full
        ),
    ],
)
def test_ctrl_c_ends_an_uncancellable_start_within_seconds(live: Any, hang: str, waits_for: str) -> None:
    life = live(f"hang: {hang}", DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT="60")
    life.until(lambda: life.diary == ["start"])

    life.signal(signal.SIGINT)

    assert life.wait() == 70
    given_up = next(line for line in life.log.splitlines() if "not stopped within 4 s" in line)
    assert waits_for in given_up


def test_a_draining_workers_stream_ends_whole_and_its_model_is_unlisted(frontend: Any) -> None:
    life, server = frontend("itl: 0.03")
    # At its pace it would take longer than the worker has to end.
    body = {"model": "life-model", "prompt": "hi", "max_tokens": 600, "stream": True}
    connection = server.raw("POST", "/v1/completions", body)
    received = b""
    while b'"text"' not in received:
        received += connection.recv(65536)

    life.signal(signal.SIGTERM)
    gone = server.until(lambda: json.loads(server.request("GET", "/v1/models")[2])["data"] == [], 5)
    ended_before = "cleanup" in life.diary
    life.go()
    received += read_to_end(connection)

    assert gone
    assert not ended_before, "the model was still listed when its worker was done"
    assert b"data: [DONE]" in received
    text = "".join(re.findall(r'"text":"([^"]*)"', received.decode()))
    assert len(text) == 600
    assert life.wait() == 0, life.log
    assert life.diary == ["start", "started", "generate", "drain", "cleanup", "cleaned up"]


@pytest.mark.parametrize(
    "hang", ["cleanup", *(pytest.param(f"{step} in C", marks=pytest.mark.full) for step in ("cleanup", "drain"))]
)
def test_an_engine_that_cannot_be_stopped_takes_the_process_no_longer_than_the_deadline(live: Any, hang: str) -> None:
    life = live(f"hang: {hang}", DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT="1", DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="-3")
    life.serving()

    life.signal(signal.SIGTERM)

    assert life.wait() == 70
    assert life.diary.count("cleanup") == ("cleanup" in hang)
    assert "not stopped within" in life.log


@pytest.mark.full
def test_a_failed_start_with_a_cleanup_that_hangs_has_the_deadline_too(live: Any) -> None:
    life = live("fail_start: true, hang: cleanup", DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT="1")

    assert life.wait() == 70
    assert life.diary == ["start", "cleanup"]


@pytest.mark.parametrize(
    ("how", "code"),
    [("in C", 70), pytest.param("with the lock", 1, marks=pytest.mark.full, id="keeps the lock of the interpreter")],
)
def test_loop_that_stands_still_ends_the_process_and_its_place_in_discovery(frontend: Any, how: str, code: int) -> None:
    life, server = frontend(f"hang: generate {how}", "stall_exit: 1")
    body = {"model": "life-model", "prompt": "hi", "max_tokens": 1}
    threading.Thread(target=server.request, args=("POST", "/v1/completions", body), daemon=True).start()

    assert life.wait() == code
    assert ("the event loop stood still for 1 s" in life.log) == (code == 70)
    assert "life_engine.py" in life.log, "every thread is shown"
    assert server.until(lambda: server.instances() == {}, 10), "its lease runs out"


def test_a_worker_failing_its_probe_gets_no_requests_until_it_answers(frontend: Any) -> None:
    life, server = frontend(
        DYN_HEALTH_CHECK_ENABLED="true", DYN_CANARY_WAIT_TIME="0.4", DYN_HEALTH_CHECK_REQUEST_TIMEOUT="0.5"
    )
    system = life.system
    life.until(lambda: "probe" in life.diary)
    life.until(lambda: life.ask("/health", system)[0] == 200)
    before = life.ask("/health", system)
    silent = Path(f"{life.diary_path}.silent")

    silent.touch()
    left = server.until(lambda: server.instances() == {}, 10)
    during = life.ask("/health", system)
    silent.unlink()
    back = server.until(lambda: len(server.instances()) == 1, 10)
    life.until(lambda: life.ask("/health", system)[0] == 200)
    metrics = life.ask("/metrics", system)[1]
    life.signal(signal.SIGTERM)

    assert left, life.log
    assert back, life.log
    assert before[0] == 200
    assert json.loads(before[1])["endpoints"] == {"dynamo.backend.generate": "ready"}
    assert during[0] == 503
    assert json.loads(during[1])["status"] == "notready"
    assert json.loads(during[1])["endpoints"] == {"dynamo.backend.generate": "notready"}
    assert re.search(r"^dynamo_component_requests_total\{.*\} 0\.0$", metrics, re.MULTILINE), "probes do not count"
    assert life.wait() == 0, life.log
    assert life.diary[-3:] == ["drain", "cleanup", "cleaned up"]


def test_a_worker_shows_the_metrics_of_its_engines_own_registry(live: Any) -> None:
    life = live().serving()

    text = life.ask("/metrics")[1]

    assert life.ask("/metadata")[0] == life.ask("/engine/sleep")[0] == 404

    line = next(line for line in text.splitlines() if line.startswith("life_temperature{"))
    assert line.endswith(" 37.0")
    for label in ('dynamo_component="backend"', 'dynamo_endpoint="generate"', 'worker="life-0"'):
        assert label in line
    assert "other_temperature" not in text
    assert re.search(r"^dynamo_component_model_load_time_seconds\{", text, re.MULTILINE)
