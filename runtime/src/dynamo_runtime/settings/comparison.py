"""The differences between two loads of a configuration, and those that can be applied at run time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dynamo_runtime.settings.loader import LoadedSettings, section_of
from dynamo_runtime.settings.model import LIVE_KEYS, SWITCHES
from dynamo_runtime.settings.tree import DEFAULT, Leaf, Path, Table, leaves

_LIVE = [tuple(key.split(".")) for key in LIVE_KEYS]
#: Follows the name of a file whose content is another one.
CONTENT = " (its content)"

#: The keys of a plugin's section, such as ``router``, that the plugin takes while it runs.
LiveKeys = Callable[[str], Collection[str]]


@dataclass(frozen=True, slots=True)
class Change:
    """One changed setting. Values are as dumps show them, None where nothing was set.

    `origin` is that of the new value. What is not `live` needs a restart.
    """

    key: str
    old: Any
    new: Any
    origin: str
    live: bool


def changes(old: LoadedSettings, new: LoadedSettings, live_keys: LiveKeys) -> list[Change]:
    """Return every setting whose value differs, in the order of the configuration; of lists with ids, each entry."""
    found = list(_order(old.tree, new.tree))
    for path, before, after in _differences(old.tree, new.tree):
        live = _is_live(old.tree if after is None else new.tree, path, before, after, live_keys)
        for row in _rows(before, after):
            # What has gone has the default again.
            origin = DEFAULT if after is None else after.origin
            found.append(Change(".".join((*path, *row.below)), row.old, row.new, origin, live))
    changed = {change.key for change in found}
    for key, digest in new.certificates.items():
        before_digest = old.certificates.get(key)
        if key not in changed and before_digest != digest:
            found.append(Change(key, old.shown(key), f"{new.shown(key)}{CONTENT}", new.origin(key), True))
    return found


def _order(old: Table, new: Table) -> Iterator[Change]:
    """Yield lists of plugins whose order differs; entries that came or went have rows of their own."""
    for key, node in new.children.items():
        before = old.children.get(key)
        if isinstance(node, Table) and node.listed and isinstance(before, Table) and before.listed:
            was, now = (
                [name for name in one.children if name in other.children]
                for one, other in ((before, node), (node, before))
            )
            if was != now:
                yield Change(key, was, now, node.origin, live=False)


def _differences(old: Table, new: Table) -> Iterator[tuple[Path, Leaf | None, Leaf | None]]:
    before, after = dict(leaves(old)), dict(leaves(new))
    for path in dict.fromkeys((*after, *before)):
        one, other = before.get(path), after.get(path)
        if one is not None and other is not None:
            if (one.value, one.unfilled) != (other.value, other.unfilled) or type(one.value) is not type(other.value):
                yield path, one, other
        elif not (_says_nothing(one or other) or _is_table_with_keys(path, before, after)):
            yield path, one, other


def _says_nothing(leaf: Leaf | None) -> bool:
    """Return whether it is the default of a key that the other tree has not, and is null."""
    return leaf is not None and leaf.origin == DEFAULT and leaf.value is None


def _is_table_with_keys(path: Path, before: Mapping[Path, Leaf], after: Mapping[Path, Leaf]) -> bool:
    """Return whether a table is empty in one tree only: then its keys are the difference."""
    leaf = before.get(path) or after[path]
    return leaf.value == {} and (_has_below(before, path) or _has_below(after, path))


def _has_below(tree: Mapping[Path, Leaf], path: Path) -> bool:
    return any(other[: len(path)] == path and len(other) > len(path) for other in tree)


class _Row(NamedTuple):
    below: Path
    old: Any
    new: Any


def _rows(before: Leaf | None, after: Leaf | None) -> Iterator[_Row]:
    """Yield one row; of lists whose entries have ids, one for each entry that differs."""
    old, new = _entries(before), _entries(after)
    if not (old and new):
        yield _Row((), before and before.display, after and after.display)
        return
    for name in dict.fromkeys((*new, *old)):
        one, other = old.get(name, (None, None)), new.get(name, (None, None))
        if one[0] != other[0]:
            yield _Row((name,), one[1], other[1])


def _entries(leaf: Leaf | None) -> dict[str, tuple[Any, Any]]:
    """Return the entries of a list by their ids, each with what may be shown of it; empty if it has none."""
    if leaf is None or not isinstance(leaf.value, list | tuple):
        return {}
    if not all(isinstance(entry, Mapping) and "id" in entry for entry in leaf.value):
        return {}
    return {str(entry["id"]): (entry, shown) for entry, shown in zip(leaf.value, leaf.display, strict=True)}


def _is_live(tree: Table, path: Path, before: Leaf | None, after: Leaf | None, live_keys: LiveKeys) -> bool:
    if ".".join(path) in SWITCHES and not (before and before.value and after and after.value):
        return False
    above = tree.children[path[0]]
    # The name of an entry is no key of core.
    known = (path[0], *path[2:]) if isinstance(above, Table) and above.listed else path
    if any(known[: len(key)] == key for key in _LIVE):
        return True
    section = section_of(tree, path)
    return section is not None and path[len(section)] in live_keys(".".join(section))
