"""``dynamo key``: make API keys. The config holds their hashes; a key is shown once, and kept nowhere."""

from __future__ import annotations

import json

import click

from dynamo_runtime.cli.options import json_option


@click.group()
def command() -> None:
    """Make API keys."""


@command.command("new")
@click.option("--id", "name", default="client", show_default=True, help="The name of the key, for the entry.")
@json_option
def new(name: str, as_json: bool) -> None:
    """Make a key and print it once, with the entry for `auth.keys` that lets it in.

    The key is for the client, the entry for the config. `admin.token` takes such a hash too.
    """
    from dynamo_http.auth import hash_of, new_key

    key = new_key()
    if as_json:
        click.echo(json.dumps({"id": name, "key": key, "hash": hash_of(key)}))
        return
    click.echo(f"key:   {key}")
    click.echo(f"entry: {{id: {name}, hash: {json.dumps(hash_of(key))}}}")
    click.echo("The key is not kept anywhere: note it now.", err=True)
