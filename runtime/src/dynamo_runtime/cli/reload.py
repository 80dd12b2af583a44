"""``dynamo reload``: make a running server read its settings again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import click
from dynamo_http.admin_client import AdminClient, admin_options, reason_of

from dynamo_runtime.cli.options import json_option
from dynamo_runtime.cli.table import format_table

PATH = "/admin/reload"

_CHANGES = ("KEY", "OLD", "NEW", "ORIGIN", "TAKES EFFECT")
_PROCESSES = ("PROCESS", "PID", "RESULT", "")
#: Longer values are cut, as lists of keys may be.
_WIDEST = 60
#: What is said below the tables of a reload that went well.
_WORDS = {
    "unchanged": "Nothing has changed.",
    "checked": "Nothing was applied: this was a dry run.",
    "applied": "Applied.",
}


# Several processes are asked, which takes longer than other requests of operators.
@click.command(context_settings={"default_map": {"timeout": 60.0}})
@click.option("--dry-run", is_flag=True, help="Only say what would change.")
@admin_options
@json_option
@click.pass_context
def command(ctx: click.Context, /, dry_run: bool, as_json: bool, **frontend: Any) -> None:
    """Have a running server read its settings again and apply what changed.

    The server reads its config file and the secrets and certificates that it names, with the variables and options that
    it was started with. It checks all of it in every process, and then applies it in every process. A change that needs
    a restart is refused, with all others. Values that were set through the API stand. Exit code 1: the server refuses,
    or could not apply it; 2: the settings are wrong, as for `dynamo check`, or the server cannot be asked.
    """
    path = f"{PATH}?dry_run=1" if dry_run else PATH
    status, answer = asyncio.run(AdminClient.of(ctx, **frontend).ask("POST", path))
    report = isinstance(answer, dict) and "changes" in answer
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    elif report and (text := _show(answer)):
        click.echo(text)
    if status != 200:
        if not as_json:
            click.echo(f"dynamo: {reason_of(answer)} ({status})", err=True)
        ctx.exit(2 if report and answer["status"] == "invalid" else 1)


def _show(report: dict[str, Any]) -> str:
    changes = [
        [row["key"], _value(row["old"]), _value(row["new"]), row["origin"], "now" if row["live"] else "after a restart"]
        for row in report["changes"]
    ]
    standing = [
        f"{row['key']} is {_value(row['value'])}, as the {row['origin']} has set it." for row in report["standing"]
    ]
    processes = [[row["name"], str(row["pid"] or "-"), row["result"], row["reason"]] for row in report["processes"]]
    parts = [
        format_table(_CHANGES, changes) if changes else "",
        "\n".join(standing),
        format_table(_PROCESSES, processes) if processes else "",
        _WORDS.get(report["status"], ""),
    ]
    return "\n\n".join(part for part in parts if part)


def _value(value: Any) -> str:
    text = "-" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
