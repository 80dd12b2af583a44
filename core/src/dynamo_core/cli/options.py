"""The options that all commands with a config file share, and the settings they lead to."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dynamo_core.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_core.settings import LoadedSettings

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def config_options(command: CommandT) -> CommandT:
    """Adds ``[CONFIG]``, ``--config``, ``--profile`` and ``--set``."""
    decorators = [
        click.argument("config", required=False, type=click.Path(path_type=Path)),
        click.option(
            "--config",
            "config_option",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="The config file, YAML or TOML; the same as naming it without the option.",
        ),
        click.option("--profile", metavar="NAME", help="A profile of the config file to lay over it."),
        click.option(
            "--set",
            "sets",
            multiple=True,
            metavar="KEY=VALUE",
            help="Set one key, such as workers.mock.replicas=2; may be given more than once.",
        ),
    ]
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def load(
    config: Path | None,
    config_option: Path | None,
    profile: str | None,
    sets: tuple[str, ...],
    flags: Mapping[str, Any] | None = None,
) -> LoadedSettings:
    """The settings that the options of a command lead to; without a file, the built-in example.

    Raises:
        ConfigError: two files are named, or the settings are wrong.
    """
    # Imported here, as the models are not needed for a command's --help.
    from dynamo_core.settings import load_settings

    if config is not None and config_option is not None and config != config_option:
        raise ConfigError(f"two config files are named, {config} and --config {config_option}: name one")
    return load_settings(config or config_option, profile=profile, env=os.environ, sets=sets, flags=flags or {})
