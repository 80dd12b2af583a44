"""Holds `tests/promises/backend-common.md` to the tree: every test that it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "tests" / "promises" / "backend-common.md").read_text()
ROWS = [
    line
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| Promise", "| `BackendError.` "))
]
NAMED = re.compile(r"`(test_\w+\.py)::(\w+)`")


def names_in(file: str) -> set[str]:
    """The functions and classes of a test file, which is found by its name: no two have the same."""
    [path] = [
        found
        for top in ("core/tests", "runtime/tests", "libs", "plugins", "tests")
        for found in (REPOSITORY / top).rglob(file)
    ]
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in nodes if isinstance(node, kinds) and node.name.lower().startswith("test")}


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED.findall(PAGE)}))
def test_every_test_that_is_named_exists(file: str) -> None:
    named = {test for named_file, test in NAMED.findall(PAGE) if named_file == file}

    assert named <= names_in(file)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_promise_names_what_shows_it(row: str) -> None:
    shown = row.split(" | ", 1)[1]

    assert NAMED.search(shown) or re.search(r"`python -m |\]\(", shown)
