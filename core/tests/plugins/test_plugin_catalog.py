from __future__ import annotations

import sys
from typing import Protocol

from dynamo_core.plugins.catalog import Catalog, InstalledPlugin
from dynamo_core.plugins.loader import PluginLoader


class Site(Protocol):
    def install(self, distribution: str, entries: dict[str, str], modules: dict[str, str]) -> None: ...
    def install_echo(self, source: str = ...) -> None: ...


def rows(loader: PluginLoader) -> dict[str, InstalledPlugin]:
    return {row.name: row for row in Catalog(loader).installed()}


def test_the_catalog_lists_installed_plugins_without_importing(site: Site) -> None:
    site.install_echo()

    row = rows(PluginLoader())["echo"]

    assert row == InstalledPlugin(
        kind="engine",
        name="echo",
        distribution="dynamo-plugin-engine-echo",
        version="1.2.3",
        module="fake_engine_echo",
        loaded=False,
        hooks=[],
    )
    assert "fake_engine_echo" not in sys.modules


def test_a_loaded_plugin_shows_its_hooks(site: Site, echo: str) -> None:
    site.install_echo(echo + "\n@hookimpl\ndef dynamo_engine_stopped(): ...\n")
    loader = PluginLoader()

    loader.load("engine", "echo")

    row = rows(loader)["echo"]
    assert row.loaded
    assert row.hooks == ["dynamo_engine_stopped", "dynamo_register_engines"]


def test_a_name_without_a_known_kind_is_listed_as_such(site: Site) -> None:
    site.install("odd", {"motor-echo": "fake_odd"}, {"fake_odd": ""})

    assert rows(PluginLoader())["motor-echo"].kind == ""
