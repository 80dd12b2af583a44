"""One of our frontends behind another: what a client sees is what it would see without the one in front."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.e2e.asking import read_to_end

INNER = """
client: {drain_grace: 0}
workers:
  mock:
    model: {name: inner-model}
    engine: {use: mocker, fixed_itl_ms: 2}
  slow:
    model: {name: slow-model}
    engine: {use: mocker, fixed_itl_ms: 20}
  tools:
    model: {name: tool-model, tool_call_parser: hermes, reasoning_parser: deepseek_r1}
    engine:
      use: mocker
      speedup_ratio: 0
      output: script
      script: [{text: "<think>why</think><tool_call>{\\"name\\": \\"f\\", \\"arguments\\": {\\"x\\": 1}}</tool_call>"}]
"""
OUTER = """
client: {drain_grace: 0}
workers:
%s
"""
WORKER = """
  up%d:
    model: {name: %s}
    engine: {use: upstream, url: "%s", model: %s}
"""
POOLING = """
  pooling:
    model: {name: pooled}
    engine: {use: upstream, url: "%s", model: inner-model}
    endpoint_types: [embeddings, score, rerank]
"""
CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def outer(*urls: str, name: str = "inner-model", inner: str = "inner-model") -> str:
    return OUTER % "".join(WORKER % (at, name, url, inner) for at, url in enumerate(urls))


def chat(**more: Any) -> dict[str, Any]:
    body = {"model": "inner-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 5}
    return body | more


def told(body: bytes) -> Any:
    """Return an answer without what is of one request only."""
    answer = json.loads(body)
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


class Two:
    """The frontend inside, and the one in front of it."""

    def __init__(self, serve: Callable[..., Any]) -> None:
        self.inner = serve(INNER)
        text = outer(self.inner.url)
        text += "".join(
            WORKER % (at, name, self.inner.url, name) for at, name in ((8, "slow-model"), (9, "tool-model"))
        )
        text += POOLING % self.inner.url
        self.outer = serve(text)


@pytest.fixture(scope="module")
def two(serve_for_module: Any) -> Two:
    return Two(serve_for_module)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        (CHAT, chat(n=2, logprobs=True, top_logprobs=3)),
        (CHAT, chat(stop=["e"], temperature=0, logit_bias={"5": 1})),
        (CHAT, chat(nvext={"ignore_eos": True, "greed_sampling": True})),
        ("/v1/completions", {"model": "inner-model", "prompt": ["a", "b"], "max_tokens": 5, "logprobs": 2}),
        ("/v1/completions", {"model": "inner-model", "prompt": "say it", "max_tokens": 5, "echo": True}),
        (CHAT, chat(model="tool-model", tools=[TOOL], max_tokens=200)),
    ],
    ids=str,
)
def test_a_whole_answer_is_the_same_as_without_the_one_in_front(two: Two, path: str, body: dict[str, Any]) -> None:
    direct = two.inner.request("POST", path, body)
    through = two.outer.request("POST", path, body)

    assert (through[0], direct[0]) == (200, 200), through[2]
    expected, seen = told(direct[2]), told(through[2])
    for choice in (*expected["choices"], *seen["choices"]):
        for call in choice.get("message", {}).get("tool_calls") or ():
            call.pop("id")
            call.pop("index", None)
        # Absent and empty are the same to clients.
        message = choice.get("message", {})
        message["content"] = message.get("content") or ""
    assert seen == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "bc"], "dimensions": 5}),
        ("/v1/embeddings", {"input": [[72, 105], [5]], "encoding_format": "base64"}),
        ("/v1/score", {"text_1": ["rain", "egg"], "text_2": ["rain falls", "hens"]}),
        ("/v1/rerank", {"query": "rain or eggs", "documents": ["hens", "eggs or hens", "rain"], "top_n": 2}),
        ("/v1/rerank", {"query": "rain", "documents": ["rain falls", "hens"], "max_tokens_per_doc": 2}),
    ],
    ids=str,
)
def test_vectors_and_scores_are_the_same_too(two: Two, path: str, body: dict[str, Any]) -> None:
    direct = two.inner.request("POST", path, body | {"model": "inner-model"})
    through = two.outer.request("POST", path, body | {"model": "pooled"})

    assert (through[0], direct[0]) == (200, 200), through[2]
    assert told(through[2]) == told(direct[2]) | {"model": "pooled"}


def test_an_upstream_embeds_only_if_configured(two: Two) -> None:
    lists = json.loads(two.outer.request("GET", "/dynamo/alpha/list-models")[2])

    assert two.outer.request("POST", "/v1/embeddings", {"model": "inner-model", "input": "a"})[0] == 501
    assert [lists[f"{kind}_models"] for kind in ("embedding", "score", "rerank")] == [["pooled"]] * 3


def test_a_stream_has_the_same_pieces_scores_and_usage(two: Two) -> None:
    body = chat(stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=1)

    def read(server: Any) -> tuple[list[Any], Any]:
        events = server.request("POST", CHAT, body)[2].split(b"\n\n")
        assert events[-2] == b"data: [DONE]"
        chunks = [json.loads(event[6:]) for event in events[:-2]]
        entries = [
            entry
            for chunk in chunks
            for choice in chunk["choices"]
            for entry in (choice["logprobs"] or {"content": []})["content"]
        ]
        text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
        return [text, entries, [c["finish_reason"] for k in chunks for c in k["choices"]][-1]], chunks[-1]["usage"]

    assert read(two.outer) == read(two.inner)


def test_a_refusal_from_inside_names_the_field_and_nothing_of_the_inside(two: Two) -> None:
    client = OpenAI(base_url=f"{two.outer.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "hi"}]

    with pytest.raises(BadRequestError) as caught:
        # The one in front leaves this to the server behind it.
        client.chat.completions.create(
            model="inner-model", messages=messages, moderation={"model": "omni-moderation-latest"}
        )

    assert caught.value.param == "moderation"
    assert "127.0.0.1" not in str(caught.value)


def test_a_client_disconnect_reaches_the_inner_server(two: Two, until_content: Any) -> None:
    connection = two.outer.raw("POST", CHAT, chat(model="slow-model", stream=True, max_tokens=4000))
    until_content(connection)

    def running() -> float:
        value: float = two.inner.metric("dynamo_component_inflight_requests")
        return value

    seen = two.inner.until(lambda: running() == 1, 5)
    connection.close()

    assert seen
    assert two.inner.until(lambda: running() == 0, 5), two.inner.log


def test_a_killed_upstream_breaks_its_stream_and_later_requests_go_elsewhere(
    serve: Any, two: Two, until_content: Any
) -> None:
    killed = serve(INNER)
    front = serve(outer(killed.url, two.inner.url) + WORKER % (9, "slow-model", killed.url, "slow-model"))
    connection = front.raw("POST", CHAT, chat(model="slow-model", stream=True, max_tokens=4000))
    begun = until_content(connection)

    killed.signal(signal.SIGKILL)
    rest = begun + read_to_end(connection)
    answers = [front.request("POST", CHAT, chat())[0] for _ in range(6)]

    assert b"[DONE]" not in rest
    error = json.loads(rest.split(b"data: ")[-1].split(b"\r\n")[0])
    assert error["error"]["message"] == "The worker of this request was lost, please retry"
    assert answers == [200] * 6, front.log
    status, headers, body = front.request("POST", CHAT, chat(model="slow-model"))
    assert (status, "retry-after" in headers) == (503, True), body


def test_an_unknown_upstream_model_fails_the_start(two: Two, tmp_path: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(outer(two.inner.url, inner="no-such-model"))

    done = subprocess.run(
        [sys.executable, "-m", "dynamo_runtime.cli.main", "serve", str(path), "--http-port", "0"],
        capture_output=True,
        text=True,
        timeout=90,
    )

    assert done.returncode == 2, done.stderr
    assert "has no model 'no-such-model'; it lists inner-model, slow-model, tool-model" in done.stderr
    assert "Traceback" not in done.stderr
