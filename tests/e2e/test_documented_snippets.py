"""What pages show of clients is run as it stands, against the config that the page names."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
CONFIG = (REPOSITORY / "examples" / "tools.yaml").read_text()
ADDRESS = "http://127.0.0.1:8000"


def section(page: str, heading: str) -> str:
    text = (REPOSITORY / "docs" / page).read_text()
    [found] = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return str(found)


def blocks(page: str, heading: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", section(page, heading), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Any:
    return serve_for_module(CONFIG)


@pytest.mark.parametrize(
    ("page", "heading", "said"),
    [
        ("how-to/tools-and-reasoning.md", "Try it", 'weather {"city": "Paris"}\nIt is sunny.\n'),
        ("reference/messages.md", "Try it", "I do not know.\n"),
        ("reference/responses.md", "Try it", "I do not know.\n"),
    ],
)
def test_the_lines_for_an_sdk_print_the_answer(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], page: str, heading: str, said: str
) -> None:
    [snippet] = blocks(page, heading, "python")
    program = tmp_path / "program.py"
    program.write_text(snippet.replace(ADDRESS, server.url))

    runpy.run_path(str(program))

    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("page", "heading", "said"),
    [
        ("how-to/tools-and-reasoning.md", "Try it", '"name":"weather"'),
        ("reference/messages.md", "Try it", '"text":"I do not know."'),
        ("reference/responses.md", "Try it", '"text":"I do not know."'),
    ],
)
def test_the_curl_command_of_the_page_is_answered(server: Any, page: str, heading: str, said: str) -> None:
    [command] = [text for text in blocks(page, heading, "console") if text.startswith("$ curl")]

    words = ["bash", "-c", command.removeprefix("$ ").replace(ADDRESS, server.url)]
    assert said in subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_example_of_tools_is_the_one_of_the_page() -> None:
    [shown] = blocks("how-to/tools-and-reasoning.md", "Try it", "yaml")

    assert shown.removeprefix("# file: examples/tools.yaml\n") == CONFIG
