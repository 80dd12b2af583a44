"""Operators take workers out of service: every frontend goes by it, and only the end of the worker undoes it."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.asking import Stream, ask

CONFIG = """
router: {use: least-loaded}
client: {drain_grace: 0.5}
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 15}
    replicas: 2
    grace_period: 1
transport: {use: tcp}
discovery: {use: file, path: "%s", ttl: 2}
"""
#: Tokens of an answer that an operator has time to act during, and of one that outlasts a test.
LONG, LONGEST = 250, 20_000


def listed(server: Any) -> dict[str, dict[str, Any]]:
    """Return the workers as a frontend lists them, by name and replica."""
    status, _, body = server.request("GET", "/admin/workers")
    assert status == 200, body
    return {f"{entry['worker']}-{entry['replica']}": entry for entry in json.loads(body)["workers"]}


def states(server: Any) -> dict[str, str]:
    return {name: entry["state"] for name, entry in listed(server).items()}


def all_serve(workers: list[dict[str, Any]]) -> bool:
    return {worker["state"] for worker in workers} == {"serving"}


def change(server: Any, worker: str, action: str) -> dict[str, Any]:
    status, _, body = server.request("POST", f"/admin/workers/{worker}/{action}")
    assert status == 200, body
    entry: dict[str, Any] = json.loads(body)
    return entry


def served(entry: dict[str, Any]) -> float:
    """Return how many requests of clients a worker has had."""
    with urllib.request.urlopen(f"{entry['system_url']}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(r"^dynamo_component_requests_total\{.*\} (\S+)$", text, re.M))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    return CONFIG % tmp_path_factory.mktemp("discovery")


@pytest.fixture(scope="module")
def whole(serve_for_module: Any, config: str) -> Any:
    """Return both workers and a frontend."""
    return serve_for_module(config)


@pytest.fixture
def server(whole: Any) -> Iterator[Any]:
    """Yield the same, with two workers in service that have nothing to do, before and after a test."""

    def idle() -> bool:
        workers = listed(whole)
        return len(workers) == 2 and all(
            (entry["state"], entry["requests"]) == ("serving", 0) for entry in workers.values()
        )

    assert whole.until(idle, 20), whole.log
    yield whole
    for name, state in states(whole).items():
        if state != "serving":
            change(whole, name, "uncordon")


@pytest.fixture
def another(serve: Any, config: str) -> Callable[[], Any]:
    """Start another frontend of the deployment, which has seen the workers when it is returned."""

    def start() -> Any:
        frontend = serve(config, command="frontend")
        assert frontend.until(lambda: len(listed(frontend)) == 2, 20), frontend.log
        return frontend

    return start


def test_a_cordoned_worker_gets_no_new_requests_and_finishes_its_own(server: Any, another: Callable[[], Any]) -> None:
    second = another()
    before = {name: served(entry) for name, entry in listed(server).items()}
    running = [Stream(server, max_tokens=LONG) for _ in range(2)]
    for stream in running:
        stream.begun()

    # Asked of one frontend, it holds for the others, and for those that come later.
    cordoned = change(second, "mock-0", "cordon")
    assert server.until(lambda: states(server)["mock-0"] == "cordoned", 10)
    texts = [ask(frontend, max_tokens=2) for frontend in (server, second) for _ in range(4)]
    second.end()
    third = another()
    seen = states(third)
    texts += [ask(third, max_tokens=2) for _ in range(4)]
    ends = [stream.text() for stream in running]

    assert (cordoned["state"], cordoned["requests"]) == ("cordoned", 1)
    assert seen == {"mock-0": "cordoned", "mock-1": "serving"}
    assert len(set(texts)) == 1
    assert ends[0] == ends[1] != ""
    now = listed(server)
    # /metrics is cached for a second.
    counted = {"mock-0": 1, "mock-1": 13}
    assert server.until(lambda: {name: served(entry) - before[name] for name, entry in now.items()} == counted, 5)
    assert server.until(lambda: listed(server)["mock-0"]["drained"], 10)

    assert change(third, now["mock-0"]["id"], "uncordon")["state"] == "serving"
    assert server.until(lambda: states(server)["mock-0"] == "serving", 10)
    one, other = Stream(server, max_tokens=LONGEST), Stream(server, max_tokens=LONGEST)
    one.begun()
    other.begun()
    assert [entry["requests"] for entry in listed(server).values()] == [1, 1]
    one.close()
    other.close()


def test_a_worker_that_was_killed_and_started_again_is_in_service(server: Any) -> None:
    entry = change(server, "mock-1", "drain")
    # Not on a core that holds up the others: the worker has nothing to do.
    os.kill(entry["pid"], signal.SIGKILL)

    def back() -> bool:
        # The record of the killed one lives until its lease ends.
        workers = json.loads(server.request("GET", "/admin/workers")[2])["workers"]
        return len(workers) == 2 and entry["id"] not in {worker["id"] for worker in workers} and all_serve(workers)

    assert server.until(back, 30), server.log
