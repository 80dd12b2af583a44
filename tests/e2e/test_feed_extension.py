"""The feed of a deployment: each frontend speaks for all, and `dynamo why` tells what happened to any request."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.e2e.asking import answer, ask, dynamo
from tests.e2e.sessions import server_of

CONFIG = """
frontend: {processes: 2}
router: {use: kv}
extensions: [{use: feed, interval: 0.2}]
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 5}
    replicas: %d
    grace_period: 0
transport: {use: tcp}
discovery: {use: file, path: "%s", ttl: 2}
client: {drain_grace: 0}
"""


@pytest.fixture(scope="module")
def deployed(serve_for_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """Return two frontends and so many workers, which tests share: all there, and at rest."""

    @cache
    def start(workers: int) -> Any:
        return serve_for_module(CONFIG % (workers, tmp_path_factory.mktemp("discovery")))

    def settled(workers: int) -> Any:
        server = start(workers)
        assert server.until(lambda: whole(state(server), workers), 20), state(server)
        return server

    return settled


@pytest.fixture
def server(deployed: Callable[[int], Any]) -> Any:
    """Yield a server for tests that only ask."""
    return deployed(2)


@pytest.fixture
def to_be_halted(deployed: Callable[[int], Any]) -> Any:
    """Yield a server for tests in which a process stands still for a while."""
    server = deployed(1)
    # A frontend that has seen a worker come back may still load its model. The kernel chooses who answers.
    assert server.until(lambda: all(chat(server, number)[0] == 200 for number in range(8)), 20)
    return server


def whole(told: dict[str, Any], workers: int) -> bool:
    """Return whether all processes are there, and at rest."""
    frontends = [one["missing"] for one in told["frontends"]]
    return frontends == [None] * 2 and [one["requests"] for one in told["workers"]] == [0] * workers


def state(server: Any) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(server.request("GET", "/admin/state")[2])
    return told


def counted(told: dict[str, Any]) -> int:
    """Return the requests of the last minutes."""
    return sum(model["last_15_minutes"]["requests"] for model in told["models"] if model["last_15_minutes"])


def test_a_state_sums_the_requests_of_all_frontends_and_finds_each(server: Any) -> None:
    # Each has a connection of its own, and the kernel chooses the process.
    before = state(server)
    known = {line["id"] for line in before["recent"]}
    number = counted(before)
    ids = [chat(server, number)[1]["x-request-id"] for number in range(24)]
    assert server.until(lambda: counted(state(server)) == number + 24, 10)

    told = state(server)
    lines = [line for line in told["recent"] if line["id"] not in known]
    assert sorted(line["id"] for line in lines) == sorted(ids)
    assert len({line["frontend"] for line in lines}) == 2
    assert sum(row["requests"] for row in told["history"]) == number + 24
    assert {worker["status"] for worker in told["workers"]} == {"free"}
    (model,) = told["models"]
    assert model["workers"] == {"aggregated": 2}
    assert model["last_15_minutes"]["time_to_first_token"]["p50"] > 0
    for request_id in ids[:6]:
        found = dynamo("why", request_id, "--url", server.url, "--json")
        assert json.loads(found.stdout)["request"]["id"] == request_id


def test_a_model_without_workers_raises_an_alarm(to_be_halted: Any) -> None:
    server = to_be_halted
    (worker,) = state(server)["workers"]
    os.kill(worker["pid"], signal.SIGSTOP)
    try:
        assert server.until(lambda: not state(server)["workers"], 20)
        # Either frontend is asked, and each finds it out for itself.
        assert server.until(lambda: bool(critical(server)), 10)
        (alarm,) = critical(server)
        assert "model mock-model: no frontend can serve it" in alarm

        status, headers, _ = chat(server, 1)

        assert status == 503
        told = dynamo("why", headers["x-request-id"], "--url", server.url).stdout
        assert "error: unavailable, HTTP 503: Unavailable: no worker serves the model 'mock-model' now" in told
        assert server.until(lambda: "model mock-model has lost its last worker" in server.log, 5)
    finally:
        os.kill(worker["pid"], signal.SIGCONT)


def critical(server: Any) -> list[str]:
    """Return the gravest alarms."""
    return [one["text"] for one in state(server)["alarms"] if one["level"] == "critical"]


def chat(server: Any, number: int) -> Any:
    """Ask over a connection of its own; return status, headers and body."""
    content = [{"role": "user", "content": f"a question, {number}"}]
    body = {"model": "mock-model", "messages": content, "max_tokens": 4, "stream": False}
    return server.request("POST", "/v1/chat/completions", body)


def test_why_reports_an_unknown_request(server: Any) -> None:
    found = dynamo("why", "no-such-request", "--url", server.url)

    assert found.exit_code == 1
    assert "no frontend knows this request: the last 1000 are kept" in found.stderr


def test_a_stopped_frontend_is_named_and_the_feed_continues(to_be_halted: Any) -> None:
    server = to_be_halted
    answer(server)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/admin/feed")
    reading = connection.getresponse()
    assert next_state(reading)["workers"]
    pids = {one["pid"]: one for one in next_state(reading)["frontends"]}

    # One that stands still is not asked for longer than a second.
    (other, *_) = [pid for pid in pids if pid != server_of(connection.sock, pids)]
    os.kill(other, signal.SIGSTOP)
    try:
        until = time.monotonic() + 60
        while not (missing := [one for one in next_state(reading)["frontends"] if one["missing"]]):
            assert time.monotonic() < until
        assert [one["pid"] for one in missing] == [other]
    finally:
        os.kill(other, signal.SIGCONT)
        connection.close()
    assert ask(server)


def next_state(reading: http.client.HTTPResponse) -> dict[str, Any]:
    while not (line := reading.readline()).startswith(b"data: "):
        assert line, "the feed has ended"
    told: dict[str, Any] = json.loads(line[6:])
    return told
