"""The catalog of installed and loaded plugins."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_core.plugins.loader import PluginLoader


@dataclass(frozen=True, slots=True)
class InstalledPlugin:
    """One plugin as operators see it. `hooks` is filled in once it is loaded, since only an import reveals them.

    `kind` is empty if the entry point's name does not begin with a known kind: such a plugin cannot be picked.
    """

    kind: str
    name: str
    distribution: str
    version: str
    module: str
    loaded: bool
    hooks: list[str]


class Catalog:
    """Lists plugins from metadata; imports nothing."""

    def __init__(self, loader: PluginLoader) -> None:
        self._loader = loader

    def installed(self) -> list[InstalledPlugin]:
        """Return every plugin there is, by kind and name."""
        return [
            InstalledPlugin(
                kind=entry.kind,
                name=entry.name,
                distribution=entry.distribution,
                version=entry.version,
                module=entry.target,
                loaded=self._loader.is_loaded(entry),
                hooks=self._loader.hooks_of(entry),
            )
            for entry in self._loader.entries
        ]
