"""Counts what a checkout is made of, beside another one where there is one.

``python -m tests.architecture.measures [CHECKOUT] [--against CHECKOUT] [--pairs]``

It reads the sources and imports none of them, so that it counts any commit. What is counted, and how:

- *Statements* are those of the syntax tree, without docstrings. Comments and blank lines are none.
- The *product* is core, runtime, libs and plugins as they ship, with the kits. *Tests* are theirs, and those across all
  of them.
- A *folder* holds the modules that lie in it, its ``__init__.py`` among them.
- *Words* of docs are those that are written by hand in the pages below ``docs``. The sections that `scripts.pages`
  makes from the code, which stand between ``<!-- made: NAME -->`` and ``<!-- end: NAME -->``, do not count.
- The *length* of a function goes from its `def` to its last line; its decorators and docstring do not count.
- A *pair* is two files that share six or more lines in a row, or one that repeats itself: `tests.architecture.repeats`.
- *Names* that plugins import are counted once per module that they come from; those that APIs have from the library of
  APIs are left out.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.architecture.repeats import Line, Pair, code_lines, pairs

ROOT = Path(__file__).parents[2]
#: What a checkout is made of.
PARTS = ("core", "runtime", "libs", "plugins", "tests")
#: Lines above which a function is long.
LONG = 60
#: A section of a page that is made from the code.
_MADE = re.compile(r"^<!-- made: (\S+) -->$.*?^<!-- end: \1 -->$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Function:
    """A function and its length."""

    lines: int
    name: str

    def __str__(self) -> str:
        return f"{self.lines} {self.name}"


@dataclass(frozen=True)
class Source:
    """A file of Python, by its path in the checkout: what is counted of it, without the tree, which is large."""

    path: Path
    lines: int
    statements: int
    functions: list[Function]
    #: Every module that is imported, with the name of it; also inside functions.
    imports: set[tuple[str, str]]
    code: list[Line]

    @property
    def module(self) -> str:
        """The name by which a file below `src` is imported."""
        parts = self.path.parts
        return ".".join(parts[parts.index("src") + 1 :]).removesuffix(".py").removesuffix(".__init__")


def read(path: Path, text: str) -> Source:
    """Count one file."""
    nodes = list(ast.walk(ast.parse(text)))
    return Source(
        path,
        lines=len(text.splitlines()),
        statements=sum(isinstance(node, ast.stmt) - (_docstring(node) > 0) for node in nodes),
        functions=[
            Function(_last(node) - node.lineno + 1 - _docstring(node), f"{path}:{node.lineno} {node.name}")
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ],
        imports={one for node in nodes for one in _imports(node)},
        code=list(code_lines(text, nodes)),
    )


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        yield from ((node.module or "", alias.name) for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)


def _docstring(node: ast.AST) -> int:
    """Return the lines of a docstring."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            return _last(first) - first.lineno + 1
    return 0


def _last(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


class Checkout:
    """The sources of a checkout, read once."""

    def __init__(self, root: Path) -> None:
        parts: dict[str, list[Source]] = defaultdict(list)
        for path in sorted(_files(root)):
            inside = path.relative_to(root)
            parts[_part(inside)].append(read(inside, path.read_text()))
        self.core, self.runtime, self.libs, self.plugins, self.tests = (parts[name] for name in PARTS)
        self.product = self.core + self.runtime + self.libs + self.plugins
        self._sources = self.product + self.tests + parts["elsewhere"]
        self.page_words = {
            page.relative_to(root): len(_MADE.sub("", page.read_text()).split())
            for page in sorted((root / "docs").rglob("*.md"))
        }
        self.words = sum(self.page_words.values())

    @cached_property
    def long_functions(self) -> list[Function]:
        return sorted(_long(self._sources), key=lambda function: -function.lines)

    @property
    def longest_function(self) -> Function:
        return max((one for source in self._sources for one in source.functions), key=lambda one: one.lines)

    @cached_property
    def pairs(self) -> list[Pair]:
        return pairs([(str(source.path), source.code) for source in self._sources])

    @property
    def folders(self) -> Counter[Path]:
        """How many modules lie in each folder of the product."""
        return Counter(source.path.parent for source in self.product)

    @property
    def plugin_sizes(self) -> Counter[Path]:
        """The statements of each plugin."""
        sizes: Counter[Path] = Counter()
        for source in self.plugins:
            sizes[Path(*source.path.parts[:3])] += source.statements
        return sizes

    def names_from(self, imported: Iterable[Source]) -> set[tuple[str, str]]:
        """Return the names that plugins import of these sources' top packages, each with the module it comes from."""
        tops = {source.module.partition(".")[0] for source in imported}
        names = {one for source in self.plugins for one in source.imports}
        return {(module, name) for module, name in names if module.partition(".")[0] in tops}


def _part(path: Path) -> str:
    match path.parts:
        case ["core" | "runtime" as part, "src", *_]:
            return part
        case ["libs", _, "src", *_]:
            return "libs"
        case ["plugins", _, _, "src", *_]:
            return "plugins"
        case (
            ["tests", *_]
            | ["core" | "runtime", "tests", *_]
            | ["libs", _, "tests", *_]
            | ["plugins", _, _, "tests", *_]
            | ["conftest.py"]
        ):
            return "tests"
    return "elsewhere"


def _files(root: Path) -> Iterator[Path]:
    """Yield the files of Python in a checkout, without what tools put there."""
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if not name.startswith(".") and name != "node_modules"]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _long(sources: Iterable[Source]) -> Iterator[Function]:
    return (one for source in sources for one in source.functions if one.lines > LONG)


def measures(checkout: Checkout) -> dict[str, int]:
    """Return every figure, by what it is of."""
    shared = [source for source in checkout.libs if "dynamo_generation" not in source.path.parts]
    of_core, of_libs = checkout.names_from(checkout.core), checkout.names_from(shared)
    groups = {
        "core": checkout.core,
        "runtime": checkout.runtime,
        "libs": checkout.libs,
        "plugins": checkout.plugins,
        "the product": checkout.product,
        "tests": checkout.tests,
    }
    return {
        **{f"statements of {name}": sum(one.statements for one in sources) for name, sources in groups.items()},
        "statements of the largest plugin": max(checkout.plugin_sizes.values(), default=0),
        "modules of the largest folder": max(checkout.folders.values(), default=0),
        "words of docs": checkout.words,
        "words of the longest page": max(checkout.page_words.values(), default=0),
        "lines of the longest function": checkout.longest_function.lines,
        "long functions": len(checkout.long_functions),
        "pairs of files that repeat": len(checkout.pairs),
        "pairs among tests": sum(_of_tests(pair.first) and _of_tests(pair.second) for pair in checkout.pairs),
        "names that plugins import from core": len(of_core),
        "names that plugins import from libs": len(of_libs),
    }


def _of_tests(path: str) -> bool:
    return "tests" in Path(path).parts


def table(now: dict[str, int], before: dict[str, int] | None) -> Iterator[str]:
    """Yield the figures in plain text, with the change in percent where there is something to compare with."""
    if before is not None:
        yield f"{'':<36}{'before':>10}{'now':>10}{'change':>10}"
    for name, figure in now.items():
        if before is None:
            yield f"{name:<36}{figure:>10,}"
        else:
            was = before[name]
            change = f"{(figure - was) / was:+.1%}" if was else ""
            yield f"{name:<36}{was:>10,}{figure:>10,}{change:>10}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts what a checkout is made of.")
    parser.add_argument("checkout", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="the checkout to compare with")
    parser.add_argument(
        "--pairs", action="store_true", help="list the pairs, long functions, largest folders and plugins"
    )
    args = parser.parse_args()
    checkout = Checkout(args.checkout)
    lines = list(table(measures(checkout), measures(Checkout(args.against)) if args.against else None))
    if args.pairs:
        lists: dict[str, Iterable[object]] = {
            "Pairs": checkout.pairs,
            f"Functions over {LONG} lines": checkout.long_functions,
            "Largest folders": [f"{path} ({count})" for path, count in checkout.folders.most_common(10)],
            "Largest plugins": [f"{path} ({count})" for path, count in checkout.plugin_sizes.most_common(5)],
        }
        for title, rows in lists.items():
            lines += ["", title, *map(str, rows)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
