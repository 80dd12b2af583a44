"""Transports import from `dynamo_wire` and `dynamo_wire.brokered` only, and every name there is one that they need."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import dynamo_wire
import dynamo_wire.brokered

ROOT = Path(__file__).parents[3]
PUBLIC = {"dynamo_wire": dynamo_wire, "dynamo_wire.brokered": dynamo_wire.brokered}
#: Names that only tests of transports need.
FOR_TESTS = {"ROWS_TAG"}


@cache
def imported() -> dict[str, set[str]]:
    """Return the names that plugins import, by module of this library."""
    found: dict[str, set[str]] = {}
    for path in ROOT.glob("plugins/*/*/src/**/*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "dynamo_wire" in text else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "dynamo_wire":
                found.setdefault(node.module or "", set()).update(alias.name for alias in node.names)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    assert alias.name.partition(".")[0] != "dynamo_wire", path
    return found


def test_plugins_import_from_the_two_public_packages_only() -> None:
    assert set(imported()) == set(PUBLIC)


def test_the_public_names_are_those_that_transports_use() -> None:
    used = imported()

    for name, module in PUBLIC.items():
        assert set(module.__all__) - FOR_TESTS == used[name] - FOR_TESTS, name
        assert all(hasattr(module, exported) for exported in module.__all__), name
