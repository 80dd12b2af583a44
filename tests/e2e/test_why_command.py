"""`dynamo why` tells the whole way of a request, however it ended."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.asking import Stream, dynamo

HOUSE = """
router: {use: kv}
extensions: [{use: feed}]
client: {drain_grace: 0}
workers:
"""
WORKER = """
  %(name)s:
    model: {name: %(model)s, migration_limit: 3}
    engine: {use: "%(engine)s", fixed_itl_ms: 20}
    disaggregation_mode: %(mode)s
    grace_period: 0
"""
#: What one process for most tests needs besides its workers: each has a model of its own.
ADMISSION = """
admission:
  - {use: rate-limit, limits: [{by: [], models: [limited], requests_per_minute: 1, burst_requests: 1}]}
  - {use: fair-queue, requests_per_worker: 1}
"""
PROCESSES = """
transport: {use: tcp}
discovery: {use: file, path: "%s", ttl: 2}
"""

#: An engine of a file, of which every request fails.
HALTING = """
from dynamo_core import BackendError
from dynamo_plugin_engine_mocker.engine import MockerEngine

DYNAMO_API = 1


class Fails(MockerEngine):
    async def generate(self, request, ctx):
        raise BackendError.Unknown("the prompt did not fit on the moon")
        yield
"""


class House:
    """A server with workers in these roles, and what it says of requests."""

    def __init__(self, serve: Any, workers: list[str], more: str = "") -> None:
        self.server = serve(HOUSE + "".join(workers) + more)
        assert self.server.until(lambda: len(self.state()["workers"]) == len(workers), 20), self.server.log

    def state(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.server.request("GET", "/admin/state")[2])
        return told

    def ask(self, request_id: str, **more: Any) -> int:
        status: int = self.server.request("POST", "/v1/chat/completions", chat(**more), **{"x-request-id": request_id})[
            0
        ]
        return status

    def events(self, request_id: str) -> list[dict[str, Any]]:
        status, _, answer = self.server.request("GET", f"/admin/requests/{request_id}")
        if status != 200:
            return []
        found: list[dict[str, Any]] = json.loads(answer)["request"]["events"]
        return found

    def ended(self, request_id: str) -> list[dict[str, Any]]:
        """Return the events of a request, once it has ended."""
        assert self.server.until(lambda: [one["event"] for one in self.events(request_id)][-1:] == ["finished"], 20)
        return self.events(request_id)

    def why(self, request_id: str) -> str:
        asked = dynamo("why", request_id, "--url", self.server.url)
        assert asked.exit_code == 0, asked.stderr
        return asked.stdout


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "mock-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, **more}


def worker(name: str, mode: str = "agg", engine: str = "mocker", model: str = "mock-model") -> str:
    """Return the part of a config."""
    return WORKER % {"name": name, "mode": mode, "engine": engine, "model": model}


@pytest.fixture(scope="module")
def shared(serve_for_module: Any, tmp_path_factory: pytest.TempPathFactory) -> House:
    """Return one process, for requests whose workers live."""
    (file := tmp_path_factory.mktemp("engine") / "halting.py").write_text(HALTING)
    file.chmod(0o644)
    workers = [
        *(worker(name) for name in ("one", "other")),
        *(worker(model, model=model) for model in ("limited", "queued")),
        worker("fails", "prefill", f"{file}:Fails", model="failing"),
        worker("decodes", "decode", model="failing"),
    ]
    return House(serve_for_module, workers, ADMISSION)


@pytest.fixture
def house(serve: Any, tmp_path: Path) -> House:
    """Return two workers, each in a process."""
    return House(serve, [worker("one"), worker("other")], PROCESSES % (tmp_path / "discovery"))


def test_an_answered_request_shows_candidates_and_times(shared: House) -> None:
    assert shared.ask("answered") == 200

    events = shared.ended("answered")
    assert [event["event"] for event in events] == [
        "received",
        "admitted",
        "routed",
        "attempted",
        "first_token",
        "finished",
    ]
    assert len(events[2]["candidates"]) == 2
    assert "HTTP 200" in shared.why("answered")


def test_why_names_the_refusing_plugin_and_its_reason(shared: House) -> None:
    assert shared.ask("let in", model="limited") == 200
    assert shared.ask("refused", model="limited") == 429

    assert shared.ended("refused")[1]["event"] == "refused"
    told = shared.why("refused")
    assert "by rate-limit" in told
    assert "the client may try again after" in told


def test_why_reports_the_time_in_the_queue(shared: House) -> None:
    first = Stream(shared.server, **chat(model="queued", max_tokens=4000))
    first.begun()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(shared.ask, "waited", model="queued", max_tokens=2)
        assert shared.server.until(lambda: shared.server.metric("dynamo_admission_queue_requests") == 1, 20)
        time.sleep(0.1)
        first.close()
        assert asked.result(90) == 200

    admitted = shared.ended("waited")[1]
    assert admitted["event"] == "admitted"
    assert admitted["waited"] > 0.1


def test_why_shows_both_workers_of_a_migrated_request(house: House) -> None:
    one = house
    stream = Stream(one.server, **chat(max_tokens=100))
    stream.begun()
    (running,) = [worker for worker in one.state()["workers"] if worker["requests"]]
    os.kill(running["pid"], signal.SIGKILL)

    stream.rest()

    assert one.server.until(lambda: bool(one.state()["recent"]), 20)
    (line,) = one.state()["recent"]
    events = one.ended(line["id"])
    (moved,) = [event for event in events if event["event"] == "moved"]
    assert moved["worker"] == running["id"]
    first, second = [event for event in events if event["event"] == "routed"]
    assert first["worker"] == running["id"] != second["worker"] == line["worker"]
    assert second["after"]
    assert "another is sought" in one.why(line["id"])


def test_why_reports_a_client_disconnect(shared: House) -> None:
    stream = Stream(shared.server, **chat(max_tokens=1000))
    stream.begun()
    stream.close()

    assert shared.ended(stream.request_id)[-1]["error_type"] == "cancelled"
    assert "cancelled" in shared.why(stream.request_id)


def test_why_reports_the_engines_error_of_a_failed_prefill(shared: House) -> None:
    assert shared.ask("failed", model="failing") == 500

    finished = shared.ended("failed")[-1]
    assert finished["reason"].endswith("the prompt did not fit on the moon")
    assert "HTTP 500: " in shared.why("failed")
    assert "the prompt did not fit on the moon" in shared.why("failed")
