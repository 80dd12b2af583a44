"""The official OpenAI client against `dynamo serve` with workers in processes of their own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

CONFIG = """
transport: {use: tcp}
discovery: {use: file, path: "%s"}
client: {drain_grace: 0}
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 1}
    grace_period: 0
"""

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"model": "mock-model", "messages": MESSAGES, "max_tokens": 6}


@pytest.fixture(scope="module")
def server(serve_for_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return serve_for_module(CONFIG % tmp_path_factory.mktemp("discovery"))


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
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


def test_completions_accept_text_and_tokens_and_report_text_offsets(client: openai.OpenAI) -> None:
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
    assert [model.id for model in client.models.list()] == ["mock-model"]
    one = client.models.retrieve("mock-model")
    assert (one.id, one.object, one.owned_by) == ("mock-model", "model", "dynamo")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_server_errors_are_raised_as_the_sdks_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**CHAT, modalities=["audio"])
    with pytest.raises(openai.BadRequestError) as out_of_range:
        client.chat.completions.create(**CHAT, extra_body={"nvext": {"top_k": 0}})
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**(CHAT | {"model": "nope"}))

    assert (refused.value.param, refused.value.type) == ("modalities", "invalid_request_error")
    assert out_of_range.value.param == "nvext.top_k"
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")


def test_a_worker_that_is_killed_in_mid_stream_raises_in_the_client(server: Any, client: openai.OpenAI) -> None:
    listed = json.loads(server.request("GET", "/health")[2])["instances"]
    (pid,) = [entry["pid"] for entry in listed if entry["worker"] == "mock"]

    received = []

    def read() -> None:
        for part in client.chat.completions.create(**(CHAT | {"max_tokens": 8000}), stream=True):
            received.append(part)
            if len(received) == 5:
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(openai.APIError) as raised:
        read()

    assert 5 <= len(received) < 8000
    assert all(part.choices[0].finish_reason is None for part in received)
    # Told by an event, not found out by the connection being closed.
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["message"] == str(raised.value)
