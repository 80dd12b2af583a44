"""The routes beside chat, completions and embeddings, with the official clients and `dynamo serve`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

NAME = "org/mock-model"
CONFIG = f"workers: {{mock: {{model: {{name: {NAME}}}, engine: {{use: mocker, fixed_itl_ms: 1}}}}}}"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]

#: Writes the arguments of a call if one is demanded.
ENGINE = """
from dynamo_core import EngineConfig, LLMEngineOutput, WorkerConfig
from dynamo_runtime import run

class Clerk:
    async def start(self, worker_id):
        return EngineConfig(model="clerk")

    async def generate(self, request, ctx):
        asked = request.sampling_options.guided_decoding
        for token in ('{"city": "Oslo"}' if asked is not None else "No call.").encode():
            yield LLMEngineOutput([token])
        yield LLMEngineOutput.stop()

    async def abort(self, ctx): ...
    async def drain(self): ...
    async def cleanup(self): ...

run(Clerk(), WorkerConfig(model_name="clerk"), overrides=["workers.clerk.grace_period=0"])
"""
FRONTEND = """
transport: {use: tcp}
discovery: {use: file, path: "%s"}
client: {drain_grace: 0, min_initial_workers: 0}
"""


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Any:
    return serve_for_module(CONFIG)


@pytest.fixture
def claude(server: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=90) as client:
        yield client


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
        yield client


def test_messages_are_the_same_streamed_and_whole(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(model=NAME, max_tokens=5, messages=MESSAGES, system="Be kind.")
    with claude.messages.stream(model=NAME, max_tokens=5, messages=MESSAGES, system="Be kind.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()

    [block] = whole.content
    assert block.type == "text"
    assert block.text == text
    assert len(text) == 5
    assert [each.stop_reason for each in (whole, final)] == ["max_tokens"] * 2
    assert whole.usage == final.usage
    assert whole.usage.output_tokens == 5


def test_tokens_are_counted_without_a_worker_being_asked(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model=NAME, messages=MESSAGES)
    answered = claude.messages.create(model=NAME, max_tokens=1, messages=MESSAGES)

    assert counted.input_tokens == answered.usage.input_tokens > 0


def test_the_client_of_anthropic_raises_its_own_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="nope", max_tokens=1, messages=MESSAGES)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model=NAME, max_tokens=0, messages=MESSAGES)

    assert missing.value.type == "not_found_error"


def test_responses_are_the_same_streamed_and_whole(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "input": "Hi", "max_output_tokens": 5}

    whole = client.responses.create(**asked)
    parts = list(client.responses.create(**asked, stream=True))

    assert len(whole.output_text) == 5
    assert (whole.status, whole.incomplete_details and whole.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert "".join(part.delta for part in parts if part.type == "response.output_text.delta") == whole.output_text
    assert [part.sequence_number for part in parts] == list(range(len(parts)))
    assert parts[-1].type == "response.incomplete"
    assert parts[-1].response.output_text == whole.output_text
    assert parts[-1].response.usage == whole.usage


def test_a_conversation_that_would_have_to_be_stored_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=NAME, input="Hi", previous_response_id="resp_1")


def test_a_model_whose_name_has_a_slash_is_found_and_ready(server: Any, client: openai.OpenAI) -> None:
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")
    status, _, body = server.request("GET", f"/v1/models/{NAME}/ready")
    assert (status, json.loads(body)["ready"]) == (200, True)


def test_tokens_and_texts_become_each_other(server: Any) -> None:
    tokens = json.loads(server.request("POST", "/tokenize", {"prompt": "Hé"})[2])["tokens"]

    assert json.loads(server.request("POST", "/detokenize", {"tokens": tokens})[2]) == {"prompt": "Hé"}


def test_the_api_describes_itself(server: Any) -> None:
    described = json.loads(server.request("GET", "/openapi.json")[2])
    status, headers, _ = server.request("GET", "/docs")

    assert "/v1/messages" in described["paths"]
    assert (status, headers["content-type"].startswith("text/html")) == (200, True)


def test_a_short_environment_name_moves_a_route(serve: Any) -> None:
    server = serve(CONFIG, env={"DYN_HTTP_SVC_CHAT_PATH": "/chat"})
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 1}

    assert server.request("POST", "/chat", body)[0] == 200
    assert server.request("POST", "/v1/chat/completions", body)[0] == 404


def test_tools_are_called_in_the_form_of_each_api(serve: Any, tmp_path: Path) -> None:
    server = serve(FRONTEND % (tmp_path / "discovery"), command="frontend")
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")}
    place = {"DYN_DISCOVERY__PATH": str(tmp_path / "discovery")}
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    with subprocess.Popen([sys.executable, str(script)], env=kept | place, stderr=subprocess.DEVNULL) as engine:
        try:
            assert server.until(lambda: server.request("GET", "/v1/models/clerk/ready")[0] == 200, 20)

            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
                tools: Any = [{"type": "function", "name": "weather", "parameters": parameters}]
                asked: dict[str, Any] = {"model": "clerk", "input": "Oslo?", "tools": tools}
                asked["tool_choice"] = {"type": "function", "name": "weather"}
                outputs: list[Any] = [client.responses.create(**asked).output]
                with client.responses.stream(**asked) as stream:
                    outputs.append(stream.get_final_response().output)
            with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=90) as claude:
                forced: dict[str, Any] = {
                    "tools": [{"name": "weather", "input_schema": parameters}],
                    "tool_choice": {"type": "tool", "name": "weather"},
                }
                message = claude.messages.create(model="clerk", max_tokens=50, messages=MESSAGES, **forced)
        finally:
            engine.terminate()

    for output in outputs:
        [call] = output
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    [block] = message.content
    assert block.type == "tool_use"
    assert (block.input, message.stop_reason) == ({"city": "Oslo"}, "tool_use")


def test_a_worker_that_is_killed_in_mid_stream_raises_in_the_client_of_anthropic(serve: Any, tmp_path: Path) -> None:
    config = CONFIG.replace("fixed_itl_ms: 1", "fixed_itl_ms: 20") + FRONTEND % (tmp_path / "discovery")
    server = serve(config)
    assert server.until(server.instances, 20), server.log
    (pid,) = server.instances().values()
    received: list[Any] = []

    def read(claude: anthropic.Anthropic) -> None:
        stream = claude.messages.create(model=NAME, max_tokens=500, messages=MESSAGES, stream=True)
        for event in stream:
            received.append(event)
            if len(received) == 8:
                os.kill(pid, signal.SIGKILL)

    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=90)
    with claude, pytest.raises(anthropic.APIError) as raised:
        read(claude)

    assert 8 <= len(received) < 500
    assert {event.type for event in received} <= {"message_start", "content_block_start", "content_block_delta", "ping"}
    # Told by an event, not found out by the connection being closed.
    assert isinstance(raised.value.body, dict)
    # The type that tells its client to try again.
    assert raised.value.body["error"]["type"] == "overloaded_error"
