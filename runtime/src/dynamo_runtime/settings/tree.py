"""Raw configuration: nested tables of values, each with its origin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

#: The origin of values that no layer set.
DEFAULT = "default"

Path: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value. Lists are values too: a layer replaces a list as a whole, except a list of plugin sections."""

    value: Any
    origin: str
    #: What was written, where that can differ from `value`: ``010``, ``yes`` or ``1_000`` may be meant as words.
    text: str | None = None
    #: What dumps and messages may show in place of `value`, if `hidden`.
    shown: Any = None
    hidden: bool = False
    #: A reference in it cannot be resolved, so it has no value. Only in trees that are made for display.
    unfilled: bool = False
    #: The entries of a list of a document, with their origins.
    items: tuple[Node, ...] = ()

    @property
    def display(self) -> Any:
        """The value as dumps show it."""
        return self.shown if self.hidden else self.value


@dataclass(frozen=True, slots=True)
class Table:
    """Named values and tables. `text` as in `Leaf`. A `listed` one is written as a list, whose entries have names."""

    origin: str
    children: Mapping[str, Node] = field(default_factory=dict)
    text: str | None = None
    listed: bool = False


Node: TypeAlias = Leaf | Table


def location(origin: str, key: str) -> str:
    """Return the place of a value for messages: its origin and its key, neither of them twice."""
    if origin == DEFAULT:
        return key
    # The key of a `--set` argument is in its origin; a key below it is not.
    return origin if origin.startswith(f"--set {key}=") else f"{origin}: {key}"


def find(table: Table, path: Sequence[str]) -> Node | None:
    """Return the node at a path, or None."""
    node: Node | None = table
    for key in path:
        if not isinstance(node, Table):
            return None
        node = node.children.get(key)
    return node


def replace_at(table: Table, path: Sequence[str], node: Node) -> Table:
    """Return a copy with `node` at `path`; tables on the way are made, and take the place of values."""
    key, *rest = path
    if rest:
        below = table.children.get(key)
        node = replace_at(below if isinstance(below, Table) else Table(node.origin), rest, node)
    return replace(table, children={**table.children, key: node})


def to_plain(node: Node, *, redact: bool = False) -> Any:
    """Return the tree without origins, as new dictionaries."""
    if isinstance(node, Table):
        plain = {key: to_plain(child, redact=redact) for key, child in node.children.items()}
        return list(plain.values()) if node.listed else plain
    return node.display if redact else node.value


def leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
    """Yield every value with its path, in the order of the tree.

    An empty table counts as a value, except at the top.
    """
    if isinstance(node, Leaf):
        yield path, node
    elif node.children:
        for key, child in node.children.items():
            yield from leaves(child, (*path, key))
    elif path:
        yield path, Leaf([] if node.listed else {}, node.origin)


def from_plain(value: object, origin: str) -> Node:
    """Return a tree in which everything has the same origin. Numbers may be meant as words: a model may be called 7."""
    if isinstance(value, Mapping):
        return Table(origin, {str(key): from_plain(child, origin) for key, child in value.items()})
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return Leaf(value, origin, str(value) if is_number else None)


def relabelled(table: Table, prefix: str) -> Table:
    """Return the same tree with every origin ``o`` turned into ``prefix (o)``."""

    def relabel(node: Node) -> Node:
        origin = f"{prefix} ({node.origin})"
        if isinstance(node, Table):
            return replace(node, origin=origin, children={key: relabel(child) for key, child in node.children.items()})
        return replace(node, origin=origin, items=tuple(relabel(item) for item in node.items))

    return Table(f"{prefix} ({table.origin})", {key: relabel(child) for key, child in table.children.items()})
