"""A client whose streams are never read takes all places of the engine: another client has them back in seconds."""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

CHAT = "/v1/chat/completions"
STREAMS, CHOICES = 20, 16
#: How long a client that does not read keeps its connection, and keeps a place that others wait for, in seconds.
WRITE_STALL, PLACE_STALL = 30, 2
SAMPLES = 20

CONFIG = f"""
workers:
  mock:
    model: {{{{name: mock-model}}}}
    # Fewer places than the streams have answers.
    engine: {{{{use: mocker, max_num_seqs: {STREAMS * CHOICES * 3 // 4}, {{speed}}}}}}
    grace_period: 0.5
client: {{{{drain_grace: 0.5, write_stall: {WRITE_STALL}, place_stall: {PLACE_STALL}}}}}
transport: {{{{use: tcp}}}}
discovery: {{{{use: file, path: "{{discovery}}", ttl: 5}}}}
"""

#: What the streams ask for, and how fast the engine is.
ANSWERS = {
    "tokens": ("fixed_itl_ms: 2", {}),
    "log-probabilities": ("speedup_ratio: 0", {"logprobs": True, "top_logprobs": 20}),
}


def request(**fields: Any) -> bytes:
    body = json.dumps({"model": "mock-model", "messages": [{"role": "user", "content": "Hi"}], **fields}).encode()
    lines = [
        f"POST {CHAT} HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def chat(port: int) -> float:
    """Return the seconds that a short chat takes."""
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), 120) as connection:
        connection.sendall(request(max_tokens=8))
        response = http.client.HTTPResponse(connection)
        response.begin()
        response.read()
    assert response.status == 200
    return time.monotonic() - begun


def unread(port: int, **fields: Any) -> socket.socket:
    """Return a stream of many long answers, of which nothing is read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.sendall(request(stream=True, n=CHOICES, max_tokens=8000, **fields))
    return connection


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ANSWERS)
def test_a_short_chat_is_answered_beside_unread_streams(kind: str, serve: Any, tmp_path: Path) -> None:
    speed, fields = ANSWERS[kind]
    server = serve(CONFIG.format(speed=speed, discovery=tmp_path / "discovery"))
    assert server.until(lambda: server.request("GET", "/ready")[0] == 200, 15), server.log
    without = [chat(server.port) for _ in range(SAMPLES)]

    with ExitStack() as attack:
        for _ in range(STREAMS):
            attack.enter_context(unread(server.port, **fields))
        assert server.until(lambda: server.metric("dynamo_frontend_inflight_requests") == STREAMS, 60)
        first = chat(server.port)
        beside = [chat(server.port) for _ in range(SAMPLES)]
        connected = server.metric("dynamo_frontend_inflight_requests")

    figures = {"without": statistics.median(without), "first": first, "beside": statistics.median(beside)}
    sys.stdout.write(f"{kind}: {figures}\n")
    # The streams were still there.
    assert connected
    assert first < WRITE_STALL / 2
    assert statistics.median(beside) <= 3 * statistics.median(without)
