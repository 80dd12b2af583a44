"""``dynamo why``: the history of one request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import click
from dynamo_http import AdminClient, admin_options, reason_of

from dynamo_plugin_extension_feed.missing_feed import feed_error, is_unserved

PATH = "/admin/requests"


@click.command()
@click.argument("request_id", metavar="REQUEST_ID")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@admin_options
@click.pass_context
def command(ctx: click.Context, /, request_id: str, as_json: bool, **frontend: Any) -> None:
    """Show what happened to a request of any frontend: waits, candidates, attempts, moves, end.

    REQUEST_ID is the id that logs and the header x-request-id of the answer show, or the client's own id. The frontends
    run the extension feed, and keep the last requests. Exit code 1: no frontend knows the request; 2: the frontend
    cannot be asked.
    """
    client = AdminClient.of(ctx, **frontend)
    status, answer = asyncio.run(client.ask("GET", f"{PATH}/{quote(request_id, safe='')}"))
    if status not in (200, 404) or is_unserved(status, answer):
        raise feed_error(client, status, answer)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    elif status == 200:
        click.echo("\n".join(history_lines(answer)))
    if status != 200:
        if not as_json:
            click.echo(f"dynamo: {reason_of(answer)} ({status})", err=True)
        ctx.exit(1)


def history_lines(answer: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the answer for people."""
    request, frontend = answer["request"], answer["frontend"]
    called = f" (the client's id: {request['x_request_id']})" if request["x_request_id"] else ""
    key = f", key {request['key_id']}" if request["key_id"] else ""
    yield f"Request {request['id']}{called}"
    yield f"  {request['model']}, {request['endpoint']}, {request['request_type']}; tenant {request['tenant']}{key}"
    yield f"  frontend {frontend['id']} on {frontend['host'] or 'an unknown host'}, pid {frontend['pid']}"
    yield f"  trace {request['trace_id']}"
    yield ""
    for event in request["events"]:
        first, *more = _WORDS[event["event"]](event)
        yield f"{event['at']:>10.3f} s  {first}"
        for line in more:
            yield f"{'':14}{line}"
    if not request["ended"]:
        yield f"{'':12}  it has not ended yet"
    for one, reason in answer["missing"].items():
        yield f"Frontend {one} did not answer: {reason}"


def _received(event: dict[str, Any]) -> Iterator[str]:
    yield "received"


def _admitted(event: dict[str, Any]) -> Iterator[str]:
    yield f"admitted after {_time(event['waited'])}, {event['prompt_tokens']} prompt tokens"


def _refused(event: dict[str, Any]) -> Iterator[str]:
    by = f" by {event['plugin']}" if event["plugin"] else ""
    yield f"refused at {event['stage']}{by} after {_time(event['waited'])}: {_cause(event)}"
    if event["retry_after"] is not None:
        yield f"the client may try again after {event['retry_after']:g} s"


def _routed(event: dict[str, Any]) -> Iterator[str]:
    after = f" again, after {event['after']}" if event["after"] else ""
    candidates = event["candidates"] or ()
    blocks = f"{event['overlap']} block{'' if event['overlap'] == 1 else 's'}"
    # A router without costs knows nothing of caches.
    holds = f", which holds {blocks} of the prompt" if candidates or event["overlap"] else ""
    yield (
        f"routed{after} by {event['router']} in {_time(event['seconds'])}: {event['role']} worker {_worker(event)}, "
        f"rank {event['dp_rank']}{holds}"
    )
    if candidates:
        yield f"  {'WORKER':<18}{'RANK':>5}{'OVERLAP':>9}{'PREFILL':>9}{'BLOCKS':>8}{'COST':>10}"
    for one in candidates:
        chosen = (one["worker"], one["dp_rank"]) == (event["worker"], event["dp_rank"])
        name = one.get("worker_name") or one["worker"]
        yield (
            f"{'*' if chosen else ' '} {name:<18}{one['dp_rank']:>5}{one['overlap']:>9}"
            f"{one['prefill_tokens']:>9}{one['blocks']:>8}{one['cost']:>10.2f}"
        )


def _attempted(event: dict[str, Any]) -> Iterator[str]:
    yield f"worker {_worker(event)} " + (f"did not accept: {_cause(event)}" if event["error"] else "accepted")


def _first_token(event: dict[str, Any]) -> Iterator[str]:
    yield "first token"


def _moved(event: dict[str, Any]) -> Iterator[str]:
    worker = f"worker {_worker(event)}" if event["worker"] else "the worker"
    yield f"{worker} failed after {event['tokens']} tokens, another is sought: {_cause(event)}"


def _finished(event: dict[str, Any]) -> Iterator[str]:
    how = event["finish_reason"] or "no finish reason" if event["status"] == "success" else event["error_type"]
    because = f": {event['reason']}" if event.get("reason") else ""
    # The head of a stream had gone out before it failed.
    cut = event["status"] == "error" and event.get("streamed")
    told = "the stream ended with an error event" if cut else f"HTTP {event['http_status']}"
    yield f"{event['status']}: {how}, {told}{because}"
    cached = "" if event["cached_tokens"] is None else f" ({event['cached_tokens']} of them cached)"
    yield f"{event['prompt_tokens']} prompt tokens{cached}, {event['output_tokens']} output tokens"
    if event["time_to_first_token"] is not None:
        yield f"first token after {_time(event['time_to_first_token'])}, {_time(event['duration'])} in all"


def _worker(event: dict[str, Any]) -> str:
    """Return the worker of an event, by its name and its id."""
    name = event.get("worker_name")
    return f"{name} ({event['worker']})" if name else str(event["worker"])


def _cause(event: dict[str, Any]) -> str:
    return f"{event['error']}: {event['reason']}" if event["reason"] else str(event["error"])


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.3f} s"


_WORDS: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "received": _received,
    "admitted": _admitted,
    "refused": _refused,
    "routed": _routed,
    "attempted": _attempted,
    "first_token": _first_token,
    "moved": _moved,
    "finished": _finished,
}
