"""Merging layers, and the checks of every layer: known keys, and tables where tables belong."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_core.errors import ConfigError
from dynamo_core.settings.shape import REQUIRED, Shape, suggestion
from dynamo_core.settings.tree import DEFAULT, Leaf, Node, Path, Table, location, replace_at


def merge(lower: Table, upper: Table, shape: Shape | None = None) -> Table:
    """`upper` over `lower`: the upper value wins, tables are merged key by key.

    Where `upper` changes the `use` of a plugin section, the plugin keys of `lower` are dropped: they belonged to the
    other plugin. Without a `shape` no section is known and nothing is dropped.
    """
    children = dict(lower.children)
    origin = upper.origin if lower.origin == DEFAULT else lower.origin
    if shape is not None and shape.is_section and _changes_use(lower, upper, shape):
        origin = upper.origin
        children = {key: node for key, node in children.items() if key in shape.fields}
    for key, node in upper.children.items():
        inner = shape.child(key) if shape is not None else None
        if isinstance(node, Leaf):
            if node.value is None and inner is not None and inner.is_table:
                # `workers:` with nothing after it says nothing; it does not take the workers away.
                children.setdefault(key, Table(node.origin))
            else:
                children[key] = node
            continue
        below = children.get(key)
        base = below if isinstance(below, Table) else Table(node.origin, text=node.text)
        children[key] = merge(base, node, inner)
    return Table(origin, children, lower.text)


def _changes_use(lower: Table, upper: Table, shape: Shape) -> bool:
    new = upper.children.get("use")
    old = lower.children.get("use")
    if not isinstance(new, Leaf):
        return False
    if isinstance(old, Leaf):
        return bool(old.value != new.value)
    default = shape.fields["use"].default
    return default is not REQUIRED and bool(default != new.value)


def check(table: Table, shape: Shape, path: Path = ()) -> None:
    """Rejects unknown keys, and values where a table of settings belongs.

    Raises:
        ConfigError: with the origin in front, and a suggestion.
    """
    for key, node in table.children.items():
        inner = shape.child(key)
        if inner is None:
            if shape.is_section:
                continue
            section = f" in {'.'.join(path)}" if path else ""
            known = [*shape.fields, *(() if path else ("profiles",))]
            raise ConfigError(f"{node.origin}: unknown key '{key}'{section}{suggestion(key, known)}")
        if not inner.is_table:
            continue
        if isinstance(node, Table):
            check(node, inner, (*path, key))
        elif node.value is not None:
            # The value itself is not shown: it might have been meant for a key that holds a secret.
            example = " such as {use: …}" if inner.is_section else ""
            raise ConfigError(
                f"{location(node.origin, '.'.join((*path, key)))}: expected a mapping of settings{example}, "
                "got a single value"
            )


def fill(table: Table, shape: Shape) -> Table:
    """The tree with the defaults of all missing values. A table with a required value is not added."""
    children: dict[str, Node] = {}
    for key, inner in shape.fields.items():
        node = table.children.get(key)
        if node is None and inner.is_table and _all_optional(inner):
            node = Table(DEFAULT)
        elif node is None and inner.default is not REQUIRED:
            node = Leaf(inner.default, DEFAULT)
        if node is not None:
            children[key] = fill(node, inner) if isinstance(node, Table) else node
    for key, node in table.children.items():
        if key not in children:
            children[key] = fill(node, shape.each) if shape.each is not None and isinstance(node, Table) else node
    return Table(table.origin, children, table.text)


def _all_optional(shape: Shape) -> bool:
    return all(
        _all_optional(inner) if inner.is_table else inner.default is not REQUIRED for inner in shape.fields.values()
    )


def plugin_choices(layer: Table) -> Table:
    """The part of a layer that picks plugins."""
    children: dict[str, Node] = {}
    for key, node in layer.children.items():
        if isinstance(node, Table):
            inner = plugin_choices(node)
            if inner.children:
                children[key] = inner
        elif key == "use":
            children[key] = node
    return Table(layer.origin, children, layer.text)


def expand(path: Sequence[str], workers: Sequence[str]) -> list[Path]:
    """The path, with ``*`` replaced by every worker in turn."""
    if "*" not in path:
        return [tuple(path)]
    return [tuple(worker if part == "*" else part for part in path) for worker in workers]


def assign(layer: Table, path: Sequence[str], node: Node) -> Table:
    """Sets one value in a layer; tables are merged into what is there."""
    single = replace_at(Table(node.origin), path, node)
    return merge(layer, single)
