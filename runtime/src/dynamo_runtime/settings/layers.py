"""Merging layers, and the checks of every layer: known keys, and tables where tables belong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynamo_core.contracts.config import NESTED
from dynamo_core.errors import ConfigError

from dynamo_runtime.settings.entries import is_entry_list, merge_entries, read_entries
from dynamo_runtime.settings.known_keys import REQUIRED, Shape, suggestion
from dynamo_runtime.settings.tree import DEFAULT, Leaf, Node, Path, Table, find, location, replace_at


def merge(lower: Table, upper: Table, shape: Shape | None = None) -> Table:
    """Return `upper` over `lower`: the upper value wins, tables are merged key by key.

    Where `upper` changes the `use` of a plugin section, the plugin keys of `lower` are dropped: they belonged to the
    other plugin. Without a `shape` no section is known and nothing is dropped.
    """
    children = dict(lower.children)
    origin = upper.origin if lower.origin == DEFAULT else lower.origin
    if shape is not None and shape.is_section and _changes_use(lower, upper, shape):
        origin = upper.origin
        children = {key: node for key, node in children.items() if key in shape.fields}
    if shape is not None and "use" in upper.children and "apis" in shape.fields:
        # A layer that picks an API does not mean those of a list below it.
        children.pop("apis", None)
    for key, node in upper.children.items():
        inner = shape.child(key) if shape is not None else None
        below = children.get(key)
        if inner is not None and inner.entry is not None and _is_listed(below, node, inner):
            children[key] = merge_entries(below, node, inner, key, merge)
            continue
        if isinstance(node, Leaf):
            if node.value is None and inner is not None and inner.is_table:
                # `workers:` with nothing after it says nothing; it does not take the workers away.
                children.setdefault(key, _empty(node.origin, inner))
            else:
                children[key] = node
            continue
        base = below if isinstance(below, Table) else Table(node.origin, text=node.text)
        children[key] = merge(base, node, inner)
    return Table(origin, children, lower.text, listed=lower.listed or upper.listed)


def _is_listed(lower: Node | None, upper: Node, shape: Shape) -> bool:
    """Return whether a list of plugin sections comes of two layers. A null over something says nothing."""
    if isinstance(upper, Leaf):
        return is_entry_list(upper)
    return not shape.is_section or upper.listed or (isinstance(lower, Table) and lower.listed)


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
    """Reject unknown keys, and values where a table of settings belongs.

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
        if inner.entry is not None and (is_entry_list(node) or not inner.is_section):
            _check_entries(node, inner, key)
        elif isinstance(node, Table):
            check(node, inner, (*path, key))
        elif node.value is not None:
            # The value itself is not shown: it might have been meant for a key that holds a secret.
            example = " such as {use: …}" if inner.is_section else ""
            raise ConfigError(
                f"{location(node.origin, '.'.join((*path, key)))}: expected a mapping of settings{example}, "
                "got a single value"
            )


def _check_entries(node: Node, shape: Shape, key: str) -> None:
    entries = read_entries(node, shape, key) if isinstance(node, Leaf) and is_entry_list(node) else node
    if isinstance(entries, Leaf):
        if entries.value is not None:
            raise ConfigError(f"{location(node.origin, key)}: expected a list such as [{{use: …}}], got a single value")
        return
    for name, entry in entries.children.items():
        if isinstance(entry, Leaf):
            raise ConfigError(
                f"{location(entry.origin, f'{key}.{name}')}: {key} is a list: write [{{use: …}}], or {key}.NAME.{name}"
            )
        if shape.entry is not None:
            check(entry, shape.entry, (key, name))


def fill(table: Table, shape: Shape) -> Table:
    """Return the tree with the defaults of all missing values. A table with a required value is not added.

    Entries of lists of plugins stay as they are written.
    """
    if table.listed:
        return table
    children: dict[str, Node] = {}
    for key, inner in shape.fields.items():
        node = table.children.get(key)
        if node is None and inner.is_table and _all_optional(inner):
            node = _empty(DEFAULT, inner)
        elif node is None and inner.default is not REQUIRED:
            node = Leaf(inner.default, DEFAULT)
        if node is not None:
            # A threshold that a model does not set is that for all models, and not the default.
            inherits = shape.is_section and inner.each is not None
            children[key] = fill(node, inner) if isinstance(node, Table) and not inherits else node
    for key, node in table.children.items():
        if key not in children:
            children[key] = fill(node, shape.each) if shape.each is not None and isinstance(node, Table) else node
    return replace(table, children=children)


def _empty(origin: str, shape: Shape) -> Table:
    return Table(origin, listed=shape.entry is not None and not shape.is_section)


def _all_optional(shape: Shape) -> bool:
    return all(
        _all_optional(inner) if inner.is_table else inner.default is not REQUIRED for inner in shape.fields.values()
    )


def plugin_choices(layer: Table) -> Table:
    """Return the part of a layer that picks plugins."""
    children: dict[str, Node] = {}
    for key, node in layer.children.items():
        if isinstance(node, Table):
            inner = plugin_choices(node)
            if inner.children:
                children[key] = inner
        elif key == "use":
            children[key] = node
    return Table(layer.origin, children, layer.text)


def expand(path: Sequence[str], workers: Sequence[str], tree: Table, value: object) -> list[Path]:
    """Return the paths that are set to the value, with ``*`` replaced by every worker in turn.

    A path into a section whose plugin wraps another one leads to the innermost. A plugin that wraps others already is
    picked where it is.
    """
    if "*" not in path:
        *section, key = path
        while isinstance(find(tree, (*section, NESTED, "use")), Leaf):
            picked = find(tree, (*section, "use"))
            if key == "use" and isinstance(picked, Leaf) and picked.value == value:
                break
            section.append(NESTED)
        return [(*section, key)]
    return [tuple(worker if part == "*" else part for part in path) for worker in workers]


def assign(layer: Table, path: Sequence[str], node: Node) -> Table:
    """Set one value in a layer; tables are merged into what is there."""
    single = replace_at(Table(node.origin), path, node)
    return merge(layer, single)
