"""``dynamo worker NAME``: one worker alone, as a container runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click
from dynamo_core.errors import ConfigError

from dynamo_runtime.cli.serve import REPLICA, run, serve_options

#: Commands of `dynamo workers`, which are one letter away.
_OF_WORKERS: Final = frozenset({"cordon", "uncordon", "drain"})


@click.command()
@click.argument("name")
@serve_options
@click.option("--replica", type=REPLICA, help="Which of several processes of this worker this is, counted from 0.")
@click.pass_context
def command(ctx: click.Context, /, name: str, dev: bool, replica: int | None, **options: Any) -> None:
    """Run one worker of a config in this process; the same as ``serve --only workers.NAME``."""
    subject = options.get("config")
    if name in _OF_WORKERS and subject is not None and not Path(subject).exists():
        raise ConfigError(f"worker runs a worker; to take one out of service: dynamo workers {name} {subject}")
    run(ctx, dev=dev, worker=name, replica=replica, **options)
