"""``dynamo serve``: runs everything that one config file describes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from dynamo_core.cli.options import config_options, load
from dynamo_core.settings.flags import FLAGS, Flag

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

#: Switches on the checks of every stream that an engine yields.
VALIDATOR = "DYN_STREAM_VALIDATOR"


def _parameter(flag: Flag) -> str:
    return (flag.flag or "").removeprefix("--").replace("-", "_")


def _flag_options(command: CommandT) -> CommandT:
    """Adds an option for every row of the flag table that has one. What is not given stays None."""
    for flag in reversed(FLAGS):
        if flag.flag is not None:
            hint = f" [env: {flag.env}]" if flag.env else ""
            decorate = click.option(
                flag.flag, _parameter(flag), type=flag.type, default=None, help=f"{flag.help} Sets {flag.key}.{hint}"
            )
            command = decorate(command)
    return command


@click.command()
@config_options
@_flag_options
@click.option("--dev", is_flag=True, help="Check every stream of the engines against the contract as it passes.")
@click.pass_context
def command(ctx: click.Context, /, dev: bool, **options: Any) -> None:
    """Serve models over HTTP, as one config file says.

    Without a config file the built-in example runs: the mock engine behind the OpenAI API on http://127.0.0.1:8000.
    Settings are taken, the later winning, from the file, the profile, the environment (DYN_SECTION__KEY), --set, and
    the options below.
    """
    from dynamo_core.runtime.app import serve

    flags = {flag.flag: options.pop(_parameter(flag)) for flag in FLAGS if flag.flag is not None}
    loaded = load(**options, flags=flags)
    if dev:
        os.environ.setdefault(VALIDATOR, "1")
    ctx.exit(serve(loaded))
