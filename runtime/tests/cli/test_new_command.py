from __future__ import annotations

import errno
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest
from click.testing import Result
from dynamo_core.plugins.loader import CONTRACTS
from dynamo_runtime.cli.new import TEMPLATES, render

RunCli = Callable[..., Result]


class Site(Protocol):
    def install(self, distribution: str, entries: dict[str, str], modules: dict[str, str]) -> None: ...


EXAMPLE = Path(__file__).parents[3] / "examples" / "engine-echo"
#: Left behind by tools, not part of the package.
LITTER = {"__pycache__", ".pytest_cache", ".venv", "dist"}


#: The words of the command for each kind, and the skipped tests of its template: what the plugin does not claim to do.
KINDS = {
    "engine": (["engine"], 5),
    "router": (["router"], 6),
    "admission": (["admission"], 8),
    "transport": (["transport"], 21),
    "discovery": (["discovery"], 5),
    "frontend": (["frontend"], 2),
    "response_store": (["response_store"], 5),
    "extension": (["extension"], 1),
    "tool_parser": (["parser"], 0),
    "reasoning_parser": (["parser", "--reasoning"], 0),
}


def outcome_of_its_tests(folder: Path, *paths: Path) -> str:
    """Return the last line of pytest, run as the plugin's author would. The plugin need not be installed."""
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"],
        cwd=folder,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(map(str, [*paths, *sys.path])),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_ADDOPTS": "",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert tests.returncode == 0, tests.stdout + tests.stderr
    return tests.stdout.splitlines()[-1]


def test_every_kind_with_classes_has_a_template() -> None:
    assert set(TEMPLATES) == set(KINDS) == set(CONTRACTS)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "engine" else pytest.mark.full) for kind in KINDS],
)
def test_a_new_package_installs_and_passes_its_own_tests(
    dynamo: RunCli, site: Site, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, skipped = KINDS[kind]
    result = dynamo("new", *words, "far-away", "--path", tmp_path)
    package = tmp_path / f"dynamo-plugin-{kind.replace('_', '-')}-far-away"

    outcome = outcome_of_its_tests(package, package / "src")

    assert result.exit_code == 0
    found = re.match(r"(\d+) passed(?:, (\d+) skipped)? in", outcome)
    assert found is not None, outcome
    assert int(found[1]) > 7
    assert int(found[2] or 0) == skipped
    manifest = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    site.install(manifest["name"], manifest["entry-points"]["dynamo"], {})
    monkeypatch.syspath_prepend(str(package / "src"))
    checked = dynamo("check", package / "far-away.yaml")
    assert "The config is sound." in checked.output, checked.output
    listed = [line.split()[:2] for line in dynamo("plugins", package / "far-away.yaml").output.splitlines()]
    assert [kind, "far-away"] in listed


@pytest.mark.parametrize("kind", KINDS)
def test_new_plugin_of_one_file_can_be_served(dynamo: RunCli, tmp_path: Path, kind: str) -> None:
    words, _ = KINDS[kind]
    umask = os.umask(0o002)
    try:
        result = dynamo("new", *words, "far-away", "--single-file", "--path", tmp_path)
    finally:
        os.umask(umask)
    folder = tmp_path / "far-away"

    assert result.exit_code == 0
    assert {path.name for path in folder.iterdir()} == {
        "far_away.py",
        "far-away.yaml",
        "pytest.ini",
        "test_far_away.py",
    }
    checked = dynamo("check", folder / "far-away.yaml")
    assert "The config is sound." in checked.output, checked.output


# What the tests say of the plugin is the same as in a package.
@pytest.mark.full
@pytest.mark.parametrize("kind", ["engine", "tool_parser"])
def test_new_plugin_of_one_file_passes_its_own_tests(dynamo: RunCli, tmp_path: Path, kind: str) -> None:
    dynamo("new", *KINDS[kind][0], "far-away", "--single-file", "--path", tmp_path)

    assert " passed" in outcome_of_its_tests(tmp_path / "far-away")


@pytest.mark.parametrize("single_file", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_placeholder_of_the_template_is_left(kind: str, single_file: bool) -> None:
    for path, text in render(kind, "far-away", single_file=single_file).items():
        assert re.findall(r"@[a-z]+@|\.tmpl", f"{path} {text}") == []


def test_names_of_the_new_package_agree() -> None:
    files = {str(path): text for path, text in render("engine", "far-away").items()}

    assert 'name = "dynamo-plugin-engine-far-away"' in files["pyproject.toml"]
    assert 'engine-far-away = "dynamo_plugin_engine_far_away"' in files["pyproject.toml"]
    assert 'NAME = "far-away"' in files["src/dynamo_plugin_engine_far_away/engine.py"]
    assert "class FarAwayEngine(LLMEngine)" in files["src/dynamo_plugin_engine_far_away/engine.py"]
    assert "  far_away:" in files["far-away.yaml"]


def test_the_example_in_the_repository_equals_the_commands_output() -> None:
    kept = {
        path.relative_to(EXAMPLE).as_posix(): path.read_text()
        for path in EXAMPLE.rglob("*")
        if path.is_file() and LITTER.isdisjoint(path.parts)
    }

    assert kept == {str(path): text for path, text in render("engine", "echo", bin_folder="../../.venv/bin").items()}


def test_the_commands_that_are_shown_name_the_new_package_and_the_programs_in_full(
    dynamo: RunCli, tmp_path: Path
) -> None:
    output = dynamo("new", "engine", "far-away", "--path", tmp_path).output

    package = tmp_path / "dynamo-plugin-engine-far-away"
    programs = Path(sys.executable).parent
    commands = [shlex.split(line) for line in output.splitlines()[1:]]
    assert commands == [
        [str(programs / "python"), "-m", "pip", "install", "-e", f"{package}[test]"],
        [str(programs / "dynamo"), "serve", str(package / "far-away.yaml")],
        [str(programs / "python"), "-m", "pytest", str(package)],
        [str(programs / "dynamo"), "conformance", "engine", "far-away"],
    ]
    readme = (package / "README.md").read_text()
    assert f"\n{programs / 'dynamo'} serve far-away.yaml\n" in readme
    assert f"\n{programs / 'python'} -m pip install -e '.[test]'\n" in readme


def test_a_name_that_an_installed_engine_has_is_refused(dynamo: RunCli, tmp_path: Path) -> None:
    result = dynamo("new", "engine", "fake", "--path", tmp_path)

    assert result.exit_code == 2
    assert "there is an engine 'fake' already (acme-stages 1.2.3)" in result.stderr
    assert list(tmp_path.glob("dynamo-*")) == []


def test_a_name_is_taken_per_kind(dynamo: RunCli, tmp_path: Path) -> None:
    taken = dynamo("new", "router", "fake", "--path", tmp_path)

    assert "there is a router 'fake' already (acme-stages 1.2.3)" in taken.stderr
    assert dynamo("new", "parser", "fake", "--path", tmp_path).exit_code == 0


def test_a_single_file_plugin_prints_how_to_serve_and_test_it(dynamo: RunCli, tmp_path: Path) -> None:
    output = dynamo("new", "router", "far-away", "--single-file", "--path", tmp_path).output

    programs, folder = Path(sys.executable).parent, tmp_path / "far-away"
    assert [shlex.split(line) for line in output.splitlines()[1:]] == [
        [str(programs / "dynamo"), "serve", str(folder / "far-away.yaml")],
        [str(programs / "python"), "-m", "pytest", str(folder)],
        [str(programs / "dynamo"), "conformance", "router", f"{folder / 'far_away.py'}:FarAwayRouter"],
    ]


def test_help_lists_the_allowed_names(dynamo: RunCli) -> None:
    assert "small letters and digits" in " ".join(dynamo("new", "engine", "--help").output.split())


@pytest.mark.parametrize("name", ["Echo", "echo_two", "-echo", "echo-", "2echo", "e--o", "../echo", "é"])
def test_a_name_that_cannot_be_a_plugins_is_refused(dynamo: RunCli, tmp_path: Path, name: str) -> None:
    result = dynamo("new", "engine", "--path", tmp_path, "--", name)

    assert result.exit_code == 2
    assert "cannot be the name of a plugin" in result.stderr


def test_existing_files_are_not_overwritten(dynamo: RunCli, tmp_path: Path) -> None:
    dynamo("new", "engine", "far-away", "--path", tmp_path)
    kept = tmp_path / "dynamo-plugin-engine-far-away" / "README.md"
    kept.write_text("mine")

    result = dynamo("new", "engine", "far-away", "--path", tmp_path)

    assert result.exit_code == 2
    assert "is there already" in result.stderr
    assert kept.read_text() == "mine"


def test_a_package_that_cannot_be_written_whole_leaves_nothing(
    dynamo: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text
    written: list[Path] = []

    def full_disk(file: Path, *args: str) -> int:
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(file)
        return write(file, *args)

    monkeypatch.setattr(Path, "write_text", full_disk)

    result = dynamo("new", "engine", "far-away", "--path", tmp_path / "new")

    package = tmp_path / "new" / "dynamo-plugin-engine-far-away"
    assert (result.exit_code, result.stderr) == (2, f"dynamo: cannot write {package}: No space left on device\n")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_one_line(dynamo: RunCli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    result = dynamo("new", "engine", "far-away", "--path", tmp_path / "file" / "below")

    assert result.exit_code == 2
    assert "cannot write" in result.stderr
