"""Plugin metadata, read from the installed distributions without an import."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from importlib_metadata import EntryPoint, entry_points

from dynamo_core.contracts.plugin import KINDS
from dynamo_core.errors import PluginError

GROUP = "dynamo"
#: Kinds that distributions add. ``KIND`` names the contract, a class; ``KIND.kit`` and ``KIND.scaffold`` the commands
#: that hold a plugin to it and write a new one.
KIND_GROUP = "dynamo.kinds"
#: Stands for the distribution of a plugin of one file. No distribution can be called so.
ONE_FILE = "(file)"


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """One entry point of the group ``dynamo``.

    `kind` is empty if the entry point's name does not begin with a known kind; `name` is then the whole name.
    `target` is what the entry point names, which should be a module. A plugin of one file has none of this: its `name`
    is the one in the config file, its `target` the path of the file, and it has no version.
    """

    kind: str
    name: str
    distribution: str
    version: str
    target: str

    @classmethod
    def of_file(cls, kind: str, name: str, path: Path) -> PluginEntry:
        """Return the entry of a plugin of one file."""
        return cls(kind, name, ONE_FILE, "", str(path))

    @property
    def is_file(self) -> bool:
        """Whether it is a plugin of one file."""
        return self.distribution == ONE_FILE

    @property
    def origin(self) -> str:
        """The distribution and its version, or the file, for messages."""
        return self.target if self.is_file else f"{self.distribution} {self.version}"


#: The order in which plugins are listed.
BY_NAME = attrgetter("kind", "name", "distribution")


def find_plugins() -> list[PluginEntry]:
    """Return all entry points of the group, by kind, name and distribution.

    A distribution that lies twice on the path counts once, where it is found first, as for an import.
    """
    kinds = {*KINDS, *declared_kinds()}
    entries = {_plugin_entry(entry, kinds) for entry in entry_points(group=GROUP)}
    return sorted(entries, key=BY_NAME)


def declared_kinds(part: str = "") -> dict[str, list[EntryPoint]]:
    """Return the entry points of the kinds that distributions add, or of a `part` of them, by kind.

    More than one is a conflict of distributions. A kind of core cannot be declared again.
    """
    declared: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=KIND_GROUP), key=attrgetter("name", "value")):
        kind, _, of = entry.name.partition(".")
        if of == part and kind not in KINDS:
            declared.setdefault(kind, []).append(entry)
    return declared


def only_one(entries: Sequence[EntryPoint]) -> EntryPoint:
    """Return the entry point of a declared kind, or of a part of one.

    Raises:
        PluginError: several distributions declare it.
    """
    if len(entries) > 1:
        origins = " and ".join(entry.dist.name if entry.dist is not None else entry.value for entry in entries)
        raise PluginError(f"the kind {entries[0].name!r} is declared by both {origins}: uninstall all but one")
    return entries[0]


def _plugin_entry(entry: EntryPoint, kinds: Collection[str]) -> PluginEntry:
    kind, dash, name = entry.name.partition("-")
    if kind not in kinds or not dash or not name:
        kind, name = "", entry.name
    distribution, version = ("unknown", "unknown") if entry.dist is None else (entry.dist.name, entry.dist.version)
    return PluginEntry(kind, name, distribution, version, entry.value)
