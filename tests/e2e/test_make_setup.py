"""`make serve` in a tree that has not been set up, with a stand-in for Python that downloads nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Does what make asks of Python: it is one, makes an environment of itself, and installs as pip tells of it.
PYTHON = """#!/bin/bash
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && printf '#!/bin/sh\\necho served\\n' > "$3/bin/dynamo" &&
    chmod +x "$3/bin/dynamo" ;;
  *" install "*hatchling*)
    [ -z "$FAILS" ] || { echo "ERROR: no network" >&2; exit 1; }
    echo "Collecting hatchling==1.0 (from x)" ;;
  *" install "*" -r "*)
    grep -q '^-e ./core$' "${@: -1}" || exit 1
    echo "Obtaining file:///somewhere/core (from -r x)"
    echo "  Installing build dependencies: started"
    echo "Collecting aiohttp<4,>=3 (from dynamo-http==0.1.0)"
    echo "Requirement already satisfied: idna in somewhere"
    echo "Installing collected packages: aiohttp, dynamo-core" ;;
esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "pyproject.toml").write_text("")
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make_serve(tree: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", "serve", f"PYTHON={tree}/python"],
        cwd=tree,
        env={"PATH": os.environ["PATH"]} | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_first_time_every_package_is_named_as_it_comes_and_then_it_serves(tree: Path) -> None:
    first, second = make_serve(tree), make_serve(tree)

    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines() == [
        "setting up .venv: a minute or two the first time …",
        "  hatchling==1.0",
        "  core",
        "  aiohttp<4,>=3",
        "  installing all of these …",
        "served",
    ]
    assert second.stdout == "served\n"


def test_a_failed_setup_leaves_no_stamp(tree: Path) -> None:
    failed, again = make_serve(tree, FAILS="yes"), make_serve(tree)

    assert failed.returncode == 2
    assert "ERROR: no network" in failed.stderr
    assert "  hatchling==1.0" in again.stdout
    assert again.stdout.endswith("served\n")
