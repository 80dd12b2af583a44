"""The entry point of the command `dynamo`, and the list of its commands."""

from __future__ import annotations

import click

from dynamo_runtime import garbage_collector
from dynamo_runtime.cli.lazy import LazyGroup

#: The line of help of each command, in the order in which they are shown.
COMMANDS = {
    "serve": "Serve models over HTTP, as one config file says.",
    "frontend": "Run the frontend of a config in this process.",
    "worker": "Run one worker of a config in this process.",
    "check": "Load a config and its plugins without starting anything.",
    "plugins": "List the plugins that are installed, and what the config loads.",
    "config": "Show the settings in force, their origins, and their schema.",
    "key": "Make API keys for clients.",
    "route": "Ask a running frontend where requests go.",
    "workers": "List running workers, and take them out of service.",
    "reload": "Have a running server read its settings again.",
    "new": "Write a new plugin package to start from.",
}

#: Commands that other distributions bring, so that one that is missing can be named.
OPTIONAL_COMMANDS = {"conformance": "dynamo-testing"}


def _print_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from importlib_metadata import version

    click.echo(f"dynamo-core {version('dynamo-core')}")
    ctx.exit()


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    optional=OPTIONAL_COMMANDS,
    package="dynamo_runtime.cli",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Serve large language models; every stage is a plugin that one config file picks by name."""


def main() -> None:
    """Run the command and exit with its code: 0 when all went well, 2 when the set-up or the call is wrong."""
    garbage_collector.raise_thresholds()
    cli(prog_name="dynamo")


if __name__ == "__main__":
    main()
