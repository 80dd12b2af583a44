"""The official client of Ollama against `dynamo serve`, with the API beside that of OpenAI, and alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ollama
import pytest

CONFIG = """
frontend: [{use: openai}, {use: ollama}]
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 1}
    grace_period: 0
  script:
    model: {name: scripted, tool_call_parser: hermes, reasoning_parser: qwen3}
    engine:
      use: mocker
      fixed_itl_ms: 1
    grace_period: 0
"""
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
OPTIONS = {"num_predict": 5, "temperature": 0.5, "num_ctx": 4096}


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Any:
    return serve_for_module(CONFIG)


@pytest.fixture
def client(server: Any) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, timeout=90) as client:
        yield client


def test_a_chat_is_the_same_streamed_and_whole(client: ollama.Client) -> None:
    whole = client.chat("mock-model", MESSAGES, options=OPTIONS, keep_alive="5m")
    parts = list(client.chat("mock-model:latest", MESSAGES, options=OPTIONS, stream=True))

    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    for last in (parts[-1], whole):
        assert (last.done_reason, last.eval_count, last.model) == ("length", 5, "mock-model")
        assert last.prompt_eval_count
        assert last.eval_duration
    assert len(parts) > 1


def test_a_prompt_is_answered_with_and_without_the_template(client: ollama.Client) -> None:
    shown = client.generate("mock-model", "Hi", system="Be kind.", options=OPTIONS)
    raw = client.generate("mock-model", "Hi", raw=True, options=OPTIONS)
    parts = list(client.generate("mock-model", "Hi", raw=True, options=OPTIONS, stream=True))

    assert len(shown.response or "") == 5
    assert (shown.prompt_eval_count or 0) > (raw.prompt_eval_count or 0) == 2
    assert "".join(part.response or "" for part in parts) == raw.response
    assert client.generate("mock-model").done_reason == "load"


def test_texts_are_embedded(client: ollama.Client) -> None:
    one = client.embed("mock-model", "Hi", dimensions=8)
    several = client.embed("mock-model", ["Hi", "Ho"])
    older = client.embeddings("mock-model", "Hi")

    assert [len(vector) for vector in one.embeddings] == [8]
    assert [len(vector) for vector in several.embeddings] == [64, 64]
    assert older.embedding == several.embeddings[0]


def test_models_are_listed_and_shown(client: ollama.Client) -> None:
    shown = client.show("scripted")

    assert [model.model for model in client.list().models] == ["mock-model", "scripted"]
    assert [model.model for model in client.ps().models] == ["mock-model", "scripted"]
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities or ())
    assert (shown.modelinfo or {})["general.basename"] == "scripted"


def test_errors_are_those_of_the_client(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as missing:
        client.chat("nope", MESSAGES)
    with pytest.raises(ollama.ResponseError, match="'nope' not found"):
        list(client.chat("nope", MESSAGES, stream=True))
    with pytest.raises(ollama.ResponseError) as refused:
        client.pull("mock-model")

    assert (missing.value.status_code, missing.value.error) == (404, "model 'nope' not found")
    assert (refused.value.status_code, "workers of the config" in refused.value.error) == (501, True)


def test_the_openai_api_is_served_beside_ollamas(server: Any) -> None:
    assert server.request("GET", "/v1/models")[0] == 200
    assert server.request("HEAD", "/")[0] == 200
    assert server.request("GET", "/")[2].decode() == "Ollama is running"
    assert server.request("DELETE", "/api/delete")[0] == 501
