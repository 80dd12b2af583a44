"""Stored responses with real processes: which of them find one, after a restart too, and without the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.servers.redis_server import RedisServer, redis_binary
from dynamo_testing.servers.server_process import starting

__all__ = ["redis_binary"]

CONFIG = """
frontend: {processes: %d, response_store: %s, response_store_timeout: 4}
client: {drain_grace: 0}
auth: {keys: [{id: ann, env: ANN}, {id: bob, env: BOB}]}
admin: {port: 0}
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, speedup_ratio: 0}
    grace_period: 0
"""
PATH = "/v1/responses"
KEYS = {"ANN": "key-of-ann-0123456789", "BOB": "key-of-bob-0123456789"}


class Client:
    """One key at one server."""

    def __init__(self, server: Any, name: str = "ANN") -> None:
        self.server = server
        self.header = {"authorization": f"Bearer {KEYS[name]}"}

    def ask(self, method: str = "POST", path: str = PATH, **fields: Any) -> tuple[int, Any]:
        body = {"model": "mock-model", "input": "Hi", "max_output_tokens": 4, **fields} if method == "POST" else None
        status, _, answer = self.server.request(method, path, body, **self.header)
        return status, json.loads(answer)


def chain(*clients: Client) -> str:
    """Return a chain of responses, each by the next client; the id of its last."""
    previous: dict[str, str] = {}
    made: dict[str, Any] = {}
    for client in clients:
        status, made = client.ask(**previous)
        assert (status, made["store"]) == (200, True), made
        previous = {"previous_response_id": made["id"]}
    return str(made["id"])


def items_of(client: Client, response: str) -> int:
    status, listed = client.ask("GET", f"{PATH}/{response}/input_items?limit=100")
    assert status == 200, listed
    return len(listed["data"])


def test_processes_of_a_host_share_the_sqlite_store_across_restarts(serve: Any, tmp_path: Path) -> None:
    store = f"{{use: sqlite, path: {tmp_path / 'responses.db'}}}"
    planes = f"\ntransport: {{use: tcp}}\ndiscovery: {{use: file, path: {tmp_path / 'found'}}}\n"
    first = serve(CONFIG % (2, store) + planes, env=KEYS)
    made = chain(*[Client(first)] * 12)
    first.end()

    second = serve(CONFIG % (1, store), env=KEYS)

    assert items_of(Client(second), made) == 23
    assert Client(second, "BOB").ask("GET", f"{PATH}/{made}")[0] == 404
    assert chain(Client(second)) != made


@pytest.fixture(scope="module")
def redis(redis_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Yield the store of the servers of all tests; one that was killed runs again at the end of its test."""
    with starting(tmp_path_factory.mktemp("redis"), partial(RedisServer, redis_binary)) as make:
        yield make()


@pytest.fixture(scope="module")
def clients(serve_for_module: Any, redis: RedisServer) -> dict[str, Client]:
    """Return a client of a server that fails without its store, and one of a server that goes on."""
    config = CONFIG % (1, f"{{use: redis, url: '{redis.url}', timeout: 1}}")
    return {
        policy: Client(serve_for_module(config, "--set", f"frontend.response_store_policy={policy}", env=KEYS))
        for policy in ("fail", "pass")
    }


def test_frontends_of_two_servers_share_the_redis_store(clients: dict[str, Client]) -> None:
    one, other = clients.values()

    made = chain(one, other, one, other)

    assert items_of(one, made) == 7
    assert one.ask("DELETE", f"{PATH}/{made}")[0] == 200
    assert other.ask("GET", f"{PATH}/{made}")[0] == 404


def test_a_dead_store_follows_the_policy_and_recovers(clients: dict[str, Client], redis: RedisServer) -> None:
    chain(*clients.values())
    redis.kill()

    answers = {policy: client.ask() for policy, client in clients.items()}
    redis.start()

    assert [status for status, _ in answers.values()] == [503, 200], answers
    assert answers["fail"][1]["error"]["code"] == "response_store_unavailable"
    assert answers["pass"][1]["store"] is False
    for client in clients.values():
        assert client.server.until(lambda client=client: client.ask()[1].get("store") is True, 10)
