"""The description of the API is true: it has every route and every field, and refuses what the frontend refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from dynamo_core import ListenerName, ResponseStoreServices
from dynamo_plugin_frontend_responses.memory_store import MemoryStore, MemoryStoreConfig
from dynamo_runtime.settings import FLAGS
from dynamo_telemetry import Metrics

#: A field that is refused together with each body, as nothing can be wrong with it but its name.
STRANGE = "no_such_field"


@pytest.fixture
async def description(server: Any) -> dict[str, Any]:
    """Return the description of a started server."""
    reply = await server.get("/openapi.json")
    assert reply.headers["content-type"].startswith("application/json")
    found: dict[str, Any] = reply.json()
    return found


def body_schema(description: dict[str, Any], operation: dict[str, Any]) -> dict[str, Any]:
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    found: dict[str, Any] = description["components"]["schemas"][reference.rpartition("/")[2]]
    return found


def operations(description: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


async def test_every_route_of_the_frontend_is_described_and_no_other(server: Any, description: dict[str, Any]) -> None:
    routes = [route for route in server.frontend.routes() if route.listener is ListenerName.PUBLIC]
    served = {(route.method, re.sub(r":[^}]*\}", "}", route.path)) for route in routes}

    assert {(method, path) for method, path, _ in operations(description)} == served
    assert ("GET", "/v1/models/{id}/ready") in served
    assert all(operation["summary"] for _, _, operation in operations(description))
    assert (description["openapi"], "version" in description["info"]) == ("3.1.0", True)


async def test_every_reference_leads_somewhere(description: dict[str, Any]) -> None:
    found = set(references(description))

    assert found
    for reference in found:
        assert reference.removeprefix("#/components/schemas/") in description["components"]["schemas"]


async def test_the_fields_described_are_those_accepted(server: Any, description: dict[str, Any]) -> None:
    """A request with all of them and one more is refused for that one alone."""
    seen = 0
    for method, path, operation in operations(description):
        if method != "POST":
            continue
        seen += 1
        schema = body_schema(description, operation)
        assert schema["additionalProperties"] is False
        names = dict.fromkeys(schema["properties"]) | sound(path)
        reply = await server.post(path, {**names, STRANGE: 1})
        message = reply.json()["error"]["message"]
        assert re.findall(r"`(\w+)`", message) == [STRANGE], (path, message)
        for name in schema.get("required", ()):
            lacking = {key: value for key, value in sound(path).items() if key != name}
            reply = await server.post(path, lacking)
            assert (reply.status, name in reply.json()["error"]["message"]) == (400, True), (path, name)
    assert seen == 14


async def test_neutral_only_fields_are_described_with_their_allowed_values(
    server: Any, description: dict[str, Any]
) -> None:
    for path, name, good, bad in (
        ("/v1/responses", "background", [None, False], True),
        ("/v1/messages", "mcp_servers", [None, []], [{"url": "x"}]),
        ("/tokenize", "mm_processor_kwargs", [None], {"a": 1}),
    ):
        field = body_schema(description, description["paths"][path]["post"])["properties"][name]
        assert field["enum"] == good
        reply = await server.post(path, {**sound(path), name: bad})
        assert (reply.status, name in reply.json()["error"]["message"]) == (400, True)


def sound(path: str) -> dict[str, Any]:
    """Return the fewest fields that a request needs."""
    messages = [{"role": "user", "content": "Hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"model": "m", "messages": messages},
        "/v1/completions": {"model": "m", "prompt": "Hi"},
        "/v1/embeddings": {"model": "m", "input": "Hi"},
        "/v1/messages": {"model": "m", "messages": messages, "max_tokens": 5},
        "/v1/messages/count_tokens": {"model": "m", "messages": messages},
        "/v1/responses": {"model": "m", "input": "Hi"},
        "/v1/responses/input_tokens": {"model": "m", "input": "Hi"},
        "/tokenize": {"model": "m", "prompt": "Hi"},
        "/detokenize": {"model": "m", "tokens": [1]},
    }
    if path.endswith("score"):
        return {"model": "m", "text_1": "Hi", "text_2": "Ho"}
    if path.endswith("rerank"):
        return {"model": "m", "query": "Hi", "documents": ["Ho"]}
    return bodies[path]


async def test_the_page_needs_nothing_from_elsewhere(cold_server: Any) -> None:
    cold_server.config = cold_server.config.model_copy(update={"openapi_path": "/api.json"})
    await cold_server.start()

    page = await cold_server.get("/docs")

    text = page.body.decode()
    assert page.headers["content-type"].startswith("text/html")
    assert 'fetch("/api.json")' in text
    assert "{{" not in text
    assert not re.search(r"https?://|src=|@import", text)
    assert (await cold_server.get("/api.json")).status == 200


async def test_all_paths_can_be_changed(cold_server: Any) -> None:
    fields = type(cold_server.config).model_fields
    names = [name for name in fields if name.endswith("_path")]
    cold_server.response_store = MemoryStore(MemoryStoreConfig(), ResponseStoreServices(Metrics()))
    several = [name for name in fields if name.endswith("_paths")]
    changed: dict[str, Any] = {name: f"/x/{name}" for name in names} | {name: (f"/x/{name}",) for name in several}
    cold_server.config = cold_server.config.model_copy(update=changed)
    cold_server.add_model()
    await cold_server.start()

    described = (await cold_server.get("/x/openapi_path")).json()

    assert {path.split("/")[2] for path in described["paths"]} == {*names, *several}
    assert all(path.startswith("/x/") for path in described["paths"])


def test_the_short_environment_names_set_paths_that_exist(cold_server: Any) -> None:
    names = {flag.env: flag.path for flag in FLAGS if flag.env and flag.env.startswith("DYN_HTTP_SVC_")}

    assert {"DYN_HTTP_SVC_CHAT_PATH", "DYN_HTTP_SVC_CMP_PATH", "DYN_HTTP_SVC_MODELS_PATH"} <= set(names)
    for section, key in names.values():
        assert section == "frontend"
        assert key in type(cold_server.config).model_fields
