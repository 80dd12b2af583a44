"""The routes beside chat, completions and embeddings, with the official clients and `dynamo serve`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

NAME = "org/mock-model"
CONFIG = f"workers: {{mock: {{model: {{name: {NAME}}}, engine: {{use: mocker, fixed_itl_ms: 1}}}}}}"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


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


def test_a_model_with_a_slash_in_its_name_is_found_and_ready(server: Any, client: openai.OpenAI) -> None:
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")
    status, _, body = server.request("GET", f"/v1/models/{NAME}/ready")
    assert (status, json.loads(body)["ready"]) == (200, True)
