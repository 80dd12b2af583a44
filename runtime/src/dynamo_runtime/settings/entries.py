"""Lists of plugin sections: each entry has a name, by which layers merge and keys are addressed.

A section that may be a list is read in two forms. A mapping is one plugin. A list holds an entry per plugin, as a table
of entries by name. The keys that core knows of the section itself, such as thresholds, belong to no entry: a layer may
set them without naming one, and `assign_section_keys` puts them into an entry once all layers are merged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from dynamo_core.errors import ConfigError

from dynamo_runtime.settings.known_keys import Shape, suggestion
from dynamo_runtime.settings.tree import DEFAULT, Leaf, Node, Table, from_plain, location

#: Merges an upper table over a lower one that holds the given keys.
Merge: TypeAlias = Callable[[Table, Table, Shape | None], Table]

_NAME = re.compile(r"[A-Za-z0-9_-]+")


def is_entry_list(node: Node | None) -> bool:
    """Return whether a node is a list as it was written, of which the entries are not read yet."""
    return isinstance(node, Leaf) and isinstance(node.value, list | tuple)


def read_entries(leaf: Leaf, shape: Shape, key: str) -> Table:
    """Return the entries of a list by name.

    Raises:
        ConfigError: an entry is no mapping, has no name or a name that cannot be used, or two have the same.
    """
    children: dict[str, Node] = {}
    for index, item in enumerate(leaf.items or [from_plain(value, leaf.origin) for value in leaf.value]):
        if not isinstance(item, Table):
            raise ConfigError(
                f"{location(item.origin, f'{key}[{index}]')}: expected a mapping of settings such as {{use: …}}, "
                "got a single value"
            )
        name = _written(item, "name") or _written(item, "use")
        where = location(item.origin, f"{key}[{index}]")
        if name is None:
            raise ConfigError(f"{where}: an entry needs `use`, or the `name` of an entry that a lower layer has")
        _check_name(name, where, shape)
        if name in children:
            raise ConfigError(
                f"{where}: two entries are called '{name}', the first at {children[name].origin}: "
                "give one of them a `name` of its own"
            )
        children[name] = item
    return Table(leaf.origin, children, leaf.text, listed=True)


def merge_entries(lower: Node | None, upper: Node, shape: Shape, key: str, merge: Merge) -> Table:
    """Return `upper` over `lower`, of which one at least is a list.

    Raises:
        ConfigError: a list cannot be read, or a mapping over a list does not say which entry is meant.
    """
    below = lower if isinstance(lower, Table) else Table(upper.origin, listed=True)
    if not below.listed:
        below = _as_list(below, shape, key)
    above = read_entries(upper, shape, key) if isinstance(upper, Leaf) else upper
    return (
        _merge_lists(below, above, shape, merge) if above.listed else _Addressed(below, above, shape, key, merge).merged
    )


def by_entry_name(layer: Table, tree: Table, shape: Shape, merge: Merge) -> Table:
    """Return the layer with keys such as ``admission.fair-queue.max_wait`` put into the entry of that name.

    Where the section of the tree is a mapping, its plugin is the one entry. Variables of the environment have ``_`` for
    ``-``, and no capitals.
    """
    children = dict(layer.children)
    for key, section in shape.fields.items():
        node = children.get(key)
        if section.entry is None or not isinstance(node, Table) or node.listed:
            continue
        use = {name: child for name, child in node.children.items() if name == "use"}
        # What the layer picks is there for the keys that it sets.
        current = merge(tree, Table(DEFAULT, {key: Table(DEFAULT, use)}), shape).children[key]
        if isinstance(current, Table):
            children[key] = _by_name(node, current, section, merge)
    return replace(layer, children=children)


def assign_section_keys(tree: Table, shape: Shape) -> Table:
    """Return the merged tree with every key of a section inside one of its entries, or beside none if it has no entry.

    Raises:
        ConfigError: two entries hold keys of the section.
    """
    children = dict(tree.children)
    for key, section in shape.fields.items():
        node = children.get(key)
        if section.entry is not None and isinstance(node, Table) and node.listed:
            children[key] = _settled(node, section, key)
    return replace(tree, children=children)


def _settled(node: Table, shape: Shape, key: str) -> Table:
    entries = _entries(node, shape)
    holders = list(_holders(entries, shape))
    if len(holders) > 1:
        first, second = (_common(entries[name], shape) for name in holders[:2])
        name, at = next(iter(second.items()))
        raise ConfigError(
            f"{location(at.origin, f'{key}.{holders[1]}.{name}')}: the entry '{holders[0]}' has keys of this kind too, "
            f"at {next(iter(first.values())).origin}: write them in one entry only"
        )
    beside = {name: child for name, child in node.children.items() if name not in entries}
    if not beside:
        return node
    if not entries:
        # There is no plugin, but what is set beside it is still checked and kept.
        return Table(node.origin, {"use": Leaf(shape.fields["use"].default, node.origin), **beside})
    enabled = (name for name, entry in entries.items() if _is_enabled(entry))
    target = next(iter(holders), None) or next(enabled, next(iter(entries)))
    entry = entries[target]
    return replace(node, children=entries | {target: replace(entry, children={**beside, **entry.children})})


def _merge_lists(below: Table, above: Table, shape: Shape, merge: Merge) -> Table:
    children = dict(below.children)
    for name, entry in above.children.items():
        children[name] = _merged_entry(name, children.get(name), entry, shape, merge)
    return replace(below, children=children)


def _merged_entry(name: str, below: Node | None, above: Node, shape: Shape, merge: Merge) -> Node:
    if not isinstance(above, Table):
        return above
    merged = merge(below if isinstance(below, Table) else Table(DEFAULT), above, shape.entry)
    use = _written(merged, "use")
    if use not in (None, name) and _written(merged, "name") is None:
        # It was called after another plugin, or its keys were set by another name.
        merged = replace(merged, children={"name": Leaf(name, merged.origin), **merged.children})
    return merged


class _Addressed:
    """A mapping over a list. Its keys go to the entry that it picks with `use` or `name`, or to those that it names."""

    def __init__(self, below: Table, above: Table, shape: Shape, key: str, merge: Merge) -> None:
        self._below, self._above = below, above
        self._shape, self._key, self._merge = shape, key, merge
        self._children = dict(below.children)

    @property
    def merged(self) -> Table:
        """The list with the keys of the mapping.

        Raises:
            ConfigError: a key belongs to no entry.
        """
        above, shape = self._above, self._shape
        picked = self._pick()
        common: dict[str, Node] = {}
        own: dict[str, Node] = {}
        for key, node in above.children.items():
            if key in ("use", "name"):
                continue
            if key in shape.fields:
                common[key] = node
            elif isinstance(node, Table) and (key in self._children or _written(node, "use")):
                self._put(key, node)
            elif picked is None:
                self._refuse(key, node)
            else:
                own[key] = node
        if picked is not None and own:
            self._put(picked, Table(above.origin, own))
        holder = next(_holders(_entries(self._below, shape), shape), picked)
        if holder is not None and common:
            self._put(holder, Table(above.origin, common))
        elif common:
            beside = self._merge(Table(above.origin, self._children), Table(above.origin, common), shape)
            self._children = dict(beside.children)
        return replace(self._below, children=self._children)

    def _pick(self) -> str | None:
        """Return the entry that the mapping picks, which is added or enabled; None if it picks none."""
        use, name = _written(self._above, "use"), _written(self._above, "name")
        if use is None and name is None:
            return None
        origin = (self._above.children.get("use") or self._above).origin
        none = self._shape.fields["use"].default if "use" in self._shape.fields else None
        if use is not None and use == none:
            for entry in _entries(self._below, self._shape):
                self._put(entry, Table(origin, {"enabled": Leaf(False, origin)}))
            return None
        picked = name or self._named_after(str(use), origin)
        if picked not in self._children:
            _check_name(picked, location(origin, self._key), self._shape)
        keys = {key: node for key, node in self._above.children.items() if key in ("use", "name")}
        if not _is_enabled(self._children.get(picked)):
            keys["enabled"] = Leaf(True, origin)
        self._put(picked, Table(origin, keys))
        return picked

    def _named_after(self, use: str, origin: str) -> str:
        entries = _entries(self._below, self._shape)
        if use in entries:
            return use
        found = [name for name, entry in entries.items() if _written(entry, "use") == use]
        if len(found) > 1:
            raise ConfigError(
                f"{location(origin, f'{self._key}.use')}: the entries {' and '.join(map(repr, found))} use '{use}': "
                f"say which one is meant, such as --set {self._key}.{found[0]}.enabled=true"
            )
        return found[0] if found else use

    def _put(self, name: str, table: Table) -> None:
        if name not in self._children:
            _check_name(name, location(table.origin, self._key), self._shape)
        self._children[name] = _merged_entry(name, self._children.get(name), table, self._shape, self._merge)

    def _refuse(self, key: str, node: Node) -> None:
        entries = _entries(self._below, self._shape)
        where = location(node.origin, f"{self._key}.{key}")
        if isinstance(node, Table) or not entries:
            raise ConfigError(f"{where}: no entry of the list is called '{key}'{suggestion(key, entries)}")
        raise ConfigError(
            f"{where}: {self._key} is a list here: say which entry is meant, "
            f"such as {self._key}.{next(iter(entries))}.{key}"
        )


def _as_list(section: Table, shape: Shape, key: str) -> Table:
    """Return a mapping as a list of one entry; of none, if it picks no plugin."""
    use = _written(section, "use")
    if use is None or use == shape.fields["use"].default:
        return Table(section.origin, _common(section, shape), section.text, listed=True)
    _check_name(use, location(section.origin, key), shape)
    return Table(section.origin, {use: section}, listed=True)


def _by_name(node: Table, current: Table, shape: Shape, merge: Merge) -> Table:
    children: dict[str, Node] = {}
    own = Table(node.origin)
    names = list(_entries(current, shape)) if current.listed else [_written(current, "use") or ""]
    for key, child in node.children.items():
        name = key
        if key not in shape.fields and isinstance(child, Table):
            name = key if key in names else next((name for name in names if _fold(name) == _fold(key)), key)
            if name in names and not current.listed:
                own = merge(own, child, None)
                continue
        children[name] = child
    return merge(replace(node, children=children), own, None)


def _entries(node: Table, shape: Shape) -> dict[str, Table]:
    return {
        name: child for name, child in node.children.items() if name not in shape.fields and isinstance(child, Table)
    }


def _common(section: Table, shape: Shape) -> Mapping[str, Node]:
    """Return the keys of a section that belong to core."""
    return {name: node for name, node in section.children.items() if name in shape.fields and name != "use"}


def _holders(entries: Mapping[str, Table], shape: Shape) -> Iterator[str]:
    return (name for name, entry in entries.items() if _is_enabled(entry) and _common(entry, shape))


def _is_enabled(entry: Node | None) -> bool:
    return not isinstance(entry, Table) or _written(entry, "enabled") not in ("false", "False")


def _written(table: Table, key: str) -> str | None:
    """Return the text of a key, or None."""
    node = table.children.get(key)
    if not isinstance(node, Leaf) or node.value is None:
        return None
    return node.text if node.text is not None else str(node.value)


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")


def _check_name(name: str, where: str, shape: Shape) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: '{name}' cannot be the name of an entry: give it a `name` of letters, digits, '_' and '-'"
        )
    if name in shape.fields:
        raise ConfigError(f"{where}: an entry cannot be called '{name}', a key of the section: give it another `name`")
