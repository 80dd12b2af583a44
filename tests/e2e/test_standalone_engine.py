"""Engines that run alone: a main of three lines, no plugin, no config file, and a frontend that finds them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from dynamo_plugin_engine_mocker.engine import MockerEngine
from dynamo_runtime import engine_main
from dynamo_testing.servers.ports import free_port

from tests.e2e.conftest import Log, Process

#: An engine that imports nothing of transports, discovery or settings, and is made from no class of the framework.
ENGINE = """
import asyncio
from dynamo_core import EngineConfig, LLMEngineOutput, WorkerConfig, usage
from dynamo_runtime import run

class Parrot:
    def __init__(self):
        self.worker_id = None

    async def start(self, worker_id):
        print("start", worker_id, flush=True)
        self.worker_id = worker_id
        return EngineConfig(model="parrot")

    async def generate(self, request, ctx):
        if request.token_ids == [33]:
            raise RuntimeError("a secret of the engine")
        for at, token in enumerate(request.token_ids):
            if ctx.is_stopped():
                yield LLMEngineOutput.cancelled()
                return
            yield LLMEngineOutput([token])
            await asyncio.sleep(DELAY)
        yield LLMEngineOutput.stop().with_usage(usage(len(request.token_ids), len(request.token_ids)))

    async def abort(self, ctx):
        print("abort", type(ctx).__name__, flush=True)

    async def drain(self):
        print("drain", flush=True)

    async def cleanup(self):
        print("cleanup", flush=True)
"""

#: The whole main.
MAIN = """
engine = Parrot()
config = WorkerConfig(model_name="parrot", metrics_labels={"team": "blue"})
run(engine, config, overrides=["workers.parrot.grace_period=0.2"])
"""

FRONTEND = """
transport: {use: tcp}
discovery: {use: file, path: "%s", ttl: 2}
client: {drain_grace: 0.1, min_initial_workers: 0}
"""


class Alone(Process):
    """A process of an engine, and what it says."""

    def __init__(self, words: Sequence[str], env: dict[str, str]) -> None:
        super().__init__(words, env, stdout=subprocess.PIPE)
        self._said = Log(self.process.stdout)

    @property
    def said(self) -> list[str]:
        return [line.rstrip("\n") for line in self._said.lines]

    def end(self, number: int = signal.SIGTERM) -> int:
        code = super().end(number)
        self._said.close()
        return code


Start = Callable[..., Alone]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the frontend finds the engines of all tests."""
    return tmp_path_factory.mktemp("records")


@pytest.fixture
def alone(tmp_path: Path, records: Path) -> Iterator[Start]:
    """Start engines that live as long as the test, from a module or from the text of a script."""
    started: list[Alone] = []

    def start(*words: str, script: str | None = None, **env: str) -> Alone:
        if script is not None:
            path = tmp_path / "main.py"
            path.write_text(script)
            words = (str(path), *words)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")}
        place = {"DYN_DISCOVERY__PATH": str(records), "PYTHONUNBUFFERED": "1"}
        engine = Alone(list(words), kept | place | env)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def frontend(serve_for_module: Any, records: Path) -> Any:
    """Return a frontend over tcp."""
    return serve_for_module(FRONTEND % records, command="frontend")


def ask(frontend: Any, model: str, prompt: Any, **more: Any) -> tuple[int, Any]:
    status, _, body = frontend.request("POST", "/v1/completions", {"model": model, "prompt": prompt, **more})
    return status, json.loads(body)


def chat(frontend: Any, text: str) -> Any:
    """Return the connection of a stream in which the parrot says this."""
    body = {"model": "parrot", "messages": [{"role": "user", "content": text}], "stream": True}
    return frontend.raw("POST", "/v1/chat/completions", body)


def served(frontend: Any, model: str, engine: Alone) -> bool:
    """Return whether the model is listed, and the frontend sees this engine alone: that of another test has gone."""
    listed = json.loads(frontend.request("GET", "/v1/models")[2])
    there = list(frontend.instances().values())
    return model in [entry["id"] for entry in listed["data"]] and there == [engine.process.pid]


def parrot(delay: float = 0.0, main: str = MAIN) -> str:
    return ENGINE.replace("DELAY", str(delay)) + main


def served_parrot(frontend: Any, alone: Start, delay: float = 0.0, **env: str) -> Any:
    """Return an engine that repeats what it is asked, once the frontend lists its model."""
    engine = alone(script=parrot(delay), **env)
    engine.found("serving parrot")
    assert frontend.until(lambda: served(frontend, "parrot", engine), 10)
    return engine


def test_an_engine_of_no_class_runs_from_three_lines_and_ends_in_order(frontend: Any, alone: Start) -> None:
    port = free_port()
    engine = served_parrot(frontend, alone, DYN_SYSTEM_PORT=str(port))

    status, answer = ask(frontend, "parrot", "Polly?", max_tokens=20)
    health = json.loads(frontend.request("GET", "/health")[2])["instances"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as told:
        lines = told.read().decode().splitlines()
    code = engine.end()

    assert (status, answer["choices"][0]["text"]) == (200, "Polly?")
    assert [(entry["pid"], entry["worker"]) for entry in health] == [(engine.process.pid, "parrot")]
    own = [line for line in lines if line.startswith("dynamo_component_")]
    assert own
    assert all('team="blue"' in line and 'worker="parrot-0"' in line for line in own)
    assert code == 0, engine.log
    # The id that the engine was started with is the one in discovery; cleanup is called once, after drain.
    assert engine.said == [f"start {int(health[0]['instance_id'], 16)}", "drain", "cleanup"]
    assert frontend.until(lambda: b"parrot" not in frontend.request("GET", "/v1/models")[2], 10)


def test_a_client_disconnect_aborts_the_engines_request(
    frontend: Any, alone: Start, until_content: Callable[[Any], bytes]
) -> None:
    engine = served_parrot(frontend, alone, delay=0.05)
    with chat(frontend, "abcdefghij" * 20) as connection:
        until_content(connection)

    assert frontend.until(lambda: len(engine.said) == 2, 10)
    assert engine.said[1] == "abort ServedContext"
    assert engine.end() == 0


def test_engine_exceptions_are_logged_and_hidden_from_clients(frontend: Any, alone: Start) -> None:
    engine = served_parrot(frontend, alone)

    status, answer = ask(frontend, "parrot", [33])

    assert status == 500
    assert "secret" not in json.dumps(answer)
    engine.found("a secret of the engine")
    assert engine.end(signal.SIGINT) == 0


def test_the_mocker_runs_by_its_module_with_flags_over_variables(frontend: Any, alone: Start) -> None:
    engine = alone(
        *("-m", "dynamo_plugin_engine_mocker", "--model-name", "by-flag", "--output", "echo"),
        *("--set", "workers.mocker.grace_period=0"),
        DYN_MODEL_NAME="by-variable",
        DYN_WORKERS__MOCKER__ENGINE__OUTPUT="random",
    )
    engine.found("serving by-flag")
    assert frontend.until(lambda: served(frontend, "by-flag", engine), 10)

    status, answer = ask(frontend, "by-flag", "again", max_tokens=20)

    assert (status, answer["choices"][0]["text"]) == (200, "again")
    assert engine.end() == 0


def test_the_documented_program_runs_unchanged(frontend: Any, alone: Start, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "engine-contract.md").read_text()
    files = dict(re.findall(r"```\w+\n# file: (\S+)\n(.*?)```", page, re.DOTALL))
    (tmp_path / "fleet.yaml").write_text(files["fleet.yaml"])

    engine = alone(
        *("--config", str(tmp_path / "fleet.yaml"), "--model-name", "echo"),
        *("--set", "workers.my_engine.grace_period=0"),
        script=files["my_engine.py"],
    )
    engine.found("serving echo")
    assert frontend.until(lambda: served(frontend, "echo", engine), 10)
    status, answer = ask(frontend, "echo", "Hello")

    assert (status, answer["choices"][0]["text"]) == (200, "Hello")
    assert engine.end() == 0


def test_an_engine_that_fails_to_start_is_cleaned_up_once_with_its_reason(alone: Start) -> None:
    failing = """
from dynamo_core import BackendError
async def start(self, worker_id):
    raise BackendError.CannotConnect("no accelerator was found")
Parrot.start = start
"""
    engine = alone(script=parrot(main=failing + MAIN))

    assert engine.wait() == 1
    engine.end()
    assert engine.said == ["cleanup"]
    assert "not started: Backend(CannotConnect): no accelerator was found" in engine.lines[-1]
    assert "Traceback" not in engine.log


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            ["--disaggregation-mode", "both"],
            "unknown disaggregation mode 'both' (expected one of: agg, prefill, decode)",
        ),
        (["--request-plane", "pigeon"], "flag --request-plane: transport.use: there is no transport 'pigeon'"),
        (["--request-plane", "inproc", "--discovery-backend", "memory"], "inproc keeps everything in one process"),
        (["--discovery-backend", "memory"], "set discovery.use to one that all processes see"),
        (["--block-size", "none"], "flag --block-size: workers.mocker.engine.block_size: expected an integer"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml: cannot be read"),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        engine_main(MockerEngine, words)

    assert ended.value.code == 2
    said = capsys.readouterr().err
    [told] = [line for line in said.splitlines() if line.startswith("dynamo: ")]
    assert complaint in told
    assert "Traceback" not in said
