"""The fair queue in a real server: two tenants by their API keys, the official SDK, and clients that leave."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from dynamo_http.auth import hash_of, new_key
from prometheus_client.parser import text_string_to_metric_families

LOUD, QUIET, OPERATORS = new_key(), new_key(), new_key()
DEPTH, RUNNING = "dynamo_admission_queue_requests", "dynamo_admission_running_requests"
REFUSALS = "dynamo_admission_refusals_total"

# One request at a time, of 0.4 s.
CONFIG = f"""
admission:
  use: fair-queue
  requests_per_worker: 1
  max_queue: 6
admin: {{token: "{hash_of(OPERATORS)}"}}
auth:
  keys:
    - {{id: loud, hash: "{hash_of(LOUD)}", tenant: loud}}
    - {{id: quiet, hash: "{hash_of(QUIET)}", tenant: quiet}}
client: {{drain_grace: 0}}
workers:
  mock:
    model: {{name: m}}
    engine: {{use: mocker, fixed_itl_ms: 100}}
    grace_period: 0
"""


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "a", "max_tokens": 4, "ignore_eos": True} | more


class Queued:
    """A server, and the requests that were sent to it."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def ask(self, key: str, **headers: str) -> tuple[int, dict[str, str], dict[str, Any]]:
        status, found, answer = self.server.request(
            "POST", "/v1/completions", body(), authorization=f"Bearer {key}", **headers
        )
        return status, found, json.loads(answer)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of all samples whose labels contain these; /metrics is the operators' own here."""
        page = self.server.request("GET", "/metrics", authorization=f"Bearer {OPERATORS}")[2].decode()
        samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
        return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())

    def depth(self, **labels: str) -> float:
        return self.metric(DEPTH, **labels)

    def send(self, key: str, **more: Any) -> socket.socket:
        """Return a request whose answer nobody reads."""
        data = json.dumps(body(**more)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=30)
        connection.sendall(head.encode() + data)
        return connection

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Keep a long request of the loud tenant on the worker, until the block is left."""
        with self.send(LOUD, max_tokens=5000, stream=True):
            assert self.server.until(lambda: self.metric(RUNNING) == 1, 10)
            yield

    def waiting(self, count: int, **labels: str) -> None:
        """Return once so many wait."""
        assert self.server.until(lambda: self.depth(**labels) == count, 10), self.depth(**labels)

    def idle(self) -> bool:
        return bool(self.server.until(lambda: self.depth() == 0 and self.metric(RUNNING) == 0, 20))


@pytest.fixture(scope="module")
def running(serve_for_module: Callable[..., Any]) -> Queued:
    return Queued(serve_for_module(CONFIG))


@pytest.fixture
def house(running: Queued) -> Iterator[Queued]:
    yield running
    assert running.idle(), "something is left"


def test_a_quiet_tenant_is_served_before_the_queue_of_a_loud_one(house: Queued) -> None:
    before = len(house.server.lines)

    def answered() -> list[str]:
        """Return the tenants whose requests were answered, in order."""
        lines = [line for line in house.server.lines[before:] if "dynamo.access" in line and "status=success" in line]
        return [line.rpartition(" tenant=")[2].strip() for line in lines]

    with ThreadPoolExecutor(7) as pool:
        with house.taken():
            loud = [pool.submit(house.ask, LOUD) for _ in range(5)]
            house.waiting(5)
            quiet = pool.submit(house.ask, QUIET)
            house.waiting(6)
        assert {task.result(60)[0] for task in (quiet, *loud)} == {200}

    # It has had nothing yet, and so is the next.
    assert house.server.until(lambda: len(answered()) == 6, 5)
    assert answered() == ["quiet", *["loud"] * 5]


def test_the_server_does_not_keep_a_client_longer_than_its_sdk_waits(house: Queued) -> None:
    """The client is still there to hear the refusal; without its header it would have waited for 30 s in vain."""
    client = openai.OpenAI(base_url=f"{house.server.url}/v1", api_key=QUIET, max_retries=0, timeout=6)
    with house.taken(), pytest.raises(openai.InternalServerError, match="All workers are busy"):
        client.completions.create(model="m", prompt="a", max_tokens=4)

    assert house.server.until(lambda: house.metric(REFUSALS, tenant="quiet", reason="deadline") == 1, 5)


def test_the_sdk_that_tries_again_gets_its_answer(house: Queued) -> None:
    client = openai.OpenAI(base_url=f"{house.server.url}/v1", api_key=LOUD, max_retries=5, timeout=30)
    with ThreadPoolExecutor(7) as pool:
        before = house.metric(REFUSALS, tenant="loud")
        with house.taken():
            loud = [pool.submit(house.ask, LOUD) for _ in range(6)]
            house.waiting(6)
            answer = pool.submit(client.completions.create, model="m", prompt="a", max_tokens=4)
            assert house.server.until(lambda: house.metric(REFUSALS, tenant="loud") > before, 10)
        assert {task.result(60)[0] for task in loud} == {200}

        usage = answer.result(60).usage
    assert usage is not None
    assert usage.completion_tokens == 4
