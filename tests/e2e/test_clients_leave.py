"""A client that goes away, in any phase, leaves nothing behind within two seconds."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

SLOW = """
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: %s}
    engine_request_limit: 1
    request_queue_limit: 4
"""

#: All that must be back at zero.
GAUGES = [
    "dynamo_frontend_active_requests",
    "dynamo_frontend_inflight_requests",
    "dynamo_frontend_queued_requests",
    "dynamo_component_inflight_requests",
    "dynamo_engine_request",
    "dynamo_request_queue",
    "dynamo_mocker_running_requests",
    "dynamo_mocker_waiting_requests",
]


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "mock-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000, **more}


def held(server: Any) -> dict[str, float]:
    return {name: value for name in GAUGES if (value := server.metric(name))}


def assert_all_is_given_back(server: Any) -> None:
    # Two seconds, and one for the cache of /metrics.
    assert server.until(lambda: not held(server), 3.0), held(server)


def assert_counted(server: Any, count: int, name: str, **labels: str) -> None:
    assert server.until(lambda: server.metric(name, **labels) == count, 3.0), (name, server.metric(name, **labels))


@pytest.mark.parametrize("body", [chat(stream=True), chat()], ids=["stream", "unary"])
def test_before_the_first_token(serve: Any, body: dict[str, Any]) -> None:
    server = serve(SLOW % 60_000)
    connection = server.raw("POST", "/v1/chat/completions", body)
    assert server.until(lambda: server.metric("dynamo_mocker_running_requests") == 1, 5)

    connection.close()

    assert_all_is_given_back(server)
    assert_counted(server, 1, "dynamo_frontend_model_cancellation_total")
    assert_counted(server, 1, "dynamo_mocker_aborted_requests")


def test_in_mid_stream(serve: Any, until_content: Any) -> None:
    server = serve(SLOW % 5)
    connection = server.raw("POST", "/v1/chat/completions", chat(stream=True))
    until_content(connection)

    connection.close()

    assert_all_is_given_back(server)
    assert_counted(server, 1, "dynamo_frontend_requests_total", status="error", error_type="cancelled")


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
def test_client_that_only_closes_its_sending_half_gets_its_whole_answer(serve: Any, stream: bool, version: str) -> None:
    server = serve(SLOW % 30)
    body = json.dumps(chat(stream=stream, max_tokens=40)).encode()
    fields = f"content-type: application/json\r\ncontent-length: {len(body)}"
    head = f"POST /v1/chat/completions {version}\r\nhost: x\r\n{fields}\r\n\r\n".encode()

    with socket.create_connection(("127.0.0.1", server.port), 30) as client:
        client.sendall(head + body)
        client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(65536), b""))

    assert answer.startswith(f"{version} 200 OK\r\n".encode())
    assert b'"finish_reason":"length"' in answer
    assert (b"data: [DONE]\n\n" in answer) is stream
    assert_all_is_given_back(server)
    assert server.metric("dynamo_frontend_model_cancellation_total") == 0


def test_during_a_unary_call(serve: Any) -> None:
    server = serve(SLOW % 5)
    connection = server.raw("POST", "/v1/chat/completions", chat())
    assert server.until(lambda: server.metric("dynamo_mocker_running_requests") == 1, 5)

    connection.close()

    assert_all_is_given_back(server)


def test_while_waiting_for_a_place(serve: Any) -> None:
    server = serve(SLOW % 60_000)
    first = server.raw("POST", "/v1/chat/completions", chat(stream=True))
    assert server.until(lambda: server.metric("dynamo_engine_request") == 1, 5)
    second = server.raw("POST", "/v1/chat/completions", chat(stream=True))
    assert server.until(lambda: server.metric("dynamo_request_queue") == 1, 5)

    second.close()
    assert server.until(lambda: server.metric("dynamo_request_queue") == 0, 3)
    first.close()

    assert_all_is_given_back(server)


def test_many_at_once(serve: Any) -> None:
    server = serve(SLOW.replace("    engine_request_limit: 1\n", "") % 5)
    connections = [server.raw("POST", "/v1/chat/completions", chat(stream=number % 2 == 0)) for number in range(40)]
    assert server.until(lambda: server.metric("dynamo_mocker_running_requests") == 40, 5)

    for connection in connections:
        connection.close()

    assert_all_is_given_back(server)
    assert_counted(server, 40, "dynamo_frontend_disconnected_clients")


def test_a_server_at_capacity_answers_503_and_says_when_to_come_back(serve: Any) -> None:
    server = serve(SLOW % 60_000)
    waiting = [server.raw("POST", "/v1/chat/completions", chat(stream=True)) for _ in range(5)]
    assert server.until(lambda: server.metric("dynamo_request_queue") == 4, 5)

    status, headers, body = server.request("POST", "/v1/chat/completions", chat(stream=True))

    assert status == 503
    assert 1 <= int(headers["retry-after"]) <= 60
    assert b"Service temporarily unavailable: All workers are busy, please retry later" in body
    for connection in waiting:
        connection.close()
    assert_all_is_given_back(server)
    assert_counted(server, 1, "dynamo_frontend_model_rejection_total", endpoint="chat_completions")
    assert_counted(server, 1, "dynamo_rejection_request_total")
