"""The sections on the HTTP API: routes, fields without effect, limits of fields."""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dynamo_generation.bodies import limits
from dynamo_runtime.assembly.process_lifecycle import Application
from dynamo_runtime.assembly.process_roles import role_of
from dynamo_runtime.settings import load_settings
from dynamo_testing.servers.ports import free_port

from scripts.pages.tables import code, table

#: A deployment with operators' routes on a listener of their own. The API of Ollama has a page of its own.
_EVERYTHING = """
frontend: [{use: openai, port: %d, response_store: {use: memory}}, {use: responses}, {use: anthropic}]
admin: {port: %d}
client: {drain_grace: 0, shutdown_timeout: 1}
workers: {mock: {model: {name: mock-model}, engine: {use: mocker}, grace_period: 0}}
"""
#: The requests whose fields the page lists, by the name of their schema.
REQUESTS = {
    "ChatRequest": "chat",
    "CompletionRequest": "completions",
    "EmbeddingRequest": "embeddings",
    "PairsRequest": "scores",
    "RerankRequest": "rerank",
    "MessagesRequest": "Messages",
    "RememberedRequest": "Responses",
    "TokenizeRequest": "tokenize",
}
_TYPES = {"string": "a text", "object": "an object of texts", "array": "a list"}


@cache
def described() -> dict[str, dict[str, Any]]:
    """Return the description of each listener, OpenAPI 3.1."""
    ports = {"public": free_port(), "operators": free_port()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(_EVERYTHING % tuple(ports.values()))
        return asyncio.run(_described(path, ports))


async def _described(config: Path, ports: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    loaded = load_settings(config, env={})
    async with Application(loaded, role_of(loaded.settings, None)) as application:
        await application.start()
        return {name: await asyncio.to_thread(_fetched, port) for name, port in ports.items()}


def _fetched(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json", timeout=10) as answer:
        return dict(json.load(answer))


def _routes() -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for listener, document in described().items():
        for route, methods in document["paths"].items():
            for method, operation in methods.items():
                rows.setdefault((code(f"{method.upper()} {route}"), operation["summary"]), []).append(listener)
    return table(("Route", "Answer", "Listener"), ((*row, ", ".join(listeners)) for row, listeners in rows.items()))


def fields(schema: str) -> dict[str, dict[str, Any]]:
    """Return the fields of a schema of the public listener, by name."""
    properties: dict[str, dict[str, Any]] = described()["public"]["components"]["schemas"][schema]["properties"]
    return properties


def is_passive(field: Mapping[str, Any]) -> bool:
    """Return whether a field has no effect: its description says that it is accepted, and no more."""
    return str(field.get("description", "")).startswith("Accepted ")


def _passive() -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for schema, request in REQUESTS.items():
        for name, field in fields(schema).items():
            if is_passive(field):
                rows.setdefault((code(name), values_of(field)), []).append(request)
    sharing: dict[tuple[str, str], list[str]] = {}
    for (name, values), requests in rows.items():
        sharing.setdefault((values, ", ".join(requests)), []).append(name)
    return table(
        ("Field", "Values", "Requests"),
        ((", ".join(sorted(names)), values, requests) for (values, requests), names in sharing.items()),
    )


def values_of(field: Mapping[str, Any]) -> str:
    """Return the values of a field that has no effect, beside null."""
    if "enum" in field:
        values = [code(json.dumps(value)) for value in field["enum"] if value is not None]
        return ", ".join(values) or "only `null`"
    if "enum" in field.get("items", ()):
        return "a list of " + ", ".join(map(code, sorted(field["items"]["enum"])))
    return _TYPES[field["type"][0]] if isinstance(field.get("type"), list) else "any"


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
