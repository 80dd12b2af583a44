"""Workers that are killed in the middle of answers: their clients notice nothing."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.e2e.asking import PATH, Stream
from tests.e2e.asking import chat as chatting
from tests.e2e.sessions import alive

#: What a worker is called: its model, its role, and how often answers of the model may move.
WORKERS = {
    "first": ("mock-model", "agg", 3),
    "second": ("mock-model", "agg", 3),
    "third": ("mock-model", "agg", 3),
    "prefill": ("split-model", "prefill", 3),
    "decode": ("split-model", "decode", 3),
    "spare": ("split-model", "decode", 3),
}

CONFIG = """
transport: {use: tcp}
discovery: {use: file, path: "%(folder)s", ttl: 2}
log: {json: true, level: debug}
workers:
%(workers)s
client: {drain_grace: 0}
"""

WORKER = """
  %s:
    model: {name: %s, migration_limit: %s}
    engine: {use: mocker, fixed_itl_ms: 15}
    disaggregation_mode: %s
    grace_period: 0
"""


@pytest.fixture(scope="module")
def running(serve_for_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    workers = [WORKER % (name, model, limit, mode) for name, (model, mode, limit) in WORKERS.items()]
    folder = tmp_path_factory.mktemp("migration")
    return serve_for_module(CONFIG % {"folder": folder / "discovery", "workers": "".join(workers)})


@pytest.fixture
def server(running: Any) -> Any:
    """Return a frontend and the workers, each in its own process and alive, whatever became of those before them."""

    def whole() -> bool:
        # One that was killed is seen until its lease ends.
        pids = running.instances().values()
        return len(pids) == len(WORKERS) and all(map(alive, pids)) and running.request("GET", "/ready")[0] == 200

    assert running.until(whole, 20), running.log
    return running


def chat(**more: Any) -> dict[str, Any]:
    return chatting(**{"max_tokens": 80, "seed": 7, "logprobs": True, "top_logprobs": 2, **more})


def served(server: Any, request_id: str | None = None) -> list[str]:
    """Return the workers that were given a request, by name, in order; the last request if none is named."""
    lines = [json.loads(line) for line in list(server.lines) if line.startswith("{")]
    told = [line for line in lines if "a request goes to engine" in line["message"]]
    if not told:
        return []
    request_id = request_id or told[-1]["request_id"]
    return [
        line["process"].removeprefix("workers.").removesuffix("-0") for line in told if line["request_id"] == request_id
    ]


def kill(server: Any, worker: str) -> None:
    listed = json.loads(server.request("GET", "/health")[2])["instances"]
    (pid,) = [entry["pid"] for entry in listed if entry["worker"] == worker]
    os.kill(pid, signal.SIGKILL)


class Story(Stream):
    """One answer in events with its usage, read as it comes."""

    def __init__(self, server: Any, body: dict[str, Any]) -> None:
        super().__init__(server, **body, stream_options={"include_usage": True})

    def more(self) -> None:
        """Return when some text has come that had not before: one event may hold much of it."""
        self.connection.setblocking(False)
        with suppress(BlockingIOError):
            while self._more():
                pass
        self.connection.settimeout(90)
        known = self.received.count(b'"content"')
        while self.received.count(b'"content"') == known:
            assert self._more(), self.received

    @property
    def chunks(self) -> list[dict[str, Any]]:
        lines = self.received.decode().split("\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    @property
    def log_probs(self) -> list[Any]:
        return [entry for choice in self.choices for entry in (choice.get("logprobs") or {}).get("content") or []]

    @property
    def usage(self) -> dict[str, Any]:
        return counts(self.chunks[-1]["usage"])


def counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the counts without what the first worker had no time to say."""
    return {key: value for key, value in usage.items() if key != "prompt_tokens_details"}


def unary(server: Any, body: dict[str, Any]) -> dict[str, Any]:
    status, _, data = server.request("POST", PATH, body)
    assert status == 200, data
    answer: dict[str, Any] = json.loads(data)
    return answer


def migrated(server: Any, model: str = "mock-model", **labels: str) -> float:
    """Return how many answers of a model have moved."""
    count: float = server.metric("dynamo_frontend_model_migration_total", model=model, **labels)
    return count


@pytest.mark.parametrize("deaths", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_stream_goes_on_when_its_worker_is_killed(server: Any, deaths: int) -> None:
    successes = {"model": "mock-model", "status": "success"}
    durations = {"model": "mock-model", "outcome": "success"}
    body = chat(max_tokens=40 * (deaths + 1))
    moved = migrated(server, migration_type="ongoing_request")
    timed = server.metric("dynamo_frontend_model_migration_duration_seconds_count", **durations)
    succeeded = server.metric("dynamo_frontend_requests_total", **successes)
    whole = unary(server, body)
    stream = Story(server, body)
    for death in range(1, deaths + 1):
        stream.more()
        kill(server, served(server)[-1])
        assert server.until(lambda wanted=death + 1: len(served(server)) == wanted, 10), server.log
    text = stream.text()

    choice = whole["choices"][0]
    assert text == choice["message"]["content"]
    assert stream.log_probs == choice["logprobs"]["content"]
    assert stream.usage == counts(whole["usage"])
    assert stream.choices[-1]["finish_reason"] == "length"
    assert stream.received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b"error" not in stream.received
    assert len(set(served(server))) == deaths + 1
    assert server.until(lambda: migrated(server, migration_type="ongoing_request") == moved + deaths, 5)
    name = "dynamo_frontend_model_migration_duration_seconds_count"
    assert server.metric(name, **durations) == timed + deaths
    assert server.metric("dynamo_frontend_requests_total", **successes) == succeeded + 2


@contextmanager
def asking(server: Any, body: dict[str, Any]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Ask for a whole answer while the block runs; the result waits for it."""
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(unary(server, body)))
    thread.start()

    def answer() -> dict[str, Any]:
        thread.join(90)
        return answers[0]

    try:
        yield answer
    finally:
        thread.join(30)


def test_a_whole_answer_is_the_same_when_its_worker_is_killed(server: Any) -> None:
    moved = migrated(server)
    whole = unary(server, chat(n=2))
    before = len([line for line in server.lines if "a request goes to engine" in line])
    with asking(server, chat(n=2)) as answer:

        def begun() -> bool:
            return len([line for line in server.lines if "a request goes to engine" in line]) == before + 2

        assert server.until(begun, 10)
        kill(server, served(server)[-1])

    assert answer()["choices"] == whole["choices"]
    assert counts(answer()["usage"]) == counts(whole["usage"])
    assert server.until(lambda: migrated(server) > moved, 5)


def test_a_decode_worker_that_is_killed_is_followed_by_another(server: Any) -> None:
    body = chat(model="split-model")
    whole = unary(server, body)
    stream = Story(server, body)
    stream.more()
    first = served(server)
    kill(server, first[-1])
    text = stream.text()

    assert text == whole["choices"][0]["message"]["content"]
    assert stream.usage == counts(whole["usage"])
    assert stream.received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    prefill, decode, again, other = served(server)
    assert prefill == again == "prefill"
    assert {decode, other} == {"decode", "spare"}
