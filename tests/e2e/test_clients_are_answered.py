"""curl, the official SDK and raw sockets against the embedded defaults."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

CHAT: dict[str, Any] = {"model": "mock-model", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5}


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Any:
    return serve_for_module()


def test_curl_gets_a_unary_answer(server: Any) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")

    done = subprocess.run(
        [
            curl,
            "-sS",
            f"{server.url}/v1/chat/completions",
            "-H",
            "content-type: application/json",
            "-d",
            json.dumps(CHAT),
        ],
        capture_output=True,
        check=True,
        timeout=60,
    )
    answer = json.loads(done.stdout)

    assert answer["object"] == "chat.completion"
    assert answer["usage"]["completion_tokens"] == 5
    assert len(answer["choices"][0]["message"]["content"]) == 5


def test_a_stream_has_exactly_the_documented_bytes(server: Any) -> None:
    status, headers, body = server.request("POST", "/v1/chat/completions", CHAT | {"stream": True, "max_tokens": 2})
    events = body.decode().split("\n\n")

    head = (
        r'data: \{"id":"(chatcmpl-[0-9a-f-]{36})","object":"chat\.completion\.chunk",'
        r'"created":(\d+),"model":"mock-model"'
    )
    *answer, done, end = events
    content = r'"choices":\[\{"index":0,"delta":\{"content":"(?:[^"\\]|\\.)+"\},"finish_reason":null\}\]\}'
    shapes = [
        r'"choices":\[\{"index":0,"delta":\{"role":"assistant"\},"finish_reason":null\}\]\}',
        # Tokens that are there together are one event.
        *[content] * min(max(len(answer) - 2, 1), 2),
        r'"choices":\[\{"index":0,"delta":\{\},"finish_reason":"length"\}\]\}',
    ]
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert [done, end] == ["data: [DONE]", ""]
    matches = [re.fullmatch(f"{head},{shape}", event) for event, shape in zip(answer, shapes, strict=True)]
    assert all(matches), events
    assert len({match.groups() for match in matches if match}) == 1


def test_the_operators_routes_answer(server: Any) -> None:
    server.request("POST", "/v1/chat/completions", CHAT)

    health = json.loads(server.request("GET", "/health")[2])
    lists = json.loads(server.request("GET", "/dynamo/alpha/list-models")[2])

    assert health["status"] == "healthy"
    assert health["instances"][0]["pid"] == server.process.pid
    assert lists["chat_completion_models"] == ["mock-model"]
    assert [server.request("GET", path)[0] for path in ("/live", "/ready", "/metrics")] == [200, 200, 200]
    assert server.request("GET", "/nope")[0] == 404
    assert server.request("GET", "/v1/chat/completions")[0] == 405


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_thresholds_are_not_set_by_a_page_of_another_site(server: Any, method: str) -> None:
    path, body = (
        ("/busy_threshold", {"model": "mock-model"}) if method == "POST" else ("/busy_threshold/mock-model", None)
    )
    rebound = {"origin": "http://evil.example", "host": "evil.example"}

    status, _, answer = server.request(method, path, body, **rebound)

    assert status == 403
    assert "not one of this process" in json.loads(answer)["error"]
    # Not armed here, and a program is told so.
    assert server.request(method, path, body)[0] == 409


def test_a_request_can_be_followed_by_its_trace_id_in_the_json_log(serve: Any) -> None:
    server = serve(None, env={"DYN_LOGGING_JSONL": "1"})
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"

    _, headers, body = server.request(
        "POST",
        "/v1/chat/completions",
        CHAT,
        traceparent=f"00-{trace}-00f067aa0ba902b7-01",
        **{"x-request-id": "mine"},
    )
    server.end()
    lines = [json.loads(line) for line in server.lines]
    access = next(line for line in lines if line["target"] == "dynamo.access")

    assert headers["x-request-id"] == "mine"
    assert access["trace_id"] == trace
    assert access["x_request_id"] == "mine"
    assert json.loads(body)["id"] == f"chatcmpl-{access['request_id']}"
    assert "Hello!" not in server.log
