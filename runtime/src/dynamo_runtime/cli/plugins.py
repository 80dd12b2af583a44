"""``dynamo plugins``: list the installed plugins, and those that the config loads."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from dynamo_core.errors import PluginError

from dynamo_runtime.cli.options import config_options, json_option, load
from dynamo_runtime.cli.table import format_table

if TYPE_CHECKING:
    from dynamo_core.plugins.loader import PluginLoader

    from dynamo_runtime.settings import LoadedSettings

LOADED, INSTALLED = "loaded", "installed"


@click.command()
@config_options
@json_option
def command(as_json: bool, **options: Any) -> None:
    """List the plugins that are installed, and what the config loads.

    Only what the config names is imported, so only for those the hooks are shown. A plugin that the config names and
    that cannot be loaded is reported below the list; `dynamo check` fails in that case, this command does not.
    """
    from dynamo_core.plugins.catalog import Catalog
    from dynamo_core.plugins.loader import PluginLoader

    loaded = load(**options)
    loader = PluginLoader(loaded.plugin_files)
    problems = load_named(loaded, loader)
    plugins = Catalog(loader).installed()
    if as_json:
        click.echo(json.dumps({"plugins": [asdict(plugin) for plugin in plugins], "problems": problems}, indent=2))
        return
    rows = [
        [
            plugin.kind or "?",
            plugin.name,
            plugin.distribution,
            plugin.version,
            LOADED if plugin.loaded else INSTALLED,
            ", ".join(plugin.hooks),
        ]
        for plugin in plugins
    ]
    click.echo(format_table(["KIND", "NAME", "DISTRIBUTION", "VERSION", "STATE", "HOOKS"], rows))
    for problem in problems:
        click.echo(f"dynamo: {problem}", err=True)


def load_named(loaded: LoadedSettings, loader: PluginLoader) -> list[str]:
    """Load what the settings name, one by one, and return a line for each that cannot be loaded."""
    from dynamo_runtime.assembly.resolve import load_plugin, named_plugins

    problems = []
    for named in named_plugins(loaded.settings):
        try:
            load_plugin(named, loaded, loader)
        except PluginError as error:
            problems.append(str(error))
    return problems
