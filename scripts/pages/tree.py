"""The section of docs/architecture.md on the tree: packages and modules with the first sentence about them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.pages.tables import code, table

ROOT = Path(__file__).parents[2]


def _summary(module: Path) -> str:
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].replace("``", "`").split())


def _rows() -> Iterator[tuple[str, str]]:
    for pattern in ("core/src/*", "runtime/src/*", "libs/*/src/*"):
        for top in sorted(ROOT.glob(f"{pattern}/__init__.py")):
            package = top.parent
            yield f"{code(package.parents[1].relative_to(ROOT))}: {code(package.name)}", _summary(top)
            # The folders of kits hold their checks; that of core has few modules, and each is public.
            parts = [init.parent for init in package.glob("**/*/__init__.py") if package.name != "dynamo_testing"]
            modules = package.glob("*.py") if package.name == "dynamo_core" else ()
            for part in sorted([*parts, *modules]):
                if part not in (package, top):
                    inside = part / "__init__.py" if part.is_dir() else part
                    yield f"… {code(part.relative_to(package))}", _summary(inside)


def _tree() -> str:
    return table(("Folder", "Purpose"), _rows())


SECTIONS: dict[str, Callable[[], str]] = {"tree": _tree}
