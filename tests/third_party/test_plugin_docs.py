"""Holds `docs/write-a-plugin.md` to what the code does."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from dynamo_core.cli.main import cli
from dynamo_core.contracts.plugin import KINDS
from dynamo_core.hookspecs import lifecycle, register, requests
from dynamo_core.plugins.loader import CONTRACTS, PluginLoader

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "write-a-plugin.md").read_text()

HOOKS = {
    name: list(inspect.signature(function).parameters)
    for area in (register, lifecycle, requests)
    for name, function in vars(area).items()
    if name.startswith("dynamo_")
}


def table_rows(name: str) -> list[str]:
    return [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]


def files() -> dict[str, str]:
    """The snippets that are whole files, by path."""
    blocks = re.findall(r"```\w+\n# file: (\S+)\n(.*?)```", PAGE, re.DOTALL)
    return dict(blocks)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_row_with_every_parameter(hook: str) -> None:
    [row] = table_rows(hook)

    for parameter in HOOKS[hook]:
        assert f"`{parameter}`" in row


def test_no_hook_is_described_that_is_not_there() -> None:
    assert set(re.findall(r"dynamo_(?:register|engine|instance|request)_\w+", PAGE)) == set(HOOKS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_row_with_its_class_hook_and_required_methods(kind: str) -> None:
    [row] = table_rows(kind)

    if kind in CONTRACTS:
        contract = CONTRACTS[kind]
        required = set(re.findall(r"`(\w+)`", row.split("|")[-2]))
        assert f"`{contract.class_name}`" in row
        assert f"`{contract.hook}`" in row
        assert required == getattr(contract.load(), "__abstractmethods__")  # noqa: B009 - unknown to type checkers


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of the page on disk, installed as their manifest says."""
    for name, text in files().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    manifest = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    entries = manifest["entry-points"]["dynamo"] | {"hook-counter": "dynamo_plugin_hook_counter"}
    info = tmp_path / "src" / f"{manifest['name'].replace('-', '_')}-{manifest['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {manifest['name']}\nVersion: {manifest['version']}\n")
    lines = [f"{name} = {module}" for name, module in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[dynamo]", *lines, ""]))
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    yield tmp_path
    for name in ("dynamo_plugin_engine_hello", "dynamo_plugin_hook_counter"):
        sys.modules.pop(name, None)


def dynamo(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="dynamo", catch_exceptions=False)


def test_the_line_that_proves_the_tutorials_plugin_is_loaded_is_the_one_shown(tutorial: Path) -> None:
    shown = re.search(r"The list has the line `(.*?)`", PAGE)

    output = dynamo("plugins", tutorial / "hello.yaml").output

    assert shown is not None
    assert shown[1].split() in [line.split() for line in output.splitlines()]


def test_the_tutorials_config_picks_its_engine(tutorial: Path) -> None:
    result = dynamo("config", "show", tutorial / "hello.yaml", "--set", "workers.hello.engine.delay=0.1")

    assert ["workers.hello.engine.use", '"hello"'] in [line.split() for line in result.output.splitlines()]
    assert result.exit_code == 0


def test_the_listening_plugin_of_the_page_counts_requests(tutorial: Path) -> None:
    class Record:
        status = "success"

    loader = PluginLoader()

    loader.listen("counter")
    loader.hooks.announce("dynamo_request_finished", record=Record())

    assert sys.modules["dynamo_plugin_hook_counter"].finished == {"success": 1, "error": 0}
