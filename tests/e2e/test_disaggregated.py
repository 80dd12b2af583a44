"""One process computes prompts, another answers: equal to one worker that does both, and what happens when one dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.ports import free_port

from tests.e2e.asking import text_of

CONFIG = """
workers:
  first:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: %(itl)s%(meet)s}
    disaggregation_mode: prefill
    grace_period: 0.5
%(second)s
client: {drain_grace: 0.5}
"""

PROCESSES = """
transport: {use: tcp}
discovery: {use: file, path: "%s", ttl: 2}
"""

SECOND = """
  second:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: %(itl)s}
    disaggregation_mode: decode
    grace_period: 0.5
"""

WHOLE = """
workers:
  whole:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 1}
"""

MEET = ", bootstrap_host: 127.0.0.1, bootstrap_port: %d"


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "mock-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, **more}


def answer(server: Any, **more: Any) -> dict[str, Any]:
    status, _, body = server.request("POST", "/v1/chat/completions", chat(**more))
    assert status == 200, body
    parsed: dict[str, Any] = json.loads(body)
    return parsed


def ready(server: Any) -> bool:
    return bool(server.request("GET", "/ready")[0] == 200)


def workers(server: Any) -> dict[str, tuple[str, int]]:
    """Instance id and pid by the worker's name; of several, the one that registered last."""
    listed = json.loads(server.request("GET", "/health")[2])["instances"]
    return {entry["worker"]: (entry["instance_id"], entry["pid"]) for entry in listed}


def killed(server: Any, worker: str) -> Callable[[], bool]:
    """Kills a worker; the result says whether it is gone and another one is in its place."""
    instance, pid = workers(server)[worker]
    os.kill(pid, signal.SIGKILL)
    return lambda: instance not in server.instances() and worker in workers(server) and ready(server)


def in_processes(folder: Path, meet: str = "") -> str:
    """The file of a frontend, a prefill worker and a decode worker, each in its own process."""
    values = {"itl": 5, "meet": meet}
    return CONFIG % (values | {"second": SECOND % values}) + PROCESSES % folder


@pytest.fixture(scope="module")
def shared(serve_for_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return serve_for_module(in_processes(tmp_path_factory.mktemp("discovery")))


@pytest.fixture
def two_halves(shared: Any) -> Any:
    """Both workers are there, even if one was killed before: another takes its place."""
    assert shared.until(lambda: len(shared.instances()) == 2 and ready(shared), 20), shared.log
    return shared


@pytest.fixture(scope="module")
def whole(serve_for_module: Any) -> Any:
    """A worker that does both."""
    return serve_for_module(WHOLE)


@pytest.mark.parametrize("meet", [False, True])
def test_answers_are_equal_to_those_of_a_worker_that_does_both(
    two_halves: Any, whole: Any, serve: Any, tmp_path: Path, meet: bool
) -> None:
    halves = serve(in_processes(tmp_path / "discovery", MEET % free_port())) if meet else two_halves

    for seed in range(4):
        one, other = (answer(server, seed=seed, max_tokens=40) for server in (halves, whole))
        assert one["choices"] == other["choices"]
        assert one["usage"] == other["usage"]
    assert len(halves.instances()) == 2
    assert [model["id"] for model in json.loads(halves.request("GET", "/v1/models")[2])["data"]] == ["mock-model"]


def test_a_prefill_worker_that_is_killed_leaves_running_answers_alone(two_halves: Any, until_content: Any) -> None:
    server = two_halves
    stream = server.raw("POST", "/v1/chat/completions", chat(max_tokens=400, stream=True))
    received = until_content(stream)

    replaced = killed(server, "first")
    status, _, body = server.request("POST", "/v1/chat/completions", chat())
    while data := stream.recv(65536):
        received += data
    stream.close()
    back = server.until(replaced, 15)

    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert len(text_of(received)) == 400
    # The supervisor may have been quicker than the request.
    assert status in (200, 503), body
    assert back, "the supervisor starts it again"
    assert answer(server)["choices"][0]["finish_reason"] == "length"


def test_a_decode_worker_that_is_killed_takes_only_its_streams_along(two_halves: Any, until_content: Any) -> None:
    server = two_halves
    stream = server.raw("POST", "/v1/chat/completions", chat(max_tokens=8000, stream=True))
    received = until_content(stream)

    replaced = killed(server, "second")
    while data := stream.recv(65536):
        received += data
    stream.close()
    back = server.until(replaced, 15)

    assert b'data: {"error":' in received
    assert b"[DONE]" not in received
    assert back, "the supervisor starts it again"
    assert answer(server)["choices"][0]["finish_reason"] == "length"


def test_with_a_prefill_worker_only_there_is_no_model(serve: Any) -> None:
    server = serve(CONFIG % {"itl": 1, "meet": "", "second": ""}, ready="listening")
    seen = server.until(lambda: len(server.instances()) == 1, 15)

    assert seen, server.log
    assert json.loads(server.request("GET", "/v1/models")[2])["data"] == []
    status, _, body = server.request("POST", "/v1/chat/completions", chat())
    assert (status, "no decode worker" in body.decode()) == (503, True)
    assert not ready(server)
