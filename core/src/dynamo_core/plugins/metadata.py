"""What the installed distributions offer, read from their metadata alone: nothing is imported."""

from __future__ import annotations

from dataclasses import dataclass

from importlib_metadata import EntryPoint, entry_points

from dynamo_core.contracts.plugin import KINDS

GROUP = "dynamo"


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """One entry point of the group ``dynamo``.

    `kind` is empty if the entry point's name does not begin with a known kind; `name` is then the whole name.
    `target` is what the entry point names, which should be a module.
    """

    kind: str
    name: str
    distribution: str
    version: str
    target: str

    @property
    def origin(self) -> str:
        """The distribution and its version, for messages."""
        return f"{self.distribution} {self.version}"


def find_plugins() -> list[PluginEntry]:
    """All entry points of the group, by kind, name and distribution.

    A distribution that lies twice on the path counts once, where it is found first, as for an import.
    """
    entries = {_plugin_entry(entry) for entry in entry_points(group=GROUP)}
    return sorted(entries, key=lambda entry: (entry.kind, entry.name, entry.distribution))


def _plugin_entry(entry: EntryPoint) -> PluginEntry:
    kind, dash, name = entry.name.partition("-")
    if kind not in KINDS or not dash or not name:
        kind, name = "", entry.name
    distribution, version = ("unknown", "unknown") if entry.dist is None else (entry.dist.name, entry.dist.version)
    return PluginEntry(kind, name, distribution, version, entry.value)
