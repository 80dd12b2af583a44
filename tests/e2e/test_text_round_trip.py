"""In echo mode what goes in comes out, with a real tokenizer and with the byte tokenizer, streamed and unary."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dynamo_testing.tiny_model import make_tokenizer_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CONFIG = """
workers:
  bytes:
    model: {name: bytes}
    engine: {use: mocker, output: echo, speedup_ratio: 0, context_length: 100000}
  merges:
    model: {name: merges, path: "%s"}
    engine: {use: mocker, output: echo, speedup_ratio: 0, context_length: 100000}
"""

# A lone surrogate is not Unicode text and is refused; an empty prompt too.
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=200)


@pytest.fixture(scope="module")
def server(serve_for_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tokenizer_folder(tmp_path_factory.mktemp("model"))
    return serve_for_module(CONFIG % folder)


def streamed_text(body: bytes) -> str:
    text = ""
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        choice = json.loads(event.removeprefix("data: "))["choices"][0]
        text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text


@pytest.mark.parametrize("model", ["bytes", "merges"])
@given(text=texts, stream=st.booleans())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_comes_back_from_a_completion(server: Any, model: str, text: str, stream: bool) -> None:
    status, _, body = server.request("POST", "/v1/completions", {"model": model, "prompt": text, "stream": stream})

    assert status == 200, body
    assert (streamed_text(body) if stream else json.loads(body)["choices"][0]["text"]) == text


@given(text=texts, stream=st.booleans())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_comes_back_inside_the_chat_template(server: Any, text: str, stream: bool) -> None:
    ask = {"model": "bytes", "messages": [{"role": "user", "content": text}], "stream": stream}

    status, _, body = server.request("POST", "/v1/chat/completions", ask)

    assert status == 200, body
    assert text in (streamed_text(body) if stream else json.loads(body)["choices"][0]["message"]["content"])


@pytest.mark.parametrize("stop", [["b"], ["é✓"], ["xyz", "d e"], ["not there"]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_wherever_tokens_cut_it(server: Any, stop: list[str], stream: bool) -> None:
    text = "a b c é✓ d e f"
    expected = min((text.split(word)[0] for word in stop), key=len)

    _, _, body = server.request(
        "POST", "/v1/completions", {"model": "merges", "prompt": text, "stop": stop, "stream": stream}
    )

    assert (streamed_text(body) if stream else json.loads(body)["choices"][0]["text"]) == expected
