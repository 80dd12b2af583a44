"""`dynamo conformance KIND NAME`, run as a process, for the kinds whose kits are classes of tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from dynamo_runtime.cli.main import cli

BROKEN = '''
import asyncio

from dynamo_core import Extension, HttpRoute, PluginConfig, Route, Router, Transport

DYNAMO_API = 1


class Settings(PluginConfig):
    share: float = 0.5


class First(Router):
    """Chooses the first worker, busy or not."""

    NAME = "first"
    Config = Settings

    async def route(self, request, pool):
        return Route(next(iter(pool.instances.values())))


class Waiting(Transport):
    """Waits for a server that is not there."""

    NAME = "waiting"
    serve = call = events = None

    async def start(self):
        self.wait_for("nothing answers at 127.0.0.1:1")
        await asyncio.Event().wait()

    async def aclose(self):
        pass


class Open(Extension):
    """Serves a route that asks for nothing."""

    NAME = "open"

    def routes(self):
        return [HttpRoute("GET", "/open", self.show, "Nothing.", guarded=False)]

    async def show(self, http):
        from aiohttp import web

        return web.Response()
'''

COMPLETION = 'POST /v1/completions {"model": "MODEL", "prompt": "PROMPT"%s}'
SOUND = {
    "router": ["router", "round-robin"],
    "admission": ["admission", "token-capacity"],
    "transport": ["transport", "inproc"],
    "discovery": ["discovery", "memory"],
    "tool_parser": ["parser", "hermes"],
    "reasoning_parser": ["parser", "qwen3", "--reasoning"],
    "frontend": [
        "frontend",
        "openai",
        "--request",
        COMPLETION % "",
        "--streaming-request",
        COMPLETION % ', "stream": true',
    ],
}


def conformance(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Return the command, run in a folder whose own settings of pytest must not matter."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    return subprocess.run(
        [sys.executable, "-m", "dynamo_runtime.cli.main", "conformance", *words],
        cwd=folder,
        env=os.environ | {"PYTEST_ADDOPTS": "--no-such-option"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with broken plugins in one file."""
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    path.chmod(0o644)
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize("kind", SOUND)
def test_a_plugin_that_is_installed_keeps_its_contract(tmp_path: Path, kind: str) -> None:
    result = conformance(tmp_path, *SOUND[kind])

    first, *checks, last = result.stdout.splitlines()
    assert result.returncode == 0, result.stdout + result.stderr
    assert first.startswith(f"{kind.replace('_', ' ')} {SOUND[kind][1]} (dynamo-plugin-")
    found = re.match(rf"The {kind.replace('_', ' ')} keeps its contract: (\d+) checks ok(, \d+ skipped)?, in", last)
    assert found is not None, last
    assert int(found[1]) == sum(line.startswith("ok ") for line in checks) > 4


def test_a_broken_plugin_is_reported_check_by_check(folder: Path) -> None:
    result = conformance(folder, "router", "./broken.py:First", "--set", "share=0.25")

    assert result.returncode == 1, result.stdout + result.stderr
    assert f"router ./broken.py:First ({folder / 'broken.py'})\n" in result.stdout
    lines = result.stdout.splitlines()
    assert "ok       a worker of the pool is chosen" in lines
    assert any(line.startswith("skipped  the worker that a request names is chosen") for line in lines)
    failed = lines.index("FAILED   busy workers are left out")
    assert "{1} == {2}" in lines[failed + 1]
    assert re.fullmatch(r"The router does not keep its contract: \d+ of \d+ checks failed\.", lines[-1])


@pytest.mark.full
def test_an_extension_keeps_its_contract_if_the_routes_for_all_are_meant_to_be(folder: Path) -> None:
    secretly = conformance(folder, "extension", "./broken.py:Open")
    openly = conformance(folder, "extension", "./broken.py:Open", "--kit", 'UNGUARDED=["GET /open"]')

    assert "FAILED   routes without a guard are meant to have none" in secretly.stdout.splitlines(), secretly.stdout
    assert (secretly.returncode, openly.returncode) == (1, 0), openly.stdout + openly.stderr


def test_the_result_is_data_if_asked_and_the_kit_knows_what_its_harness_can_do(folder: Path) -> None:
    result = json.loads(conformance(folder, "router", "./broken.py:First", "--json", "--kit", "CAN_PIN=true").stdout)

    outcomes = {check["check"]: check["outcome"] for check in result["checks"]}
    assert (result["kind"], result["passed"]) == ("router", False)
    assert outcomes["busy workers are left out"] == "failed"
    assert outcomes["the worker that a request names is chosen"] == "failed"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["router", "no-such-router"], "there is no router 'no-such-router'"),
        (["router", "./gone.py:First"], "cannot be read: No such file or directory"),
        (["router", "./broken.py:First", "--set", "share=much"], "--set share=much: expected a number"),
        (["router", "./broken.py:First", "--set", "sahre=1"], "unknown key of router './broken.py:First'"),
        (["router", "./broken.py:First", "--kit", "can_pin=true"], "expected ATTRIBUTE=VALUE, such as"),
        (
            ["transport", "./broken.py:Waiting", "--start-timeout", "0.2"],
            "transport './broken.py:Waiting' did not start within 0.2 s: nothing answers at 127.0.0.1:1; if it needs",
        ),
    ],
)
def test_an_unusable_plugin_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], reason: str
) -> None:
    monkeypatch.chdir(folder)

    result = CliRunner().invoke(cli, ["conformance", *words])

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("dynamo: ")
    assert reason in result.stderr
