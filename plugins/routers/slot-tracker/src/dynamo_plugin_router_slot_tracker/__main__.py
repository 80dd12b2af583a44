"""``python -m dynamo_plugin_router_slot_tracker``: the service, as ``dynamo slot-tracker`` runs it."""

import sys

import click
from dynamo_core.errors import ConfigError

from dynamo_plugin_router_slot_tracker.command import command

if __name__ == "__main__":
    try:
        command(prog_name="python -m dynamo_plugin_router_slot_tracker")
    except ConfigError as error:
        click.echo(f"dynamo: {' '.join(str(error).split())}", err=True)
        sys.exit(2)
