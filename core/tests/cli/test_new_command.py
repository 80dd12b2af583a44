from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from dynamo_core.cli.new import render

RunCli = Callable[..., Result]

EXAMPLE = Path(__file__).parents[3] / "examples" / "engine-echo"
#: Left behind by tools, not part of the package.
LITTER = {"__pycache__", ".pytest_cache", ".venv", "dist"}


def test_a_new_engine_passes_its_own_tests(dynamo: RunCli, tmp_path: Path) -> None:
    result = dynamo("new", "engine", "far-away", "--path", tmp_path)
    package = tmp_path / "dynamo-plugin-engine-far-away"
    paths = os.pathsep.join([str(package / "src"), *sys.path])

    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"],
        cwd=package,
        env=os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert result.exit_code == 0
    assert tests.returncode == 0, tests.stdout + tests.stderr
    assert "20 passed, 4 skipped" in tests.stdout


def test_nothing_of_the_template_is_left_unfilled() -> None:
    for path, text in render("engine", "far-away").items():
        for word in ("@name@", "@module@", "@class@", "@distribution@", "@worker@", "@core@", ".tmpl"):
            assert word not in text
            assert word not in str(path)


def test_names_of_the_new_package_agree() -> None:
    files = {str(path): text for path, text in render("engine", "far-away").items()}

    assert 'name = "dynamo-plugin-engine-far-away"' in files["pyproject.toml"]
    assert 'engine-far-away = "dynamo_plugin_engine_far_away"' in files["pyproject.toml"]
    assert 'NAME = "far-away"' in files["src/dynamo_plugin_engine_far_away/engine.py"]
    assert "class FarAwayEngine(LLMEngine)" in files["src/dynamo_plugin_engine_far_away/engine.py"]
    assert "  far_away:" in files["far-away.yaml"]


def test_the_example_in_the_repository_is_what_the_command_writes() -> None:
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
    ]
    readme = (package / "README.md").read_text()
    assert f"\n{programs / 'dynamo'} serve far-away.yaml\n" in readme
    assert f"\n{programs / 'python'} -m pip install -e '.[test]'\n" in readme


def test_a_name_that_an_installed_engine_has_is_refused(dynamo: RunCli, tmp_path: Path) -> None:
    result = dynamo("new", "engine", "fake", "--path", tmp_path)

    assert result.exit_code == 2
    assert "there is an engine 'fake' already (acme-stages 1.2.3)" in result.stderr
    assert list(tmp_path.glob("dynamo-*")) == []


def test_help_says_which_names_are_allowed(dynamo: RunCli) -> None:
    assert "small letters and digits" in " ".join(dynamo("new", "engine", "--help").output.split())


@pytest.mark.parametrize("name", ["Echo", "echo_two", "-echo", "echo-", "2echo", "e--o", "../echo", "é"])
def test_a_name_that_cannot_be_a_plugins_is_refused(dynamo: RunCli, tmp_path: Path, name: str) -> None:
    result = dynamo("new", "engine", "--path", tmp_path, "--", name)

    assert result.exit_code == 2
    assert "cannot be the name of a plugin" in result.stderr


def test_what_is_there_is_not_overwritten(dynamo: RunCli, tmp_path: Path) -> None:
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
