"""`dynamo conformance engine` over engines that are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

import pytest
from click.testing import CliRunner
from dynamo_runtime.cli.main import cli
from dynamo_testing.command import VALIDATOR

RUN = """
import sys
from dynamo_runtime.cli.main import main
from dynamo_testing import command
command.FAREWELL = 0.5
try:
    main()
finally:
    loaded = {"pytest", "hypothesis", "_pytest"} & set(sys.modules)
    assert not loaded, loaded
"""

ENGINES = """
import asyncio
import time

from dynamo_core import (
    DisaggregationMode, EngineConfig, LLMEngine, LLMEngineOutput, PluginConfig, PrefillResult, chunk, hookimpl
)
from dynamo_core.errors import BackendError, ConfigError
from pydantic import Field

DYNAMO_API = 1


class Settings(PluginConfig):
    fault: str = Field(default="", description="What is wrong with it.")


class Sound(LLMEngine):
    NAME = "sound"
    Config = Settings

    async def start(self, worker_id):
        fault = self.config.fault
        if fault == "settings":
            raise ConfigError("fault: 'settings' is no fault that there is")
        if fault == "start":
            raise BackendError.CannotConnect("no accelerator")
        if fault == "block":
            time.sleep(600)
        if fault == "linger":
            self.task = asyncio.ensure_future(self.linger())
        return EngineConfig(model=self.worker.model_name)

    async def linger(self):
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass

    async def generate(self, request, ctx):
        if self.worker.disaggregation_mode is DisaggregationMode.DECODE:
            if request.prefill_result.disaggregated_params != {"room": len(request.token_ids)}:
                raise BackendError.InvalidArgument("prefill_result: not mine")
        for token in range(request.stop_conditions.max_tokens or 4):
            if ctx.is_stopped() and self.config.fault != "cancel":
                break
            yield chunk.token(token % 256)
        stopped = ctx.is_stopped() and self.config.fault != "cancel"
        last = LLMEngineOutput.cancelled() if stopped else LLMEngineOutput.length()
        if self.worker.disaggregation_mode is DisaggregationMode.PREFILL:
            last.disaggregated_params = {"room": len(request.token_ids)}
        yield last
        if self.config.fault == "more":
            yield chunk.token(7)

    async def cleanup(self):
        pass


@hookimpl
def dynamo_register_engines():
    return [Sound]
"""

Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]


class Site(Protocol):
    folder: Path

    def install(self, distribution: str, entries: Mapping[str, str], modules: Mapping[str, str]) -> None: ...


@pytest.fixture
def engines(site: Site) -> Path:
    """Install the engine ``sound``, and return the folder that it is in."""
    site.install("acme-engines", {"engine-sound": "fake_engines"}, {"fake_engines": ENGINES})
    return site.folder


@pytest.fixture
def run(engines: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process."""
    monkeypatch.setenv(VALIDATOR, "1")

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        done = CliRunner().invoke(cli, ["conformance", "engine", *map(str, words)], prog_name="dynamo")
        return subprocess.CompletedProcess(list(map(str, words)), done.exit_code, done.stdout, done.stderr)

    return run


@pytest.fixture
def run_process(engines: Path) -> Run:
    """Run the command in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "PYTEST"))}

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", RUN, "conformance", "engine", *map(str, words)],
            env=kept | {"PYTHONPATH": os.pathsep.join([str(engines), *sys.path])},
            capture_output=True,
            text=True,
            timeout=45,
            check=False,
        )

    return run


def test_a_sound_engine_has_a_line_per_check_and_exit_code_0_without_pytest(run_process: Run) -> None:
    done = run_process("sound")

    assert done.returncode == 0, done.stdout + done.stderr
    head, *lines, last = done.stdout.splitlines()
    assert head == "engine sound (acme-engines 1.2.3), mode agg"
    assert {line.split()[0] for line in lines} == {"ok", "skipped"}
    assert [line.split()[1] for line in lines[:4]] == ["start", "metrics", "kv_event_sources", "load_sources"]
    assert last.startswith("The engine keeps its contract: 16 checks ok, 5 skipped, in ")
    assert done.stderr == ""


@pytest.mark.parametrize(("fault", "name"), [("start", "StartFailed"), ("cancel", "CancellationIgnored")])
def test_a_broken_engine_report_has_failure_contract_and_remedy(run: Run, fault: str, name: str) -> None:
    done = run("sound", "--set", f"fault={fault}")

    assert done.returncode == 1
    *_, seen, check, contract, remedy, last = done.stdout.splitlines()
    assert seen.startswith(f"FAILED   {name}: ")
    assert check.strip().startswith("the check: ")
    assert contract.strip().startswith("the contract: ")
    assert remedy.strip().startswith("what to do: ")
    assert last.startswith("The engine does not keep its contract: ")
    assert done.stderr == ""


def test_the_json_report_is_one_object(run: Run) -> None:
    sound = run("sound", "--json", "--model-name", "m", "--mode", "PREFILL")
    broken = run("sound", "--json", "--set", "fault=more")

    assert sound.returncode == 0
    report = json.loads(sound.stdout)
    about = {key: report[key] for key in ("name", "distribution", "version", "engine", "mode", "model", "passed")}
    assert about == {
        "name": "sound",
        "distribution": "acme-engines",
        "version": "1.2.3",
        "engine": "Sound",
        "mode": "prefill",
        "model": "m",
        "passed": True,
    }
    assert {check["outcome"] for check in report["checks"]} == {"ok", "skipped"}
    assert broken.returncode == 1
    *sound_checks, failed = json.loads(broken.stdout)["checks"]
    assert {check["outcome"] for check in sound_checks} == {"ok"}
    assert failed["outcome"] == "failed"
    assert failed["check"] == "generate"
    assert failed["failure"] == "ChunkAfterTerminal"
    assert failed["seen"].startswith(
        "an item with tokens [7] came after the terminal item 'length' (fake_engines.py, line "
    )
    assert failed["contract"]
    assert failed["remedy"]


def test_a_decode_engine_gets_the_prefill_result_of_the_options(run: Run) -> None:
    bare = run("sound", "--mode", "decode")
    given = run("sound", "--mode", "decode", "--prefill-result", '{"disaggregated_params": {"room": 3}}')
    beside = run("sound", "--mode", "decode", "--with-prefill", "--token-ids", "5,6")

    assert bare.returncode == 1
    assert "GenerateFailed: generate raised Backend(InvalidArgument): prefill_result: not mine" in bare.stdout
    assert given.returncode == 0, given.stdout
    assert beside.returncode == 0, beside.stdout


def test_a_blocked_event_loop_ends_the_run_with_its_line(run_process: Run) -> None:
    done = run_process("sound", "--set", "fault=block", "--start-timeout", 0.5)

    assert done.returncode == 1
    assert "FAILED   StartFailed: the event loop was blocked for " in done.stdout
    assert "(fake_engines.py, line " in done.stdout
    assert "in start)" in done.stdout
    assert "The engine does not keep its contract" in done.stdout


def test_a_task_that_the_engine_leaves_running_does_not_keep_the_command(run_process: Run) -> None:
    done = run_process("sound", "--set", "fault=linger")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "The engine keeps its contract" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["soumd"], "did you mean 'sound'?"),
        (["sound", "--set", "falt=x"], "--set falt=x: unknown key of engine 'sound'; did you mean 'fault'?"),
        (["sound", "--set", "fault"], "expected KEY=VALUE"),
        (["sound", "--set", "fault=settings"], "fault: 'settings' is no fault that there is"),
        (["sound", "--mode", "encode"], "--mode: there is no role 'encode': it is one of agg, prefill, decode"),
        (["sound", "--model-path", "/no/such/folder"], "/no/such/folder does not exist"),
        (["sound", "--token-ids", "1,x"], "--token-ids: expected numbers divided by commas"),
        (["sound", "--with-prefill"], "are for --mode decode"),
        (["sound", "--mode", "decode", "--with-prefill", "--prefill-result", "{}"], "exclude each other"),
        (["sound", "--mode", "decode", "--prefill-result", "{}"], "--prefill-result: is not what a decode engine"),
    ],
)
def test_an_unusable_engine_is_one_line_and_exit_code_2(run: Run, words: list[str], said: str) -> None:
    done = run(*words)

    assert done.returncode == 2
    assert done.stderr.startswith("dynamo: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
