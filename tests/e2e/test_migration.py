"""Workers that are killed in the middle of answers: their clients notice nothing."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

WORKERS = ("first", "second", "third", "fourth")

CONFIG = """
transport: {use: tcp}
discovery: {use: file, path: "%(folder)s", ttl: 2}
log: {json: true, level: debug}
workers:
%(workers)s
client: {drain_grace: 0}
"""

WORKER = """
  %(name)s:
    model: {name: mock-model, migration_limit: %(limit)s}
    engine: {use: mocker, fixed_itl_ms: %(itl)s}
    disaggregation_mode: %(mode)s
    grace_period: 0
"""

PATH = "/v1/chat/completions"


def config(folder: Path, *, limit: int = 3, itl: float = 15, roles: tuple[str, ...] = ("agg",) * 4) -> str:
    workers = [
        WORKER % {"name": name, "limit": limit, "itl": itl, "mode": mode}
        for name, mode in zip(WORKERS, roles, strict=False)
    ]
    return CONFIG % {"folder": folder / "discovery", "workers": "".join(workers)}


@pytest.fixture
def several(serve: Any, tmp_path: Path) -> Callable[..., Any]:
    """Starts a frontend and four workers, each in its own process, and returns when all are seen."""

    def start(**settings: Any) -> Any:
        server = serve(config(tmp_path, **settings))
        assert server.until(lambda: len(server.instances()) == len(WORKERS), 20), server.log
        return server

    return start


def chat(**more: Any) -> dict[str, Any]:
    wanted = {"max_tokens": 80, "seed": 7, "logprobs": True, "top_logprobs": 2, **more}
    return {"model": "mock-model", "messages": [{"role": "user", "content": "hi"}], **wanted}


def served(server: Any, request_id: str | None = None) -> list[str]:
    """The workers that were given a request, by name, in order; the last request if none is named."""
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


class Stream:
    """One answer in events, read as it comes."""

    def __init__(self, server: Any, body: dict[str, Any]) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        self.connection = server.raw("POST", PATH, body | options)
        self.received = b""

    def more(self) -> None:
        """Returns when some text has come that had not before: one event may hold much of it."""
        self.connection.setblocking(False)
        with suppress(BlockingIOError):
            while self._more():
                pass
        self.connection.settimeout(90)
        known = self.received.count(b'"content"')
        while self.received.count(b'"content"') == known:
            assert self._more(), self.received

    def rest(self) -> None:
        while self._more():
            pass
        self.connection.close()

    def _more(self) -> bool:
        data = self.connection.recv(65536)
        self.received += data
        return bool(data)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        lines = self.received.decode().split("\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    @property
    def text(self) -> str:
        return "".join(choice["delta"].get("content") or "" for choice in self.choices)

    @property
    def log_probs(self) -> list[Any]:
        return [entry for choice in self.choices for entry in (choice.get("logprobs") or {}).get("content") or []]

    @property
    def usage(self) -> dict[str, Any]:
        return counts(self.chunks[-1]["usage"])


def counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Without what the first worker had no time to say."""
    return {key: value for key, value in usage.items() if key != "prompt_tokens_details"}


def unary(server: Any, body: dict[str, Any]) -> dict[str, Any]:
    status, _, data = server.request("POST", PATH, body)
    assert status == 200, data
    answer: dict[str, Any] = json.loads(data)
    return answer


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_stream_goes_on_when_its_worker_is_killed(several: Any, deaths: int) -> None:
    server = several()
    body = chat(max_tokens=40 * (deaths + 1))
    whole = unary(server, body)
    stream = Stream(server, body)
    for death in range(1, deaths + 1):
        stream.more()
        kill(server, served(server)[-1])
        assert server.until(lambda wanted=death + 1: len(served(server)) == wanted, 10), server.log
    stream.rest()

    choice = whole["choices"][0]
    assert stream.text == choice["message"]["content"]
    assert stream.log_probs == choice["logprobs"]["content"]
    assert stream.usage == counts(whole["usage"])
    assert stream.choices[-1]["finish_reason"] == "length"
    assert stream.received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b"error" not in stream.received
    assert len(set(served(server))) == deaths + 1
    name = "dynamo_frontend_model_migration"
    assert server.until(lambda: server.metric(f"{name}_total", migration_type="ongoing_request") == deaths, 5)
    assert server.metric(f"{name}_duration_seconds_count", model="mock-model", outcome="success") == deaths
    assert server.metric("dynamo_frontend_requests_total", status="success") == 2


@contextmanager
def asking(server: Any, body: dict[str, Any]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Asks for a whole answer while the block runs; the result waits for it."""
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


def test_a_whole_answer_is_the_same_when_its_worker_is_killed(several: Any) -> None:
    server = several()
    whole = unary(server, chat(n=2))
    before = len([line for line in server.lines if "a request goes to engine" in line])
    with asking(server, chat(n=2)) as answer:

        def begun() -> bool:
            return len([line for line in server.lines if "a request goes to engine" in line]) == before + 2

        assert server.until(begun, 10)
        kill(server, served(server)[-1])

    assert answer()["choices"] == whole["choices"]
    assert counts(answer()["usage"]) == counts(whole["usage"])
    assert server.until(lambda: server.metric("dynamo_frontend_model_migration_total") >= 1, 5)


def test_with_migration_off_the_client_is_told(several: Any) -> None:
    server = several(limit=0)
    stream = Stream(server, chat(max_tokens=4000))
    stream.more()
    kill(server, served(server)[-1])
    stream.rest()

    assert b'data: {"error":' in stream.received
    assert b"[DONE]" not in stream.received
    assert not stream.received.endswith(b"0\r\n\r\n")
    assert unary(server, chat(max_tokens=5))["choices"][0]["finish_reason"] == "length"


def test_a_decode_worker_that_is_killed_is_followed_by_another(several: Any) -> None:
    server = several(roles=("prefill", "decode", "decode", "prefill"))
    assert server.until(lambda: server.request("GET", "/ready")[0] == 200, 10)
    whole = unary(server, chat())
    stream = Stream(server, chat())
    stream.more()
    first = served(server)
    kill(server, first[-1])
    stream.rest()

    assert stream.text == whole["choices"][0]["message"]["content"]
    assert stream.usage == counts(whole["usage"])
    assert stream.received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    prefill, decode, again, other = served(server)
    assert {prefill, again} <= {"first", "fourth"}
    assert {decode, other} == {"second", "third"}
