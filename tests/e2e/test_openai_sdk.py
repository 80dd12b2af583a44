"""The official OpenAI client against `dynamo serve` with workers in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

CONFIG = """
transport: {use: tcp}
discovery: {use: file, path: "%s"}
client: {drain_grace: 0}
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 1}
    grace_period: 0
  tools:
    model: {name: tool-model, tool_call_parser: hermes}
    engine:
      use: mocker
      fixed_itl_ms: 1
      output: script
      script:
        - text: 'Wait. <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    grace_period: 0
"""

#: Answers with what it was asked for, in JSON, of the form that was asked for.
ENGINE = """
import json
from dynamo_core import EngineConfig, LLMEngineOutput, WorkerConfig
from dynamo_runtime import run

class Scribe:
    async def start(self, worker_id):
        return EngineConfig(model="scribe")

    async def generate(self, request, ctx):
        guided = request.sampling_options.guided_decoding
        answer = {"city": "Oslo", "asked": None if guided is None else guided.json}
        for token in json.dumps(answer).encode():
            yield LLMEngineOutput([token])
        yield LLMEngineOutput.stop()

    async def abort(self, ctx): ...
    async def drain(self): ...
    async def cleanup(self): ...

run(Scribe(), WorkerConfig(model_name="scribe"), overrides=["workers.scribe.grace_period=0"])
"""

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"model": "mock-model", "messages": MESSAGES, "max_tokens": 6}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


class Place(BaseModel):
    """What an answer is to look like."""

    city: str


def sdk(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=90)


@pytest.fixture(scope="module")
def discovery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("discovery")


@pytest.fixture(scope="module")
def server(serve_for_module: Any, discovery: Path) -> Any:
    return serve_for_module(CONFIG % discovery)


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with sdk(server) as client:
        yield client


def test_a_chat_is_the_same_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = CHAT | {"logprobs": True, "top_logprobs": 2, "seed": 3}

    whole = client.chat.completions.create(**asked)
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))

    choice = whole.choices[0]
    assert whole.id.startswith("chatcmpl-")
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == choice.message.content
    assert [part.choices[0].delta.role for part in parts if part.choices][:2] == ["assistant", None]
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert [len(token.top_logprobs) for token in tokens] == [2] * 6
    assert b"".join(bytes(token.bytes or ()) for token in tokens).decode(errors="replace") == choice.message.content
    told = [part.choices[0].logprobs for part in parts if part.choices]
    assert [token for each in told if each is not None for token in each.content or []] == tokens
    assert parts[-1].usage == whole.usage
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.usage.total_tokens - whole.usage.prompt_tokens) == (6, 6)


def test_several_answers_differ_and_come_with_their_index(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT, n=2, seed=1)
    parts = list(client.chat.completions.create(**CHAT, n=2, seed=1, stream=True))

    texts = [choice.message.content for choice in whole.choices]
    streamed = ["", ""]
    for part in parts:
        for choice in part.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert streamed == texts


def test_completions_take_texts_and_tokens_and_tell_where_each_token_begins(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "mock-model", "max_tokens": 4}

    text = client.completions.create(**asked, prompt="once", logprobs=2).choices[0]
    tokens = client.completions.create(**asked, prompt=list(b"once")).choices[0]
    echoed = client.completions.create(**asked, prompt=["a", "b"], echo=True).choices
    best = client.completions.create(**asked, prompt="once", best_of=3, n=2)

    assert text.text == tokens.text
    assert text.logprobs is not None
    assert text.logprobs.text_offset == [0, 1, 2, 3]
    assert "".join(text.logprobs.tokens or []) == text.text
    assert [choice.text[0] for choice in echoed] == ["a", "b"]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage is not None
    assert best.usage.completion_tokens == 12


def test_a_tool_is_called(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tool-model", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 200}

    whole = client.chat.completions.create(**asked).choices[0]
    parts = [part.choices[0] for part in client.chat.completions.create(**asked, stream=True)]

    [call] = whole.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    assert whole.finish_reason == parts[-1].finish_reason == "tool_calls"
    pieces = [piece.function for part in parts for piece in part.delta.tool_calls or [] if piece.function is not None]
    assert [piece.name for piece in pieces if piece.name] == ["weather"]
    assert "".join(piece.arguments or "" for piece in pieces) == call.function.arguments


@pytest.fixture
def scribe(server: Any, discovery: Path, tmp_path: Path) -> Iterator[None]:
    """One more worker, which registers itself."""
    code, out = tmp_path / "scribe.py", tmp_path / "scribe.log"
    code.write_text(ENGINE)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")}
    place = {"DYN_DISCOVERY__PATH": str(discovery)}
    with out.open("w") as log, subprocess.Popen([sys.executable, str(code)], env=kept | place, stderr=log) as worker:
        try:
            known = server.until(lambda: server.request("GET", "/v1/models/scribe/ready")[0] == 200, 20)
            assert known, out.read_text()
            yield
        finally:
            worker.terminate()


def test_a_json_schema_reaches_the_engine_and_the_answer_is_read_by_it(client: openai.OpenAI, scribe: None) -> None:
    parsed = client.chat.completions.parse(model="scribe", messages=MESSAGES, response_format=Place).choices[0]
    free = client.chat.completions.create(model="scribe", messages=MESSAGES).choices[0]

    assert parsed.message.parsed == Place(city="Oslo")
    asked = json.loads(parsed.message.content or "")["asked"]
    assert asked["properties"] == {"city": {"title": "City", "type": "string"}}
    assert asked["required"] == ["city"]
    assert json.loads(free.message.content or "")["asked"] is None


def test_texts_are_embedded(client: openai.OpenAI) -> None:
    packed = client.embeddings.create(model="mock-model", input=["a", "b"])
    plain = client.embeddings.create(model="mock-model", input=["a", "b"], encoding_format="float")
    alone = client.embeddings.create(model="mock-model", input="b", encoding_format="float")

    assert [vector.index for vector in packed.data] == [0, 1]
    # The client asks for packed numbers of its own accord; they have 32 bits.
    assert packed.data[1].embedding == pytest.approx(plain.data[1].embedding)
    assert plain.data[1].embedding == alone.data[0].embedding != plain.data[0].embedding
    assert packed.usage.prompt_tokens == 2


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert {"mock-model", "tool-model"} <= {model.id for model in client.models.list()}
    one = client.models.retrieve("tool-model")
    assert (one.id, one.object, one.owned_by) == ("tool-model", "model", "dynamo")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_what_goes_wrong_is_the_clients_own_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**CHAT, modalities=["audio"])
    with pytest.raises(openai.BadRequestError) as out_of_range:
        client.chat.completions.create(**CHAT, extra_body={"nvext": {"top_k": 0}})
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**(CHAT | {"model": "nope"}))

    assert (refused.value.param, refused.value.type) == ("modalities", "invalid_request_error")
    assert out_of_range.value.param == "nvext.top_k"
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")


def test_fields_beyond_the_api_go_through_the_extra_body(client: openai.OpenAI) -> None:
    extra = {"top_k": 5, "ignore_eos": True, "nvext": {"annotations": ["token_ids", "formatted_prompt"]}}

    answer = client.chat.completions.create(**CHAT, extra_body=extra)

    told = answer.to_dict()["nvext"]
    assert isinstance(told, dict)
    assert bytes(told["token_ids"]).decode() == told["formatted_prompt"]


def test_a_worker_that_is_killed_in_mid_stream_raises_in_the_client(serve: Any, tmp_path: Path) -> None:
    server = serve(CONFIG.replace("fixed_itl_ms: 1}", "fixed_itl_ms: 20}") % (tmp_path / "discovery"))
    listed = json.loads(server.request("GET", "/health")[2])["instances"]
    (pid,) = [entry["pid"] for entry in listed if entry["worker"] == "mock"]

    received = []

    def read(client: openai.OpenAI) -> None:
        for part in client.chat.completions.create(**(CHAT | {"max_tokens": 500}), stream=True):
            received.append(part)
            if len(received) == 5:
                os.kill(pid, signal.SIGKILL)

    with sdk(server) as client, pytest.raises(openai.APIError) as raised:
        read(client)

    assert 5 <= len(received) < 500
    assert all(part.choices[0].finish_reason is None for part in received)
    # Told by an event, not found out by the connection being closed.
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["message"] == str(raised.value)
