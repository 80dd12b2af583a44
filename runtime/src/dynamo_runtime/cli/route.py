"""``dynamo route``: ask a running frontend where requests go."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import click
from dynamo_core.errors import ConfigError
from dynamo_core.files import read_file
from dynamo_core.protocol.decoding import read_json
from dynamo_http.admin_client import AdminClient, admin_options, reason_of

from dynamo_runtime.cli.options import json_option
from dynamo_runtime.cli.table import format_table

PATH = "/route/explain"

_HEADER = ("", "WORKER", "NAME", "RANK", "STATE", "REQUESTS", "PREFILL", "BLOCKS", "SHARED", "OVERLAP", "COST")


@click.group()
def command() -> None:
    """Ask a running frontend where requests go."""


@command.command("explain")
@click.argument("prompt", required=False)
@click.option("--model", metavar="NAME", help="The model; not needed where only one is served.")
@click.option("--messages", metavar="JSON", help="A conversation instead of a prompt, as a JSON list; @FILE reads it.")
@click.option("--token-ids", metavar="IDS", help="Tokens instead of a prompt, divided by commas.")
@click.option("--session", metavar="ID", help="The session of the request, for routers that go by it.")
@admin_options
@json_option
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    prompt: str | None,
    model: str | None,
    messages: str | None,
    token_ids: str | None,
    session: str | None,
    as_json: bool,
    **frontend: Any,
) -> None:
    """Show where a prompt would go now, and why.

    For every worker and rank: what it has to do (requests, prompt tokens to be computed, blocks held), how many blocks
    of the prompt its cache holds (overlap) and running requests hold there (shared), and the cost, where the router
    goes by such things. The rank that the router would choose is marked with *. Nothing is reserved. Exit code 1: the
    frontend refuses; 2: it cannot be asked.
    """
    body = _body(prompt, messages, token_ids)
    if model is not None:
        body["model"] = model
    if session is not None:
        body["nvext"] = {"session_id": session}
    status, answer = asyncio.run(AdminClient.of(ctx, **frontend).ask("POST", PATH, body))
    if status != 200:
        click.echo(f"dynamo: {reason_of(answer)} ({status})", err=True)
        ctx.exit(1)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        click.echo("\n\n".join(_show(answer["model"], route) for route in answer["routes"]))


def _body(prompt: str | None, messages: str | None, token_ids: str | None) -> dict[str, Any]:
    if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
        raise ConfigError("give exactly one of PROMPT, --messages and --token-ids")
    if messages is not None:
        return {"messages": _messages(messages)}
    if token_ids is not None:
        try:
            return {"token_ids": [int(part) for part in token_ids.split(",")]}
        except ValueError:
            raise ConfigError(
                f"--token-ids: expected numbers divided by commas, such as 1,2,3, got {token_ids!r}"
            ) from None
    return {"prompt": prompt}


def _messages(text: str) -> Any:
    try:
        return read_json(read_file(text[1:]).data if text.startswith("@") else text)
    except OSError as error:
        raise ConfigError(f"--messages: {text[1:]} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--messages: is no JSON: {error}") from None


def _show(model: str, route: dict[str, Any]) -> str:
    size, tokens = route["block_size"], route["tokens"]
    blocks = f", {tokens // size} blocks of {size}" if size else ""
    lines = [f"{route['role']} workers of {model}, chosen by {route['router']}: {tokens} tokens{blocks}"]
    if route["ranks"]:
        lines.append(format_table(_HEADER, [_row(rank) for rank in route["ranks"]]))
    if route["refusal"] is not None:
        lines.append(f"no worker can be chosen: {route['refusal']}")
    elif all(rank["best"] is None for rank in route["ranks"]):
        lines.append(f"{route['router']} reports no costs.")
    return "\n".join(lines)


def _row(rank: dict[str, Any]) -> list[str]:
    cost = rank["cost"]
    return [
        "*" if rank["best"] else "",
        rank["instance_id"],
        rank["worker"] or "-",
        str(rank["dp_rank"]),
        rank["state"],
        str(rank["requests"]),
        str(rank["prefill_tokens"]),
        str(rank["blocks"]),
        _or_dash(rank["shared"]),
        _or_dash(rank["overlap"]),
        "-" if cost is None else f"{cost:.2f}",
    ]


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
