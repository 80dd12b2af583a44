"""The README of the parsers names every parser that the distribution offers, and no other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARSERS = ROOT / "plugins/parsers/standard"
PAGE = PARSERS / "README.md"


def offered(kind: str) -> set[str]:
    manifest = tomllib.loads((PARSERS / "pyproject.toml").read_text())
    names = {name.partition("-") for name in manifest["project"]["entry-points"]["dynamo"]}
    return {name for found, _, name in names if found == kind} - {"auto"}


def in_table(page: Path, heading: str) -> set[str]:
    """Return the names in the first column of the table with this heading."""
    _, _, rest = page.read_text().partition(f"| `{heading}` |")
    rows = rest.split("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall("`([^`]+)`", row.split("|")[1])}


@pytest.mark.parametrize("kind", ["tool_parser", "reasoning_parser"])
def test_the_readme_has_every_parser(kind: str) -> None:
    heading = "tool_call_parser" if kind == "tool_parser" else kind

    assert in_table(PAGE, heading) == offered(kind)
