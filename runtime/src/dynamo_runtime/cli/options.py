"""The options that all commands with a config file share, and the settings they lead to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from dynamo_core.errors import ConfigError

from dynamo_runtime.settings.flag_table import FLAGS, Flag

if TYPE_CHECKING:
    from dynamo_runtime.settings import LoadedSettings, SettingsView

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def config_options(command: CommandT) -> CommandT:
    """Add ``[CONFIG]``, ``--config``, ``--profile`` and ``--set``."""
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


def _parameter(flag: Flag) -> str:
    return (flag.flag or "").removeprefix("--").replace("-", "_")


def flag_options(command: CommandT) -> CommandT:
    """Add an option for every row of the flag table that has one, and ``--model``. What is not given stays None."""
    command = click.option(
        "--model",
        metavar="PATH|NAME",
        default=None,
        help="The model: a folder, which also names it, or a name that the engine knows. "
        "Sets workers.*.model.path and workers.*.model.name.",
    )(command)
    for flag in reversed(FLAGS):
        if flag.flag is not None:
            hint = f" [env: {flag.env}]" if flag.env else ""
            # One that is on or off has a second spelling: --router-kv-events, --no-router-kv-events.
            spelling = flag.flag if flag.type is not bool else f"{flag.flag}/--no-{flag.flag.removeprefix('--')}"
            decorate = click.option(
                spelling, _parameter(flag), type=flag.type, default=None, help=f"{flag.help} Sets {flag.key}.{hint}"
            )
            command = decorate(command)
    return command


def load(**options: Any) -> LoadedSettings:
    """Return the settings that the options of a command lead to; without a file, the built-in example.

    Raises:
        ConfigError: two files are named, or the settings are wrong.
    """
    # Imported here, as the models are not needed for a command's --help.
    from dynamo_runtime.settings import load_settings

    return load_settings(**_arguments(**options))


def view(**options: Any) -> SettingsView:
    """Load like `load`, to look at: secrets whose variable is not set are no error."""
    from dynamo_runtime.settings import view_settings

    return view_settings(**_arguments(**options))


def _arguments(
    config: Path | None,
    config_option: Path | None,
    profile: str | None,
    sets: tuple[str, ...],
    model: str | None = None,
    **flags: Any,
) -> dict[str, Any]:
    if config is not None and config_option is not None and config != config_option:
        raise ConfigError(f"two config files are named, {config} and --config {config_option}: name one")
    if model is not None:
        for name, value in _model(model).items():
            flags[name] = value if flags.get(name) is None else flags[name]
    names = {_parameter(flag): flag.flag for flag in FLAGS if flag.flag is not None}
    return {
        "path": config or config_option,
        "profile": profile,
        "env": os.environ,
        "sets": sets,
        "flags": {names[parameter]: value for parameter, value in flags.items()},
    }


def _model(text: str) -> dict[str, str]:
    """Return the parameters for ``--model``: a folder is the path and gives the name, anything else is a name.

    Raises:
        ConfigError: it can only be a folder, and there is none.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        return {"model_path": str(path), "model_name": path.resolve().name}
    if text.startswith((".", "/", "~")) or path.exists():
        raise ConfigError(f"--model {text}: there is no such folder; give the folder of a model, or the name of one")
    return {"model_name": text}
