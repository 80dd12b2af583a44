"""``dynamo serve``: runs everything that one config file describes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
from dynamo_core.errors import ConfigError

from dynamo_runtime.cli.options import config_options, flag_options, load

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

#: Switches on the checks of every stream that an engine yields.
VALIDATOR = "DYN_STREAM_VALIDATOR"

#: The number of a process among the like.
REPLICA = click.IntRange(min=0)


def serve_options(command: CommandT) -> CommandT:
    """Return what `serve`, `frontend` and `worker` have in common."""
    decorators = [
        config_options,
        flag_options,
        click.option(
            "--dev", is_flag=True, help="Check every stream of the engines against the contract as it passes."
        ),
    ]
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def run(
    ctx: click.Context,
    *,
    dev: bool,
    only: str | None = None,
    worker: str | None = None,
    replica: int | None = None,
    **options: Any,
) -> None:
    """Serve, and exit with the code of that. `only` names one part, as the option does; or `worker` one worker.

    Raises:
        ConfigError: the settings are wrong, or there is no such worker.
    """
    from dynamo_runtime.app import serve
    from dynamo_runtime.settings.known_keys import suggestion

    loaded = load(**options)
    if worker is not None:
        known = loaded.settings.workers
        if worker not in known:
            raise ConfigError(f"worker {worker}: there is no such worker{suggestion(worker, known)}")
        only = f"workers.{worker}"
    if dev:
        os.environ.setdefault(VALIDATOR, "1")
    # A supervisor gives its children the words it was given itself.
    ctx.exit(serve(loaded, only=only, replica=replica, arguments=sys.argv[2:]))


@click.command()
@serve_options
@click.option("--only", metavar="PART", help="Run one part in this process: frontend, or workers.NAME.")
@click.option("--replica", type=REPLICA, help="With --only: which of several processes of that part this is.")
@click.pass_context
def command(ctx: click.Context, /, dev: bool, only: str | None, replica: int | None, **options: Any) -> None:
    """Serve models over HTTP, as one config file says.

    Without a config file the built-in example runs: the mock engine behind the OpenAI API on http://127.0.0.1:8000.
    Settings are taken, the later winning, from the file, the profile, the environment (DYN_SECTION__KEY), --set, and
    the options below. With a transport that reaches other processes this command supervises one process per worker
    replica and one for the frontend, or as many as frontend.processes says.
    """
    run(ctx, dev=dev, only=only, replica=replica, **options)
