"""Ollama's routes neither list a model that a key is not for, nor answer for it under either of its names."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_core import Frontend
from dynamo_http.auth import hash_of, new_key
from dynamo_http.settings import AuthSettings
from dynamo_plugin_frontend_ollama.frontend import OllamaFrontend

NARROW = new_key()
KEYS = AuthSettings.model_validate({"keys": [{"id": "narrow", "hash": hash_of(NARROW), "models": ["m"]}]})


@pytest.fixture
def apis() -> type[Frontend]:
    return OllamaFrontend


@pytest.fixture
def keys() -> AuthSettings:
    return KEYS


async def ask(server: Any, method: str, path: str, body: dict[str, Any]) -> Any:
    connection = await server.connect(limit=2**20)
    if method == "POST":
        connection.send(path, body, authorization=f"Bearer {NARROW}")
    else:
        connection.writer.write(f"GET {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {NARROW}\r\n\r\n".encode())
    return await connection.reply()


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps"])
async def test_lists_have_the_models_of_the_key(guarded: Any, path: str) -> None:
    listed = (await ask(guarded, "GET", path, {})).json()["models"]

    assert [model["name"].removesuffix(":latest") for model in listed] == ["m"]


@pytest.mark.parametrize("name", ["secret", "secret:latest"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}], "stream": False}),
        ("/api/generate", {"prompt": "Hi", "stream": False}),
        ("/api/embed", {"input": "Hi"}),
        ("/api/show", {}),
    ],
)
async def test_another_model_is_not_found(guarded: Any, path: str, fields: dict[str, Any], name: str) -> None:
    reply = await ask(guarded, "POST", path, {"model": name, **fields})

    assert (reply.status, reply.json()) == (404, {"error": f"model '{name}' not found"})
    assert guarded.directory.models["secret"].count == 0
