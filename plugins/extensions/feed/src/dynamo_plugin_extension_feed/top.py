"""``dynamo top``: the state of a deployment in a terminal, as it changes."""

from __future__ import annotations

import asyncio
from typing import Any

import click
from dynamo_core.errors import ConfigError
from dynamo_http import AdminClient, admin_options

from dynamo_plugin_extension_feed.missing_feed import feed_error


@click.command()
@click.option(
    "--interval", type=click.FloatRange(min=0.2), default=1.0, show_default=True, help="Seconds between two looks."
)
@admin_options
@click.pass_context
def command(ctx: click.Context, /, interval: float, **frontend: Any) -> None:
    """Watch workers, models and requests of all frontends in the terminal.

    The frontends run the extension feed. Keys: 1 to 4 or Tab choose a view, s sorts by the next column and r turns the
    order round, / filters, Enter opens a request or a worker, p pauses, ? tells all keys, q ends.
    """
    client = AdminClient.of(ctx, **frontend)
    # It says what is wrong before the screen is taken.
    status, answer = asyncio.run(client.ask("GET", "/admin/state"))
    if status != 200:
        raise feed_error(client, status, answer)
    try:
        from dynamo_plugin_extension_feed.screen import Top
    except ImportError:
        raise ConfigError('needs textual: pip install "dynamo-plugin-extension-feed[top]"') from None
    Top(client.ask, interval, answer).run()
