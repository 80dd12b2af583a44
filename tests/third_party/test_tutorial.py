"""Follows `docs/tutorials/write-a-plugin.md`: its three files, its config, its commands, and what they print."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.asking import dynamo
from tests.e2e.conftest import Server

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "write-a-plugin.md").read_text()
FILES = dict(re.findall(r"^```python\n# file: (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
CONFIGS = re.findall(r"^```yaml\n# (?:file|add): serve.yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
KITS = re.findall(r"^dynamo (conformance .*)$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the files of the page, which their owner alone may write, whatever the umask is."""
    folder = tmp_path_factory.mktemp("tutorial")
    for name, text in FILES.items() | {("serve.yaml", "".join(CONFIGS))}:
        path = folder / name
        path.write_text(text)
        path.chmod(0o644)
    return folder


def output_after(command: str) -> str:
    """Return what the page shows below a command."""
    return PAGE.split(f"```sh\n{command}```\n\n```")[1].split("\n", 1)[1].split("```")[0]


def test_the_page_has_three_files_of_less_than_sixty_lines() -> None:
    assert list(FILES) == ["sticky.py", "per_minute.py", "ledger.py"]
    assert {name: len(text.splitlines()) for name, text in FILES.items() if len(text.splitlines()) >= 60} == {}


@pytest.mark.parametrize("name", FILES)
def test_files_of_the_tutorial_import_only_dynamo_core(name: str) -> None:
    modules = {node.module for node in ast.walk(ast.parse(FILES[name])) if isinstance(node, ast.ImportFrom)}

    assert {module for module in modules if module and module.startswith("dynamo")} == {"dynamo_core"}


@pytest.mark.parametrize("chapters", range(1, len(CONFIGS) + 1))
def test_the_config_of_each_chapter_is_sound(folder: Path, monkeypatch: pytest.MonkeyPatch, chapters: int) -> None:
    config = folder / f"chapter{chapters}.yaml"
    config.write_text("".join(CONFIGS[:chapters]))
    config.chmod(0o644)

    monkeypatch.chdir(folder)

    checked = dynamo("check", config.name)

    assert (checked.exit_code, "The config is sound." in checked.stdout) == (0, True), checked.stderr


@pytest.mark.parametrize("command", KITS, ids=lambda command: command.split()[1])
def test_each_plugin_keeps_its_contract(folder: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(folder)

    ran = dynamo(*command.split())

    shown = output_after(f"dynamo {command}\n").split("…")[0]
    assert (ran.exit_code, shown in ran.stdout) == (0, True), ran.stdout + ran.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_commands_of_the_page_give_its_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    loop, fifth, totals = (command for command in COMMANDS if "curl" in command)
    server = Server(None, folder, "--config", "serve.yaml")
    try:
        answers = said(server, loop).splitlines()
        refused = said(server, fifth)
        status, headers, _ = server.request("POST", "/v1/completions", {"model": "mock-model", "prompt": "Hello"})
        expected = json.loads(output_after(totals))[0] | {"requests": 6, "seconds": None}
        assert server.until(lambda: total(server, totals)["requests"] >= 6, 10), server.log
        found = total(server, totals)
    finally:
        server.end()

    assert answers in (output_after(loop).splitlines(), ["I am right", "I am left"] * 2)
    assert refused.replace("\r", "") == output_after(fifth)
    assert (status, 0 < int(headers["retry-after"]) <= 60) == (429, True)
    assert found | {"seconds": None} == expected
    assert found["seconds"] > 0


def total(server: Server, command: str) -> dict[str, Any]:
    [row] = json.loads(said(server, command))
    return dict(row)


def said(server: Server, command: str) -> str:
    """Return what a command of the page prints, sent to the port of this server."""
    words = ["bash", "-c", command.replace("http://127.0.0.1:8000", server.url)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
