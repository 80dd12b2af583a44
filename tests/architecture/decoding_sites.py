"""Finds every place of core and the plugins that decodes something, by reading their sources."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: What makes a value of bytes or texts, by its full name; also without being called, as an alias may be.
DECODERS = frozenset(
    {
        "ast.literal_eval",
        "ast.parse",
        "base64.b64decode",
        "dynamo_core.protocol.read_json",
        "dynamo_core.protocol.decoding.read_json",
        "json.JSONDecoder",
        "json.load",
        "json.loads",
        "msgspec.convert",
        "msgspec.json.Decoder",
        "msgspec.json.decode",
        "msgspec.msgpack.Decoder",
        "msgspec.msgpack.decode",
        "msgspec.toml.decode",
        "msgspec.yaml.decode",
        "tomllib.load",
        "tomllib.loads",
        "yaml.SafeLoader",
        "yaml.safe_load",
    }
)
#: Methods that decode, whatever has them: answers of HTTP clients, and models of pydantic.
METHODS = frozenset({"model_validate_json", "json"})


def sources() -> Iterator[Path]:
    """Yield the modules that ship, and of those that plugin authors test with the command."""
    for folder in (
        ROOT / "core" / "src",
        ROOT / "runtime" / "src",
        *sorted(ROOT.glob("libs/*/src")),
        *sorted(ROOT.glob("plugins/*/*/src")),
    ):
        for path in sorted(folder.rglob("*.py")):
            if "testing" not in path.relative_to(ROOT).parts or path.name == "command.py":
                yield path


def sites() -> list[str]:
    """Return each place as ``module:scope decoder``, numbered where a scope has several."""
    return [site for path in sources() for site in sites_of(path.read_text(), module_of(path))]


def module_of(path: Path) -> str:
    """Return the name by which a source file is imported."""
    parts = path.relative_to(ROOT).parts
    return ".".join(parts[parts.index("src") + 1 :]).removesuffix(".py").removesuffix(".__init__")


def sites_of(source: str, module: str) -> list[str]:
    """Return the places in one source."""
    finder = _Finder(module)
    finder.visit(ast.parse(source))
    counts: Counter[str] = Counter()
    named = []
    for site in finder.found:
        counts[site] += 1
        named.append(site if counts[site] == 1 else f"{site} #{counts[site]}")
    return named


class _Finder(ast.NodeVisitor):
    """Follows imports and scopes. Annotations are passed over: they decode nothing."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._scope: list[str] = []
        self._names: dict[str, str] = {}
        self.found: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self._names[name] = alias.name if alias.asname else name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._names[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node.name, [*node.decorator_list, *node.bases, *node.body])

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._inside(node.name, [*node.decorator_list, *node.args.defaults, *node.body])

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - as the base class wants it

    def visit_Assign(self, node: ast.Assign) -> None:
        self._inside(ast.unparse(node.targets[0]) if not self._scope else "", [node.value])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._inside(ast.unparse(node.target) if not self._scope else "", [node.value] if node.value else [])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._full_name(node)
        if name in DECODERS:
            self._find(name)
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if self._names.get(node.id) in DECODERS:
            self._find(self._names[node.id])

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS and not node.args:
            self._find(f".{node.func.attr}")
        self.generic_visit(node)

    def _full_name(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute) and (base := self._full_name(node.value)) is not None:
            return f"{base}.{node.attr}"
        return None

    def _inside(self, name: str, nodes: list[ast.AST | None]) -> None:
        if name:
            self._scope.append(name)
        for node in nodes:
            if node is not None:
                self.visit(node)
        if name:
            self._scope.pop()

    def _find(self, decoder: str) -> None:
        self.found.append(f"{self._module}:{'.'.join(self._scope)} {decoder.removeprefix('dynamo_core.protocol.')}")
