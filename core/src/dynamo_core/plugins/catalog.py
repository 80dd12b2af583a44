"""What is installed, and what of it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_core.plugins.loader import PluginLoader


@dataclass(frozen=True, slots=True)
class InstalledPlugin:
    """One plugin as an operator sees it. `hooks` is filled in once it is loaded, since only importing tells.

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
        """Every plugin there is, by kind and name."""
        return [
            InstalledPlugin(
                kind=offer.kind,
                name=offer.name,
                distribution=offer.distribution,
                version=offer.version,
                module=offer.target,
                loaded=self._loader.is_loaded(offer),
                hooks=self._loader.hooks_of(offer),
            )
            for offer in self._loader.offers
        ]
