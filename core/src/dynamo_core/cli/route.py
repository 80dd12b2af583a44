"""``dynamo route``: asks a running frontend where requests go."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from dynamo_core.cli.options import json_option
from dynamo_core.cli.table import format_table
from dynamo_core.errors import ConfigError
from dynamo_core.protocol.reading import Unreadable, read_json

PATH = "/route/explain"
#: Where a frontend is that nothing was said of.
EXAMPLE = "http://127.0.0.1:8000"

_HEADER = ("", "WORKER", "NAME", "RANK", "STATE", "REQUESTS", "PREFILL", "BLOCKS", "SHARED", "OVERLAP", "COST")


@click.group()
def command() -> None:
    """Ask a running frontend where requests go."""


@command.command("explain")
@click.argument("prompt", required=False)
@click.option(
    "--url",
    envvar="DYN_ADMIN_URL",
    show_envvar=True,
    help="The frontend: its admin listener, if it has one. Without it this host is asked, on the port that "
    "DYN_HTTP_PORT names, or 8000.",
)
@click.option("--model", metavar="NAME", help="The model; not needed where only one is served.")
@click.option("--messages", metavar="JSON", help="A conversation instead of a prompt, as a JSON list; @FILE reads it.")
@click.option("--token-ids", metavar="IDS", help="Tokens instead of a prompt, divided by commas.")
@click.option(
    "--token", envvar="DYN_ADMIN_TOKEN", show_envvar=True, help="What the frontend asks operators for, its admin.token."
)
@click.option("--ca", type=click.Path(path_type=Path), help="PEM file with the authority of its certificate.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True)
@json_option
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    prompt: str | None,
    url: str | None,
    model: str | None,
    messages: str | None,
    token_ids: str | None,
    token: str | None,
    ca: Path | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Show where a prompt would go now, and why.

    For every worker and rank: what it has to do (requests, prompt tokens to be computed, blocks held), how many blocks
    of the prompt its cache holds (overlap) and running requests hold there (shared), and the cost, where the router
    goes by such things. The cheapest rank is marked with *. Nothing is reserved. Exit code 1: the frontend refuses;
    2: it cannot be asked.
    """
    body = _body(prompt, messages, token_ids)
    if model is not None:
        body["model"] = model
    status, answer = asyncio.run(_post(_address(ctx, url), body, token, ca, timeout))
    if status != 200:
        click.echo(f"dynamo: {_reason(answer)} ({status})", err=True)
        ctx.exit(1)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        click.echo("\n\n".join(_show(answer["model"], route) for route in answer["routes"]))


@dataclass(frozen=True, slots=True)
class _Address:
    """Where the frontend is, and how errors name it: by what the user has set."""

    url: str
    name: str


def _address(ctx: click.Context, url: str | None) -> _Address:
    if url is not None:
        typed = ctx.get_parameter_source("url") is ParameterSource.COMMANDLINE
        return _Address(url, f"{'--url' if typed else 'DYN_ADMIN_URL'} {url}")
    port = os.environ.get("DYN_HTTP_PORT") or ""
    if port and not port.isdecimal():
        raise ConfigError(f"DYN_HTTP_PORT: {port!r} is no port; give --url such as {EXAMPLE}")
    here = f"http://127.0.0.1:{port}" if port else EXAMPLE
    return _Address(here, f"{here} (from DYN_HTTP_PORT)" if port else f"{here} (--url names another)")


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
        return read_json(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except OSError as error:
        raise ConfigError(f"--messages: {text[1:]} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--messages: is no JSON: {error}") from None


async def _post(
    address: _Address, body: dict[str, Any], token: str | None, ca: Path | None, timeout: float
) -> tuple[int, Any]:
    """Status and answer of the frontend.

    Raises:
        ConfigError: there is none, or it is something else.
    """
    import ssl

    import aiohttp

    if not address.url.startswith(("http://", "https://")):
        raise ConfigError(f"{address.name}: is no address of a frontend; give one such as {EXAMPLE}")
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        trusted = True if ca is None else ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        raise ConfigError(f"--ca {ca}: cannot be used: {error}") from None
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session,
            session.post(f"{address.url.rstrip('/')}{PATH}", json=body, headers=headers, ssl=trusted) as response,
        ):
            text = await response.read()
            status = response.status
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        why = str(error) or f"no answer within {timeout:g} s"
        raise ConfigError(f"{address.name}: cannot be asked: {why}") from None
    try:
        return status, read_json(text)
    except Unreadable:
        raise ConfigError(f"{address.name}: answered {status}, and not as a frontend does") from None


def _reason(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "the frontend refuses")


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
