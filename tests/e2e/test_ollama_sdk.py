"""The official client of Ollama against `dynamo serve`, with the API beside that of OpenAI, and alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from pydantic import BaseModel

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
      output: script
      script:
        - {match: "7 degrees", text: "It is 7 degrees."}
        - {match: "Oslo?", text: '<think>Ask.</think><tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'}
        - {match: "Describe", text: '{"name": "Oslo", "degrees": 7}'}
    grace_period: 0
"""  # noqa: E501
ALONE = """
frontend: {use: ollama}
transport: {use: tcp}
discovery: {use: file, path: "%s"}
client: {drain_grace: 0}
workers: {mock: {model: {name: mock-model}, engine: {use: mocker, fixed_itl_ms: 20}, grace_period: 0}}
"""
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
OPTIONS = {"num_predict": 5, "temperature": 0.5, "num_ctx": 4096}


class Place(BaseModel):
    name: str
    degrees: int


def weather(city: str) -> str:
    """The weather.

    Args:
        city: Where.
    """
    return f"7 degrees in {city}"


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


async def test_the_asynchronous_client_streams(server: Any) -> None:
    async with ollama.AsyncClient(host=server.url, timeout=90) as client:
        stream = await client.chat("mock-model", MESSAGES, options=OPTIONS, stream=True)
        async with asyncio.timeout(90):
            parts = [part async for part in stream]

    assert parts[-1].eval_count == 5


def test_a_tool_is_called_and_its_result_is_read(client: ollama.Client) -> None:
    messages: list[Any] = [{"role": "user", "content": "How is Oslo?"}]

    asked = client.chat("scripted", messages, tools=[weather], think=True)
    [call] = asked.message.tool_calls or ()
    messages += [asked.message, {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}]
    told = [part.message.content for part in client.chat("scripted", messages, tools=[weather], stream=True)]

    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Oslo"})
    assert asked.message.thinking == "Ask."
    assert "".join(filter(None, told)) == "It is 7 degrees."


def test_calls_come_whole_in_a_stream(client: ollama.Client) -> None:
    messages: Any = [{"role": "user", "content": "How is Oslo?"}]

    parts = list(client.chat("scripted", messages, tools=[weather], stream=True))

    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [{"city": "Oslo"}]
    assert "".join(part.message.thinking or "" for part in parts) == "Ask."


def test_an_answer_has_the_form_of_a_schema(client: ollama.Client) -> None:
    messages: Any = [{"role": "user", "content": "Describe Oslo."}]

    answer = client.chat("scripted", messages, format=Place.model_json_schema())

    assert Place.model_validate_json(answer.message.content or "") == Place(name="Oslo", degrees=7)


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


def test_the_api_of_openai_is_served_beside_it(server: Any) -> None:
    assert server.request("GET", "/v1/models")[0] == 200
    assert server.request("HEAD", "/")[0] == 200
    assert server.request("GET", "/")[2].decode() == "Ollama is running"
    assert server.request("DELETE", "/api/delete")[0] == 501


def test_a_worker_that_is_killed_in_mid_stream_raises_in_the_client(serve: Any, tmp_path: Path) -> None:
    server = serve(ALONE % (tmp_path / "discovery"))
    assert server.until(server.instances, 20), server.log
    (pid,) = server.instances().values()
    received = []

    def read(client: ollama.Client) -> None:
        for part in client.chat("mock-model", MESSAGES, options={"num_predict": 500}, stream=True):
            received.append(part)
            if len(received) == 8:
                os.kill(pid, signal.SIGKILL)

    with ollama.Client(host=server.url, timeout=90) as client, pytest.raises(ollama.ResponseError, match="lost"):
        read(client)

    assert 8 <= len(received) < 500
    assert not any(part.done for part in received)
    assert server.request("GET", "/v1/models")[0] == 404
