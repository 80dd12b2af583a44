"""Finds pairs of files that repeat each other: six or more lines in a row that are the same or of the same shape."""

from __future__ import annotations

import ast
import io
import keyword
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

#: Lines in a row that make a run.
LINES = 6
#: A run that stands in more places than these is an idiom of the tree.
PLACES = 8
#: What six lines of one shape hold at the least: tokens that are more than punctuation, and different shapes of lines.
#: A run below this is what every file has: fields, keyword arguments, bare calls.
WEIGHT, SHAPES = 18, 3

_LAYOUT = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
        tokenize.ENCODING,
    }
)


class Line(NamedTuple):
    """One line of code: as it stands, and with names, texts and numbers left open. White space is that of tokens."""

    number: int
    exact: str
    shape: str
    weight: int


class Run(NamedTuple):
    """Lines that two files share, as indexes among the lines that count."""

    begin: int
    other: int
    length: int
    exact: bool

    def overlaps(self, run: Run) -> bool:
        return self.begin < run.begin + run.length and run.begin < self.begin + self.length


@dataclass(frozen=True)
class Pair:
    """Two files that share runs, or one that repeats itself, with the longest of the runs."""

    first: str
    second: str
    start: int
    end: int
    other_start: int
    other_end: int
    exact: bool
    runs: int

    @property
    def lines(self) -> int:
        return self.end - self.start + 1

    def __str__(self) -> str:
        more = f", {self.runs - 1} more" if self.runs > 1 else ""
        kind = "" if self.exact else ", shape"
        return (
            f"{self.first}:{self.start}-{self.end} — {self.second}:{self.other_start}-{self.other_end}"
            f" ({self.lines} lines{kind}{more})"
        )


def pairs(files: Sequence[tuple[str, Sequence[Line]]]) -> list[Pair]:
    """Return the pairs among files, given by name and `code_lines`; those that share the most come first."""
    lines = [own for _, own in files]
    found = _runs(lines, exact=True)
    for two, runs in _runs(lines, exact=False).items():
        # A run of one shape of which a part is the same to the letter is already there.
        same = found.get(two, [])
        if more := [run for run in runs if not any(run.overlaps(other) for other in same)]:
            found[two] = same + more
    listed = [_pair(*files[first], *files[second], runs) for (first, second), runs in found.items()]
    return sorted(listed, key=lambda pair: (-pair.runs * pair.lines, pair.first, pair.second))


def _pair(first: str, own: Sequence[Line], second: str, its: Sequence[Line], runs: Sequence[Run]) -> Pair:
    longest = max(runs, key=lambda run: (run.exact, run.length))
    return Pair(
        first,
        second,
        start=own[longest.begin].number,
        end=own[longest.begin + longest.length - 1].number,
        other_start=its[longest.other].number,
        other_end=its[longest.other + longest.length - 1].number,
        exact=longest.exact,
        runs=len(runs),
    )


def code_lines(source: str, nodes: Iterable[ast.AST]) -> Iterator[Line]:
    """Yield the lines of a source, given with its nodes, that count: no boilerplate, no lone punctuation."""
    nodes = list(nodes)
    passed_over = set(_boilerplate(nodes))
    declared = set(_declarations(nodes))
    tokens: dict[int, list[tokenize.TokenInfo]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT and token.start[0] not in passed_over:
            tokens[token.start[0]].append(token)
    for number, row in tokens.items():
        weight = sum(token.type != tokenize.OP for token in row)
        if weight:
            exact = " ".join(token.string for token in row)
            yield Line(number, exact, exact if number in declared else " ".join(map(_open, row)), weight)


def _open(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
        return "name"
    if token.type in {tokenize.STRING, tokenize.NUMBER}:
        return "value"
    return token.string


def _boilerplate(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Yield the numbers of lines that are alike because the language wants them so."""
    for node in nodes:
        match node:
            case ast.Import() | ast.ImportFrom():
                yield from _rows(node)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from _rows(node)
            case ast.Expr(value=ast.Constant(value=str())):
                yield from _rows(node)
            case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
                yield from _rows(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if any(map(_is_overload, node.decorator_list)):
                yield from range(node.decorator_list[0].lineno, _rows(node).stop)
            case ast.List() | ast.Tuple() | ast.Set() | ast.Dict() if _is_data(node):
                yield from _rows(node)[1:]


def _declarations(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Return the numbers of lines that declare fields and parameters.

    Their names say what they are, so their shape is their text.
    """
    for node in nodes:
        match node:
            case ast.ClassDef():
                for field in node.body:
                    if isinstance(field, ast.AnnAssign):
                        yield from _rows(field)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from range(node.lineno + 1, node.body[0].lineno)
                if node.name == "__init__":
                    for step in node.body:
                        if _is_own_field(step):
                            yield from _rows(step)


def _is_own_field(step: ast.stmt) -> bool:
    match step:
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"))]):
            return True
        case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"))):
            return True
    return False


def _rows(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _is_overload(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id == "overload"


def _is_data(node: ast.expr | None) -> bool:
    match node:
        case None | ast.Constant():
            return True
        case ast.List() | ast.Tuple() | ast.Set():
            return all(map(_is_data, node.elts))
        case ast.Dict():
            return all(map(_is_data, [*node.keys, *node.values]))
        case ast.UnaryOp():
            return _is_data(node.operand)
    return False


def _runs(files: Sequence[Sequence[Line]], *, exact: bool) -> dict[tuple[int, int], list[Run]]:
    """Return the runs that two files share, for each two that share any."""
    places: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    numbers: dict[str, int] = {}
    for file, lines in enumerate(files):
        keys = [numbers.setdefault(line.exact if exact else line.shape, len(numbers)) for line in lines]
        for begin in range(len(lines) - LINES + 1):
            if exact or _counts(lines[begin : begin + LINES]):
                places[tuple(keys[begin : begin + LINES])].append((file, begin))
    windows: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for where in places.values():
        if 1 < len(where) <= PLACES:
            for (file, begin), (sibling, other) in combinations(where, 2):
                if file != sibling or other - begin >= LINES:
                    windows[file, sibling, other - begin].append(begin)
    runs: dict[tuple[int, int], list[Run]] = defaultdict(list)
    for (file, sibling, distance), begins in windows.items():
        for begin, length in _merged(sorted(begins)):
            runs[file, sibling].append(Run(begin, begin + distance, length, exact))
    return dict(runs)


def _counts(lines: Sequence[Line]) -> bool:
    return sum(line.weight for line in lines) >= WEIGHT and len({line.shape for line in lines}) >= SHAPES


def _merged(begins: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield windows that follow each other, as runs: where each begins, and its lines."""
    start = last = begins[0]
    for begin in begins[1:]:
        if begin > last + 1:
            yield start, last - start + LINES
            start = begin
        last = begin
    yield start, last - start + LINES
