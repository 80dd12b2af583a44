"""``dynamo config``: show the settings in force, their origins, and their schema."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
from dynamo_core.errors import PluginError

from dynamo_runtime.cli.options import config_options, flag_options, json_option, load, view
from dynamo_runtime.cli.table import format_table

if TYPE_CHECKING:
    from dynamo_core.contracts.config import PluginConfig

    from dynamo_runtime.settings import LoadedSettings


@click.group()
def command() -> None:
    """Show the settings in force, where they come from, and their schema."""


@command.command("show")
@config_options
@flag_options
@click.option("--origin", is_flag=True, help="Show for each key where its value comes from.")
@json_option
def show(origin: bool, as_json: bool, **options: Any) -> None:
    """Show the settings in force, with secrets hidden.

    Keys of plugins are shown as far as they are set; a plugin's own defaults are in `dynamo config schema`. A secret
    whose variable or file is missing is shown as missing here; `dynamo check` and `dynamo serve` refuse it.
    """
    shown = view(**options)
    if as_json and not origin:
        click.echo(json.dumps(shown.dump(), indent=2))
        return
    rows = shown.rows()
    if as_json:
        listed = [{"key": key, "value": value, "origin": where} for key, value, where in rows]
        click.echo(json.dumps(listed, indent=2))
        return
    header = ["KEY", "VALUE", "ORIGIN"] if origin else ["KEY", "VALUE"]
    cells = [[key, json.dumps(value, ensure_ascii=False), where][: len(header)] for key, value, where in rows]
    click.echo(format_table(header, cells))


@command.command("schema")
@config_options
def schema(**options: Any) -> None:
    """Print the JSON Schema of the config file, for editors.

    It has the keys of the plugins that the config names, as far as they are installed. Workers with different engines
    share one schema: it then leaves the keys of their engines open.
    """
    from dynamo_runtime.settings import config_schema

    click.echo(json.dumps(config_schema(plugin_models(load(**options))), indent=2))


def plugin_models(loaded: LoadedSettings) -> dict[str, type[PluginConfig]]:
    """Return the settings model of each plugin section, by the section's path as `config_schema` takes it."""
    from dynamo_core.plugins.loader import PluginLoader

    from dynamo_runtime.assembly.resolve import load_plugin, named_plugins

    loader = PluginLoader(loaded.plugin_files)
    found: dict[str, set[type[PluginConfig] | None]] = {}
    for named in named_plugins(loaded.settings):
        section = "workers.*.engine" if named.kind == "engine" else named.section
        head, _, entry = section.partition(".")
        if entry and isinstance(getattr(loaded.settings, head), tuple):
            section = f"{head}.*.{named.name}"
        try:
            cls = load_plugin(named, loaded, loader)
        except PluginError:
            found.setdefault(section, set()).add(None)
        else:
            if cls is not None:
                found.setdefault(section, set()).add(cls.Config)
    return {section: model for section, (model, *more) in found.items() if model is not None and not more}
