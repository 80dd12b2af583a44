"""``dynamo workers``: list the workers of a running frontend, and take them out of service and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import click
from dynamo_core.errors import ConfigError
from dynamo_http.admin_client import AdminClient, admin_options, reason_of

from dynamo_runtime.cli.options import json_option
from dynamo_runtime.cli.table import format_table

PATH = "/admin/workers"
#: Seconds between two looks at a worker that drains.
LOOK = 0.5

_HEADER = ("ID", "NAME", "MODEL", "ROLE", "STATE", "REQUESTS", "HOST", "PID")


class _ListByDefault(click.Group):
    """Without the name of a command it lists."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = args and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["list", *args])


@click.group(cls=_ListByDefault)
def command() -> None:
    """List running workers, and take them out of service.

    A worker that is cordoned or draining gets no new requests from any frontend, and finishes what it has. It stays so
    until it is uncordoned or ends: a worker that is started again is in service. ID is the id of a worker, as logs show
    it, or its name and the number of its replica, such as mock-0. Exit code 1: the frontend refuses, or a worker has
    not drained in time; 2: the frontend cannot be asked.
    """


def _for_one_worker(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``ID`` and the options that all commands about one worker have."""
    return click.argument("worker", metavar="ID")(admin_options(json_option(click.pass_context(command))))


@command.command("list")
@admin_options
@json_option
@click.pass_context
def list_workers(ctx: click.Context, /, as_json: bool, **frontend: Any) -> None:
    """List the workers with their states and running requests of all frontends; - if a worker does not answer."""
    answer = asyncio.run(_ask(AdminClient.of(ctx, **frontend), "GET", PATH))
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        click.echo(format_table(_HEADER, [_row(worker) for worker in answer["workers"]]))


@command.command("cordon")
@_for_one_worker
def cordon(ctx: click.Context, /, worker: str, as_json: bool, **frontend: Any) -> None:
    """Send a worker no new requests."""
    _print(asyncio.run(_change(AdminClient.of(ctx, **frontend), worker, "cordon")), as_json)


@command.command("uncordon")
@_for_one_worker
def uncordon(ctx: click.Context, /, worker: str, as_json: bool, **frontend: Any) -> None:
    """Send a worker requests again, after cordon or drain."""
    _print(asyncio.run(_change(AdminClient.of(ctx, **frontend), worker, "uncordon")), as_json)


@command.command("drain")
@click.option(
    "--wait",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Return once the worker has no requests and no frontend sends it any; fail after so many seconds.",
)
@_for_one_worker
def drain(ctx: click.Context, /, worker: str, wait: float | None, as_json: bool, **frontend: Any) -> None:
    """Send a worker no new requests, since it is to be stopped."""
    _print(asyncio.run(_drain(AdminClient.of(ctx, **frontend), worker, wait)), as_json)


class _Refused(click.ClickException):
    """The request was refused. The exit code is 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"dynamo: {self.message}", err=True)


async def _ask(client: AdminClient, method: str, path: str) -> Any:
    status, answer = await client.ask(method, path)
    if status != 200:
        raise _Refused(f"{reason_of(answer)} ({status})")
    return answer


async def _change(client: AdminClient, worker: str, action: str) -> Any:
    return await _ask(client, "POST", f"{PATH}/{quote(worker, safe='')}/{action}")


async def _drain(client: AdminClient, worker: str, wait: float | None) -> Any:
    entry = await _change(client, worker, "drain")
    if wait is None:
        return entry
    name = _name(entry)
    try:
        async with asyncio.timeout(wait):
            while not entry["drained"]:
                await asyncio.sleep(LOOK)
                entry = await _look(client, entry)
                if entry["state"] != "draining":
                    raise _Refused(f"{name} is {entry['state']} now: its state was changed while it drained")
    except TimeoutError:
        left = _what_is_left(entry)
        raise _Refused(f"{name} {left} after {wait:g} s; it stays draining: wait longer, or stop it") from None
    return entry


async def _look(client: AdminClient, entry: dict[str, Any]) -> Any:
    """Return what is known of a worker now. A frontend that is being restarted knows nothing new."""
    try:
        status, answer = await client.ask("GET", f"{PATH}/{entry['id']}")
    except ConfigError:
        return entry
    if status == 404:
        raise _Refused(f"{_name(entry)} has left while it drained")
    return answer if status == 200 else entry


def _print(entry: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(entry, indent=2))
        return
    runs = "has drained" if entry["drained"] else f"runs {_requests(entry)}"
    click.echo(f"{_name(entry)} is {entry['state']} and {runs}")


def _what_is_left(entry: dict[str, Any]) -> str:
    if entry["requests"] is None:
        return "does not report"
    return f"still runs {_requests(entry)}" if entry["requests"] else "may still get requests of late callers"


def _requests(entry: dict[str, Any]) -> str:
    count = entry["requests"]
    return "1 request" if count == 1 else f"{count} requests"


def _name(entry: dict[str, Any]) -> str:
    return f"worker {entry['id']} ({entry['worker']}-{entry['replica']})"


def _row(entry: dict[str, Any]) -> list[str]:
    requests = entry["requests"]
    return [
        entry["id"],
        f"{entry['worker']}-{entry['replica']}",
        entry["model"],
        entry["role"],
        entry["state"],
        "-" if requests is None else str(requests),
        entry["host"] or "-",
        "-" if entry["pid"] is None else str(entry["pid"]),
    ]
