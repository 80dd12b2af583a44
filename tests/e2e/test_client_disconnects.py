"""A client that goes away, in any phase, leaves nothing behind within two seconds."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

#: A model whose step takes a minute is for one test: it looks at no other request before that.
WAITING = ("waits_1", "waits_2", "waits_3")
WORKER = """
  %s:
    model: {name: %s}
    engine: {use: mocker, fixed_itl_ms: %s}
    engine_request_limit: %s
    request_queue_limit: 4
"""
SPEEDS = {**dict.fromkeys(WAITING, 60_000), "answers": 20, "crowded": 5}
CONFIG = "workers:\n" + "".join(
    WORKER % (model, model, itl, 1 if model in WAITING else 40) for model, itl in SPEEDS.items()
)

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


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Any:
    return serve_for_module(CONFIG)


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000, **more}


def held(server: Any) -> dict[str, float]:
    return {name: value for name in GAUGES if (value := server.metric(name))}


def assert_all_is_given_back(server: Any) -> None:
    # Two seconds, and one for the cache of /metrics.
    assert server.until(lambda: not held(server), 3.0), held(server)


@contextmanager
def counted(server: Any, name: str, more: int, **labels: str) -> Iterator[None]:
    """Assert that what the block does adds so many to a counter."""
    before = server.metric(name, **labels)
    yield
    assert server.until(lambda: server.metric(name, **labels) == before + more, 3.0), server.metric(name, **labels)


@pytest.mark.parametrize(("stream", "model"), [(True, WAITING[0]), (False, WAITING[1])], ids=["stream", "unary"])
def test_before_the_first_token(server: Any, stream: bool, model: str) -> None:
    with (
        counted(server, "dynamo_frontend_model_cancellation_total", 1, model=model),
        counted(server, "dynamo_mocker_aborted_requests", 1),
    ):
        connection = server.raw("POST", "/v1/chat/completions", chat(model, stream=stream))
        assert server.until(lambda: server.metric("dynamo_mocker_running_requests") == 1, 5)

        connection.close()

        assert_all_is_given_back(server)


def test_a_client_that_leaves_mid_stream_frees_everything(server: Any, until_content: Any) -> None:
    labels = {"status": "error", "error_type": "cancelled", "model": "answers"}
    with counted(server, "dynamo_frontend_requests_total", 1, **labels):
        connection = server.raw("POST", "/v1/chat/completions", chat("answers", stream=True))
        until_content(connection)

        connection.close()

        assert_all_is_given_back(server)


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
def test_client_that_only_closes_its_sending_half_gets_its_whole_answer(
    server: Any, stream: bool, version: str
) -> None:
    body = json.dumps(chat("answers", stream=stream, max_tokens=20)).encode()
    fields = f"content-type: application/json\r\ncontent-length: {len(body)}"
    head = f"POST /v1/chat/completions {version}\r\nhost: x\r\n{fields}\r\n\r\n".encode()

    with (
        counted(server, "dynamo_frontend_model_cancellation_total", 0),
        socket.create_connection(("127.0.0.1", server.port), 30) as client,
    ):
        client.sendall(head + body)
        client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(65536), b""))

    assert answer.startswith(f"{version} 200 OK\r\n".encode())
    assert b'"finish_reason":"length"' in answer
    assert (b"data: [DONE]\n\n" in answer) is stream
    assert_all_is_given_back(server)


def test_while_waiting_for_a_place(server: Any) -> None:
    first = server.raw("POST", "/v1/chat/completions", chat(WAITING[2], stream=True))
    assert server.until(lambda: server.metric("dynamo_engine_request") == 1, 5)
    second = server.raw("POST", "/v1/chat/completions", chat(WAITING[2], stream=True))
    assert server.until(lambda: server.metric("dynamo_request_queue") == 1, 5)

    second.close()
    assert server.until(lambda: server.metric("dynamo_request_queue") == 0, 3)
    first.close()

    assert_all_is_given_back(server)


def test_many_at_once(server: Any) -> None:
    with counted(server, "dynamo_frontend_disconnected_clients", 20):
        bodies = (chat("crowded", stream=number % 2 == 0) for number in range(20))
        connections = [server.raw("POST", "/v1/chat/completions", body) for body in bodies]
        assert server.until(lambda: server.metric("dynamo_mocker_running_requests") == 20, 5)

        for connection in connections:
            connection.close()

        assert_all_is_given_back(server)
