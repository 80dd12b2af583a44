"""Finds every regular expression of the product by reading its sources, and makes inputs that take it the longest."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from re import _parser as sre_parser
from typing import Any

from tests.architecture.decoding_sites import ROOT, module_of

FUNCTIONS = frozenset({"compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"})
#: Methods that begin at every place of a text.
SEARCHING = frozenset({"search", "sub", "subn", "split", "findall", "finditer"})
#: Calls that check a field against the expression that is their `pattern`.
CHECKS = frozenset({"Field", "StringConstraints", "Meta"})


@dataclass(slots=True)
class Site:
    """One place: the literal, if it is one, and the names of the methods that are called."""

    literal: str | bytes | None
    flags: int = 0
    methods: set[str] = field(default_factory=set)


def sites() -> dict[str, Site]:
    """Return each place by its name: ``module:scope``, numbered where a scope has several."""
    found: dict[str, Site] = {}
    folders = [
        ROOT / "core" / "src",
        ROOT / "runtime" / "src",
        *sorted(ROOT.glob("libs/*/src")),
        *sorted(ROOT.glob("plugins/*/*/src")),
    ]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        source = path.read_text()
        if any(word in source for word in ("import re", "from re", "pattern=")):
            found |= sites_of(source, module_of(path))
    return found


def sites_of(source: str, module: str) -> dict[str, Site]:
    """Return the places in one source."""
    finder = _Finder(module)
    tree = ast.parse(source)
    finder.visit(tree)
    for node in ast.walk(tree):
        # Of an expression that has a name, what is done by that name.
        if isinstance(node, ast.Attribute) and node.attr in FUNCTIONS:
            for name, site in finder.found.items():
                if ast.unparse(node.value).split(".")[-1].partition("[")[0] == name.rpartition(":")[2].split(".")[-1]:
                    site.methods.add(node.attr)
    return finder.found


class _Finder(ast.NodeVisitor):
    """Follows imports and scopes."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._scope: list[str] = []
        self._names: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self.found: dict[str, Site] = {}

    def visit_Import(self, node: ast.Import) -> None:
        self._names |= {alias.asname or alias.name: "re" for alias in node.names if alias.name in ("re", "regex")}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module in ("re", "regex"):
            self._names |= {alias.asname or alias.name: alias.name for alias in node.names}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node.name, node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._inside(node.name, node)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - as the base class wants it

    def visit_Assign(self, node: ast.Assign) -> None:
        self._inside(ast.unparse(node.targets[0]).removeprefix("self."), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._inside(ast.unparse(node.target).removeprefix("self."), node)

    def visit_Call(self, node: ast.Call) -> None:
        if (method := self._method(node.func)) is not None:
            self._find(node.args[0], node.args[1:], method)
            for part in (*node.args, *node.keywords):
                self.visit(part)
            return
        if ast.unparse(node.func).rpartition(".")[2] in CHECKS:
            for keyword in node.keywords:
                if keyword.arg == "pattern":
                    self._find(keyword.value, [], "search")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._handed_on(node)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._handed_on(node)

    def _handed_on(self, node: ast.expr) -> None:
        """Do what is called elsewhere."""
        if (method := self._method(node)) is not None:
            self._find(node, [], method)

    def _method(self, node: ast.expr) -> str | None:
        """Return the name of a function of the library."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return node.attr if self._names.get(node.value.id) == "re" and node.attr in FUNCTIONS else None
        name = self._names.get(node.id) if isinstance(node, ast.Name) else None
        return name if name in FUNCTIONS else None

    def _inside(self, name: str, node: ast.AST) -> None:
        self._scope.append(name)
        self.generic_visit(node)
        self._scope.pop()

    def _find(self, pattern: ast.expr, more: list[ast.expr], method: str) -> None:
        name = f"{self._module}:{'.'.join(self._scope)}"
        self._counts[name] += 1
        if self._counts[name] > 1:
            name += f" #{self._counts[name]}"
        value = pattern.value if isinstance(pattern, ast.Constant) else None
        literal = value if isinstance(value, str | bytes) else None
        flags = 0
        for each in more:
            for part in ast.walk(each):
                if isinstance(part, ast.Attribute) and isinstance(flag := getattr(re, part.attr, None), re.RegexFlag):
                    flags |= flag
        self.found[name] = Site(literal, flags, set() if method == "compile" else {method})


def hard_inputs(pattern: re.Pattern[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield what may take an expression long: a beginning, a part to be repeated, and an end.

    Each part that the expression repeats stands behind what leads to it, and before an end that fits or does not. For
    those who search, each way to begin is repeated too, and all pairs of parts.
    """
    text = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    walker = _Walker(pattern.flags)
    whole = walker.walk(list(sre_parser.parse(text, pattern.flags & ~re.DEBUG)), "")
    own = list(dict.fromkeys(part for found in (*walker.found, (whole,)) for part in found if part))
    ends = ("", "\0", whole)
    for lead, *bodies in walker.found:
        for body, end in itertools.product(filter(None, bodies), ends):
            yield lead, body, end
    for part, end in itertools.product((*own, *_ANY), ends):
        yield "", part, end
    for first, second in itertools.permutations(own[:_MOST], 2):
        yield "", first + second, "\0"
        yield first, second, "\0"


#: Characters with a meaning in many expressions.
_ANY = ("a", "0", " ", "\\", "'", '"', "\\'", '\\"', "/", ".", ":", "-", "<", "=")
#: Parts of which all pairs are tried.
_MOST = 6


class _Walker:
    """Goes through an expression, and makes short texts that fit its parts."""

    def __init__(self, flags: int) -> None:
        self._flags = flags
        self._groups: dict[int, str] = {}
        #: For each part that is repeated what leads there, and texts that fit it.
        self.found: list[tuple[str, ...]] = []

    def walk(self, nodes: list[Any], lead: str) -> str:
        """Return a text that fits the nodes one after the other."""
        text = ""
        for kind, what in nodes:
            text += self._fit(str(kind), what, lead + text)
        return text

    def _fit(self, kind: str, what: Any, lead: str) -> str:
        match kind:
            case "LITERAL":
                return chr(what)
            case "NOT_LITERAL":
                return "b" if what == ord("a") else "a"
            case "ANY":
                return "a"
            case "IN":
                return self._members(what)[0]
            case "BRANCH":
                ways = [self.walk(list(way), lead) for way in what[1]]
                return ways[0]
            case "SUBPATTERN":
                text = self.walk(list(what[3]), lead)
                self._groups[what[0]] = text
                return text
            case "ATOMIC_GROUP":
                return self.walk(list(what), lead)
            case "GROUPREF":
                return self._groups.get(what, "")
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                least, most, body = what
                text = self.walk(list(body), lead)
                if most > 1:
                    self.found.append((lead, *dict.fromkeys((text, *self._ways(list(body))))))
                fit: str = text * max(least, 1)
                return fit
        return ""

    def _ways(self, nodes: list[Any]) -> list[str]:
        """Return further texts that fit: one for each choice, and for each character class its members."""
        walker = _Walker(self._flags)
        ways = []
        for at, (kind, what) in enumerate(nodes):
            before, after = (walker.walk(part, "") for part in (nodes[:at], nodes[at + 1 :]))
            match str(kind):
                case "IN":
                    ways += [before + one + after for one in self._members(what)]
                case "BRANCH":
                    ways += [before + walker.walk(list(way), "") + after for way in what[1]]
                case "SUBPATTERN":
                    ways += [before + one + after for one in self._ways(list(what[3]))]
        return ways

    def _members(self, what: Any) -> list[str]:
        """Return a few characters of a class."""
        negated = str(what[0][0]) == "NEGATE"
        wanted = [chr(code) for code in (*range(32, 127), 9, 10, 0)]
        inside = [char for char in wanted if any(_is_in(char, *item) for item in what)]
        members = [char for char in wanted if char not in inside] if negated else inside
        # One of each kind is enough.
        kinds = {(char.isalpha(), char.isdigit(), char.isspace(), char in "\\'\"/.:-=<"): char for char in members}
        return list(kinds.values()) or ["é"]


def _is_in(char: str, kind: object, what: Any) -> bool:
    match str(kind), str(what):
        case "LITERAL", _:
            return char == chr(what)
        case "RANGE", _:
            return bool(what[0] <= ord(char) <= what[1])
        case "CATEGORY", "CATEGORY_DIGIT":
            return char.isdigit()
        case "CATEGORY", "CATEGORY_SPACE":
            return char.isspace()
        case "CATEGORY", "CATEGORY_WORD":
            return char.isalnum() or char == "_"
        case "CATEGORY", _:
            return not _is_in(char, kind, str(what).replace("_NOT_", "_"))
    return False
