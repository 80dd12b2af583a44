"""``dynamo frontend``: the frontend alone, as a container runs it."""

from __future__ import annotations

from typing import Any

import click

from dynamo_runtime.cli.serve import run, serve_options


@click.command()
@serve_options
@click.pass_context
def command(ctx: click.Context, /, dev: bool, **options: Any) -> None:
    """Run the frontend of a config in this process; the same as ``serve --only frontend``."""
    run(ctx, dev=dev, only="frontend", **options)
