"""``dynamo worker NAME``: one worker alone, as a container runs it."""

from __future__ import annotations

from typing import Any

import click

from dynamo_core.cli.serve import REPLICA, run, serve_options


@click.command()
@click.argument("name")
@serve_options
@click.option("--replica", type=REPLICA, help="Which of several processes of this worker this is, counted from 0.")
@click.pass_context
def command(ctx: click.Context, /, name: str, dev: bool, replica: int | None, **options: Any) -> None:
    """Run one worker of a config in this process; the same as ``serve --only workers.NAME``."""
    run(ctx, dev=dev, worker=name, replica=replica, **options)
