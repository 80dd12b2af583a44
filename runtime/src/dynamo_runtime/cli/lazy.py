"""Lazy commands: known by name and one line of help, imported only when they are run.

This module and `main` are all that ``dynamo --help`` imports of the project, so that it answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from importlib_metadata import EntryPoint

#: Entry points of plugins that bring a command of their own. Each names a click command.
COMMAND_GROUP = "dynamo.commands"


class LazyGroup(click.Group):
    """A group whose own commands come from a table and whose other commands come from plugins.

    `table` maps a command's name to its line of help; the command is the object `command` of the module
    ``<package>.<name>``. A plugin cannot take the name of a command in the table. `optional` maps commands to
    the distributions that bring them.
    """

    def __init__(
        self, *args: Any, table: Mapping[str, str], optional: Mapping[str, str], package: str, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._table = table
        self._optional = optional
        self._package = package

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return own commands in the order of the table, then those of plugins."""
        return [*self._table, *sorted(set(plugin_commands()) - set(self._table))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name in self._table:
            command = import_module(f"{self._package}.{cmd_name}").command
            assert isinstance(command, click.Command)  # noqa: S101 - holds for every module of the table
            return command
        entry = plugin_commands().get(cmd_name)
        return None if entry is None else load_plugin_command(entry)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command like click, and suggest another one for a mistyped name."""
        name, known = args[0], self.list_commands(ctx)
        if name in self._optional and name not in known:
            wanted = self._optional[name]
            raise click.UsageError(f"The command '{name}' comes with {wanted}: pip install {wanted}", ctx)
        # What looks like an option is click's affair.
        if name in known or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        close = get_close_matches(name, known, n=1)
        raise click.UsageError(f"No such command '{name}'." + (f" Did you mean '{close[0]}'?" if close else ""), ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._table.items()))
        others = {name: entry for name, entry in plugin_commands().items() if name not in self._table}
        if others:
            with formatter.section("Commands of plugins"):
                formatter.write_dl([(name, f"From {_origin(entry)}.") for name, entry in sorted(others.items())])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of the set-up ends it with one line and exit code 2."""
        # Imported here, as the tree of errors needs msgspec, which `--help` does without.
        from dynamo_core.errors import ConfigError

        try:
            return super().invoke(ctx)
        except ConfigError as error:
            click.echo(f"dynamo: {' '.join(str(error).split())}", err=True)
            ctx.exit(2)


class KindGroup(click.Group):
    """A group with a command for each kind of plugins. A distribution that adds a kind brings its command.

    `part` is what such a command does for the kind; see `dynamo_core.plugins.metadata.KIND_GROUP`.
    """

    def __init__(self, *args: Any, part: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._part = part

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the kinds of core, then those that distributions add."""
        return [*super().list_commands(ctx), *self._declared()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a kind; that of another distribution is imported."""
        from dynamo_core.plugins.metadata import only_one

        entries = self._declared().get(cmd_name)
        return super().get_command(ctx, cmd_name) if entries is None else load_plugin_command(only_one(entries))

    def _declared(self) -> dict[str, list[EntryPoint]]:
        from dynamo_core.plugins.metadata import declared_kinds

        return declared_kinds(self._part)


def plugin_commands() -> dict[str, EntryPoint]:
    """Return the commands of installed plugins by name, from metadata alone."""
    from importlib_metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=COMMAND_GROUP)}


def load_plugin_command(entry: EntryPoint) -> click.Command:
    """Import the command of a plugin.

    Raises:
        PluginError: it cannot be imported, or is no click command.
    """
    from dynamo_core.errors import PluginError

    try:
        command = entry.load()
    except Exception as error:
        cause = " ".join(str(error).split())
        raise PluginError(
            f"command {entry.name!r} ({_origin(entry)}): cannot be imported: {type(error).__name__}: {cause}",
            cause=error,
        ) from error
    if not isinstance(command, click.Command):
        raise PluginError(f"command {entry.name!r} ({_origin(entry)}): {entry.value} is no click command")
    return command


def _origin(entry: EntryPoint) -> str:
    return "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
