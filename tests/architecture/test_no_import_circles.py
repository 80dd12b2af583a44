"""Modules of a distribution import each other in one direction, also inside functions and for type checkers."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    ROOT / "core" / "src",
    ROOT / "runtime" / "src",
    *sorted(ROOT.glob("libs/*/src")),
    *sorted(ROOT.glob("plugins/*/*/src")),
]


def import_graph(source: Path) -> dict[str, set[str]]:
    """Return the modules below a folder, each with those of them that it imports."""
    paths = {".".join(path.relative_to(source).with_suffix("").parts): path for path in source.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    return {name: set(imports_of(path, modules)) - {name} for name, path in modules.items()}


def imports_of(path: Path, modules: Collection[str]) -> Iterator[str]:
    """Yield those of the modules that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # A module that is imported from its package, else a name of the package itself.
            within = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in within]
        yield from (name for name in names if name in modules)


def circle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one circle; none if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.parent.relative_to(ROOT)))
def test_modules_have_no_import_circle(source: Path) -> None:
    assert circle_in(import_graph(source)) == []


def test_import_for_type_checkers_or_in_a_function_counts(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("if TYPE_CHECKING:\n    from other import Two\n")
    (tmp_path / "other.py").write_text("def two():\n    import one\n")

    assert set(circle_in(import_graph(tmp_path))) == {"one", "other"}
