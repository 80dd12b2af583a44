"""A model whose chat template does not end: its clients are told, others are served, and the process can be stopped."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

TIMEOUT = 2.0
CONFIG = """
frontend: {{use: openai, template_timeout: {timeout}}}
workers:
  wild:
    model: {{name: wild, custom_jinja_template: "{template}"}}
    engine: {{use: mocker, speedup_ratio: 0}}
    grace_period: 0.2
  tame:
    model: {{name: tame}}
    engine: {{use: mocker, speedup_ratio: 0}}
    grace_period: 0.2
client: {{drain_grace: 0.2, shutdown_timeout: 5}}
"""
TEMPLATE = "{% for i in range(90000) %}" * 3 + "x" + "{% endfor %}" * 3


@pytest.fixture
def server(serve: Any, tmp_path: Path) -> Any:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    server = serve(CONFIG.format(template=template, timeout=TIMEOUT))
    assert server.until(lambda: server.request("GET", "/ready")[0] == 200, 15), server.log
    return server


def ask(server: Any, model: str) -> tuple[int, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    status, _, answer = server.request("POST", "/v1/chat/completions", body)
    return status, json.loads(answer)


@pytest.mark.full
def test_clients_of_a_runaway_template_get_an_error_and_others_are_served(server: Any) -> None:
    answers: list[tuple[int, Any]] = []
    clients = [threading.Thread(target=lambda: answers.append(ask(server, "wild"))) for _ in range(2)]
    for client in clients:
        client.start()
    slowest = 0.0
    while any(client.is_alive() for client in clients):
        begun = time.monotonic()
        assert server.request("GET", "/live")[0] == 200
        slowest = max(slowest, time.monotonic() - begun)
        assert ask(server, "tame")[0] == 200
        time.sleep(0.02)

    assert slowest < TIMEOUT / 2
    assert {status for status, _ in answers} <= {500, 503}
    stopped = [answer["error"]["message"] for status, answer in answers if status == 500]
    assert stopped
    assert "The chat template of model 'wild' (chat_template.jinja) was stopped" in stopped[0]


@pytest.mark.full
def test_the_process_can_be_stopped_while_one_runs_away(server: Any) -> None:
    client = threading.Thread(target=ask, args=(server, "wild"), daemon=True)
    client.start()
    time.sleep(0.5)

    begun = time.monotonic()
    server.signal(signal.SIGTERM)
    code = server.wait()

    assert code == 0
    assert time.monotonic() - begun < 12
