"""One config, five profiles, one suite: `examples/profiles/dynamo.yaml` in real processes, over real servers."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.servers.ports import free_port

from tests.e2e.asking import PATH, Stream, answer, ask, chat
from tests.e2e.brokers import PROFILES, Servers

CONFIG = (Path(__file__).parents[2] / "examples" / "profiles" / "dynamo.yaml").read_text()

#: The profiles over Redis are left to the long lanes: kits hold its transport and its discovery in every run.
LONG = ("tcp-redis", "redis-redis")
EVERY = [pytest.param(name, marks=pytest.mark.full if name in LONG else ()) for name in PROFILES]

#: Where one part can die and the others go on.
WITH_PROCESSES = pytest.mark.parametrize("house", EVERY[:-1], indirect=True)

#: What is held while a request runs, or waits for a place.
GAUGES = (
    "dynamo_frontend_active_requests",
    "dynamo_frontend_inflight_requests",
    "dynamo_component_inflight_requests",
    "dynamo_engine_request",
    "dynamo_request_queue",
    "dynamo_mocker_running_requests",
    "dynamo_mocker_kv_used_blocks",
)

#: How many processes a worker has.
REPLICAS = {"mock": 2, "small": 1, "prefill": 1, "decode": 1}

#: Nobody is late when it ends.
QUICK = ["client.drain_grace=0", *(f"workers.{name}.grace_period=0.5" for name in REPLICAS)]


class House:
    """The config under one profile, and what its processes say of themselves."""

    def __init__(self, server: Any, ports: list[int]) -> None:
        """`ports`: where the workers have their metrics, if not all is in one process."""
        self.server = server
        self._ports = ports

    def workers(self, name: str) -> dict[str, int]:
        """Return instance id and pid of the workers of this name."""
        listed = json.loads(self.server.request("GET", "/health")[2])["instances"]
        return {entry["instance_id"]: entry["pid"] for entry in listed if entry["worker"] == name}

    def again(self, name: str, gone: str) -> bool:
        """Return whether a worker is there no more, soon, and another one in its place."""

        def seen() -> bool:
            here = self.workers(name)
            return len(here) == REPLICAS[name] and gone not in here

        return bool(self.server.until(seen, 20))

    def held(self) -> dict[str, float]:
        """Return the gauges of requests that are not zero, of the frontend and of the workers together."""
        urls = [f"http://127.0.0.1:{port}/metrics" for port in (self.server.port, *self._ports)]
        totals: dict[str, float] = dict.fromkeys(GAUGES, 0.0)
        for url in urls:
            with urllib.request.urlopen(url, timeout=10) as response:
                text = response.read().decode()
            for name, value in re.findall(r"^([a-z_]+)(?:\{.*\})? (\S+)$", text, re.M):
                if name in totals:
                    totals[name] += float(value)
        return {name: total for name, total in totals.items() if total}

    def quiet(self) -> bool:
        """Return whether nothing is held, soon."""
        return bool(self.server.until(lambda: not self.held(), 8))


def options(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.fixture(scope="module")
def alone(serve_for_module: Any) -> Any:
    """Return the server that the others are compared with: all in one process."""
    return serve_for_module(CONFIG, *options(QUICK), "--profile", "inproc")


@pytest.fixture(scope="module", params=EVERY)
def house(
    request: pytest.FixtureRequest, serve_for_module: Any, alone: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    """Yield the whole system under one profile; it must end well, too."""
    profile: str = request.param
    if profile == "inproc":
        yield House(alone, [])
        return
    with Servers(profile, tmp_path_factory.mktemp(profile)) as servers:
        first = free_port(sum(REPLICAS.values()))
        row = list(range(first, first + sum(REPLICAS.values())))
        settings, left = list(QUICK), iter(row)
        for name, count in REPLICAS.items():
            first, *_ = [next(left) for _ in range(count)]
            settings.append(f"workers.{name}.system_port={first}")
        server = serve_for_module(CONFIG, *options(settings), *servers.options(), "--profile", profile)
        assert server.until(lambda: len(server.instances()) == sum(REPLICAS.values()), 30), server.log
        yield House(server, row)
        before = len(server.lines)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.log
        # Before that, answers were broken off, and the log says where.
        assert "Traceback" not in "".join(server.lines[before:]), server.log


@pytest.mark.parametrize("model", ["mock-model", "split-model"])
def test_answers_are_those_of_one_process(house: House, alone: Any, model: str) -> None:
    """The second model has its prompts computed by one worker, and its answers given by another."""
    for seed in (1, 2):
        asked = {"model": model, "seed": seed, "max_tokens": 20}
        expected, got = (answer(server, **asked) for server in (alone, house.server))
        assert got["choices"] == expected["choices"]
        assert got["usage"] == expected["usage"]
        assert Stream(house.server, **asked).text() == expected["choices"][0]["message"]["content"]
    assert set(REPLICAS) == {name for name in REPLICAS if len(house.workers(name)) == REPLICAS[name]}


def test_embeddings_are_those_of_one_process(house: House, alone: Any) -> None:
    body = {"model": "mock-model", "input": ["one", "another"]}
    expected, got = (json.loads(each.request("POST", "/v1/embeddings", body)[2]) for each in (alone, house.server))

    assert len(got["data"]) == 2
    assert got["data"] == expected["data"]


def test_documents_are_sorted_as_in_one_process(house: House, alone: Any) -> None:
    body = {"model": "mock-model", "query": "where is rain", "documents": ["an egg", "rain is there", "rain"]}
    expected, got = (json.loads(each.request("POST", "/v1/rerank", body)[2]) for each in (alone, house.server))

    assert [result["index"] for result in got["results"]] == [1, 2, 0]
    assert (got["results"], got["usage"]) == (expected["results"], expected["usage"])


def test_a_client_that_leaves_leaves_nothing_behind(house: House) -> None:
    streams = [Stream(house.server, model=model, max_tokens=2000) for model in ("mock-model", "split-model")]
    for stream in streams:
        stream.begun()
    unary = house.server.raw("POST", PATH, chat(max_tokens=2000))
    assert house.server.until(house.held, 5)

    for each in (*streams, unary):
        each.close()

    assert house.quiet(), house.held()


def test_a_worker_refuses_requests_over_its_capacity(house: House) -> None:
    running = [Stream(house.server, model="small-model", max_tokens=2000) for _ in range(2)]
    for stream in running:
        stream.begun()
    waiting = [Stream(house.server, model="small-model", max_tokens=2000) for _ in range(2)]
    # Those that run count as taken, too.
    assert house.server.until(lambda: house.held().get("dynamo_request_queue") == 2, 5), house.held()

    status, headers, body = house.server.request("POST", PATH, chat(model="small-model"))

    assert status == 503
    assert 1 <= int(headers["retry-after"]) <= 60
    assert b"All workers are busy" in body
    for stream in (*running, *waiting):
        stream.close()
    assert house.quiet(), house.held()


@WITH_PROCESSES
def test_workers_that_are_killed_break_only_answers_that_may_not_move(house: House, alone: Any) -> None:
    expected = ask(alone, max_tokens=200)
    move = [Stream(house.server, max_tokens=200) for _ in range(4)]
    stay = Stream(house.server, model="small-model", max_tokens=2000)
    for stream in (*move, stay):
        stream.begun()
    dead = {name: next(iter(house.workers(name).items())) for name in ("mock", "small")}

    for _, pid in dead.values():
        os.kill(pid, signal.SIGKILL)
    broken = stay.rest()

    assert [stream.text() for stream in move] == [expected] * 4
    assert broken.split(b"data: ")[-1].startswith(b'{"error":')
    assert b"[DONE]" not in broken
    # Nor does the connection end as if all were well.
    assert not broken.endswith(b"0\r\n\r\n")
    assert ask(house.server, max_tokens=200) == expected
    for name, (instance, _) in dead.items():
        # A ttl of 2 s, and the second in which a store notices.
        assert house.server.until(lambda name=name, gone=instance: gone not in house.workers(name), 5), house.server.log
        assert house.again(name, instance), house.server.log
    assert answer(house.server, model="small-model", max_tokens=3)["choices"][0]["finish_reason"] == "length"
    assert house.quiet(), house.held()


@pytest.mark.parametrize(
    "house",
    [pytest.param(name, marks=pytest.mark.full if at else ()) for at, name in enumerate(PROFILES[:-1])],
    indirect=True,
)
def test_a_rolling_restart_of_workers_fails_no_request(house: House, alone: Any) -> None:
    # Longer than the grace of a worker that ends.
    expected = ask(alone, max_tokens=200)
    over = threading.Event()
    answers: list[str] = []

    def ask_on() -> None:
        while not over.is_set():
            answers.append(ask(house.server, max_tokens=200))
            answers.append(Stream(house.server, max_tokens=200).text())

    with ThreadPoolExecutor(3) as clients:
        asking = [clients.submit(ask_on) for _ in range(3)]
        try:
            for instance, pid in house.workers("mock").items():
                os.kill(pid, signal.SIGTERM)
                assert house.again("mock", instance), house.server.log
        finally:
            over.set()
        for each in asking:
            each.result(90)

    assert len(answers) >= 6
    assert set(answers) == {expected}
    assert house.quiet(), house.held()
