"""The sections on the HTTP API: routes, fields without effect, limits of fields."""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dynamo_generation.bodies import limits
from dynamo_generation.requests import fields
from dynamo_runtime.assembly.application import Application
from dynamo_runtime.assembly.roles import role_of
from dynamo_runtime.settings import load_settings
from dynamo_testing.ports import free_port

from scripts.pages.tables import code, table

#: A deployment with every API and with operators' routes on a listener of their own.
_EVERYTHING = """
frontend: [{use: openai, port: %d, response_store: {use: memory}}, {use: responses}, {use: anthropic}]
admin: {port: %d}
client: {drain_grace: 0, shutdown_timeout: 1}
workers: {mock: {model: {name: mock-model}, engine: {use: mocker}, grace_period: 0}}
"""
#: The tables of fields that have no effect, by the requests that have them.
PASSIVE: dict[str, Mapping[str, fields.Accepts]] = {
    "chat": fields.CHAT,
    "completions": fields.COMPLETIONS,
    "scores": fields.SCORING,
    "Messages": fields.MESSAGES,
    "Responses": fields.RESPONSES,
    "Ollama chat": fields.OLLAMA_CHAT,
    "Ollama generate": fields.OLLAMA_GENERATE,
    "Ollama `options`": fields.OLLAMA_OPTIONS,
    "tokenize": fields.TOKENIZE,
}
_TYPES = {"string": "a text", "object": "an object of texts", "array": "a list"}


def _routes() -> str:
    public, admin = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(_EVERYTHING % (public, admin))
        described = asyncio.run(_described(path, {"public": public, "operators": admin}))
    rows: dict[tuple[str, str], list[str]] = {}
    for listener, paths in described.items():
        for route, methods in paths.items():
            for method, operation in methods.items():
                rows.setdefault((f"`{method.upper()} {route}`", operation["summary"]), []).append(listener)
    return table(("Route", "Answer", "Listener"), ((*row, ", ".join(listeners)) for row, listeners in rows.items()))


async def _described(config: Path, ports: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    loaded = load_settings(config, env={})
    async with Application(loaded, role_of(loaded.settings, None)) as application:
        await application.start()
        return {name: await asyncio.to_thread(_paths, port) for name, port in ports.items()}


def _paths(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json", timeout=10) as answer:
        paths: dict[str, Any] = json.load(answer)["paths"]
    return paths


def _passive() -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for request, known in PASSIVE.items():
        for name, accepts in known.items():
            rows.setdefault((code(name), values_of(accepts)), []).append(request)
    sharing: dict[tuple[str, str], list[str]] = {}
    for (name, values), requests in rows.items():
        sharing.setdefault((values, ", ".join(requests)), []).append(name)
    return table(
        ("Field", "Values", "Requests"),
        ((", ".join(sorted(names)), values, requests) for (values, requests), names in sharing.items()),
    )


def values_of(accepts: fields.Accepts) -> str:
    """Return the values of a field that has no effect, beside null."""
    schema = fields.schema_of(accepts)
    if "enum" in schema:
        values = [code(json.dumps(value)) for value in schema["enum"] if value is not None]
        return ", ".join(values) or "only `null`"
    if not schema:
        return "any"
    if "items" in schema:
        return "a list of " + ", ".join(map(code, sorted(schema["items"]["enum"])))
    return _TYPES[schema["type"][0]]


def _limits() -> str:
    def rows() -> Iterator[tuple[str, str]]:
        for unit, bounds in (("entries", limits.MAX_ENTRIES), ("characters", limits.MAX_CHARACTERS)):
            names: dict[int, list[str]] = {}
            for name, most in bounds.items():
                names.setdefault(most, []).append(name)
            for most, sharing in sorted(names.items()):
                yield f"{unit} of {', '.join(map(code, sorted(sharing)))}", f"{most:,}"
        yield (
            "pairs of `metadata`; characters of a key, of a value",
            ", ".join(map(str, (limits.MAX_PAIRS, limits.MAX_KEY, limits.MAX_VALUE))),
        )

    return table(("Limit", "At most"), rows())


SECTIONS: dict[str, Callable[[], str]] = {"routes": _routes, "passive-fields": _passive, "field-limits": _limits}
