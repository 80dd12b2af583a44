"""The mutants of a module, made by the operators of mutmut, and the keys that follow them from commit to commit."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation.file_mutation import MutationVisitor
from mutmut.mutation.mutators import mutation_operators, operator_string
from mutmut.mutation.pragma_handling import IgnoredCode

#: Characters of the code on each side of a change that its text shows.
SHOWN = 60


class Key(NamedTuple):
    """Identify a mutant: which change of an operator in a function, by its number and its text."""

    module: str
    function: str
    operator: str
    occurrence: int
    change: str

    def __str__(self) -> str:
        return f"{self.module}::{self.function} {self.operator} {self.occurrence}"


class Mutant(NamedTuple):
    """A change of one node in a module."""

    key: Key
    #: The lines whose tests can notice the change.
    lines: range
    tree: cst.Module
    original: cst.CSTNode
    mutated: cst.CSTNode

    @property
    def code(self) -> str:
        """The source of the whole module with the change."""
        changed = self.tree.deep_replace(self.original, self.mutated)
        return changed.code if isinstance(changed, cst.Module) else ""


@cache
def find_mutants(module: str, source: str) -> list[Mutant]:
    """Return every mutant of the functions of a module, without those that only change a text."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    tree, functions = wrapper.module, dict(_functions(wrapper.module.body))
    operators: dict[int, str] = {}

    def recorded(operator: Any) -> Any:
        def mutate(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
            for mutated in operator(node):
                operators[id(mutated)] = operator.__name__.removeprefix("operator_")
                yield mutated

        return mutate

    chosen = [(kind, recorded(operator)) for kind, operator in mutation_operators if operator is not operator_string]
    visitor = MutationVisitor(chosen, IgnoredCode(set(), set(), set()))
    wrapper.visit(visitor)
    counts: Counter[tuple[str, str]] = Counter()
    found = []
    for mutation in visitor.mutations:
        outer, nodes = mutation.contained_by_top_level_function, (mutation.original_node, mutation.mutated_node)
        if outer is not None and outer in functions:
            place = functions[outer], operators[id(mutation.mutated_node)]
            change = " -> ".join(" ".join(tree.code_for_node(node).split())[:SHOWN] for node in nodes)
            key = Key(module, *place, counts[place], change)
            counts[place] += 1
            found.append(Mutant(key, _noticing_lines(wrapper, nodes[0], outer), tree, *nodes))
    return found


def _functions(body: Iterable[cst.CSTNode], prefix: str = "") -> Iterator[tuple[cst.CSTNode, str]]:
    for node in body:
        if isinstance(node, cst.FunctionDef):
            yield node, prefix + node.name.value
        elif isinstance(node, cst.ClassDef):
            yield from _functions(node.body.body, f"{prefix}{node.name.value}.")


def _noticing_lines(wrapper: MetadataWrapper, node: cst.CSTNode, function: cst.CSTNode) -> range:
    """Return the lines of the statement around a node; of the whole function for the default of a parameter."""
    outer = node
    while not isinstance(outer, cst.BaseCompoundStatement | cst.SimpleStatementLine | cst.Parameters):
        outer = wrapper.resolve(ParentNodeProvider)[outer]
    header = node if isinstance(outer, cst.BaseCompoundStatement) else outer
    position = wrapper.resolve(PositionProvider)[function if isinstance(outer, cst.Parameters) else header]
    return range(position.start.line, position.end.line + 1)


def draw(module: str, source: str, count: int, seed: int) -> list[Key]:
    """Return that many mutants of a module, the same ones for the same seed, from all operators in turn."""
    by_operator: dict[str, list[Key]] = defaultdict(list)
    for mutant in find_mutants(module, source):
        by_operator[mutant.key.operator].append(mutant.key)
    chance = random.Random(f"{seed} {module}")
    groups = [chance.sample(keys, len(keys)) for _, keys in sorted(by_operator.items())]
    turns = (key for key in chain.from_iterable(zip_longest(*groups)) if key is not None)
    return sorted(islice(turns, count))


def names_of(module: str, function: str, renames: list[list[str]]) -> list[tuple[str, str]]:
    """Return every module and function under which a function is known, its own name first."""
    names = [(module, function)]
    for path, name in names:
        for one, other in chain(renames, (pair[::-1] for pair in renames)):
            there, _, renamed = other.partition("::")
            if one in (path, f"{path}::{name}") and (there, renamed or name) not in names:
                names.append((there, renamed or name))
    return names


def follow(key: Key, root: Path, renames: list[list[str]]) -> Mutant | None:
    """Return the mutant of a key in a checkout, by its text before its number; None where it is gone."""
    for module, function in names_of(key.module, key.function, renames):
        path = root / module
        alike = [
            (mutant.key.change != key.change, abs(mutant.key.occurrence - key.occurrence), mutant)
            for mutant in find_mutants(module, path.read_text() if path.is_file() else "")
            if (mutant.key.function, mutant.key.operator) == (function, key.operator)
        ]
        edited, distance, nearest = min(alike, key=lambda one: one[:2], default=(True, 1, None))
        if not edited or distance == 0:
            return nearest
    return None
