"""Command lines that programs and pages of this project give: each does what it says."""

from __future__ import annotations

import shlex
import subprocess
import sys

from click.testing import CliRunner
from dynamo_runtime.cli.main import cli
from dynamo_runtime.cli.new import render


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dynamo_runtime", "--help"], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout == CliRunner().invoke(cli, ["--help"], prog_name="dynamo").output


def test_a_new_frontend_is_told_how_its_kit_words_a_request() -> None:
    [readme] = [text for path, text in render("frontend", "mine").items() if path.name == "README.md"]

    [line] = [line for line in readme.replace("\\\n", "").splitlines() if "conformance" in line]
    words = shlex.split(line)
    assert words[words.index("--request") + 1].startswith("POST /generate {")
