"""Calls over a real NATS and a real Redis server: how much they say, logins, and what happens while they are away.

What holds over every transport is in `test_profiles.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.servers.ports import free_port

from tests.e2e.asking import PATH, Stream, ask, chat
from tests.e2e.brokers import Nats, Redis

PASSWORD = "only-for-these-tests"

NATS = """
transport: {use: nats, servers: ["%(url)s"], user: tests, password: "${env:TEST_PASSWORD}", unavailable_wait: 1}
"""

REDIS = """
transport:
  {use: redis, url: "%(url)s", username: tests, password: "${env:TEST_PASSWORD}", prefix: test, unavailable_wait: 1}
"""

CONFIG = """
discovery: {use: file, path: "%(folder)s", ttl: 2}
workers:
  mock:
    model: {name: mock-model, migration_limit: 3}
    engine: {use: mocker, fixed_itl_ms: 10}
    replicas: 2
    system_port: %(port)s
    grace_period: 0
client: {drain_grace: 0}
"""

#: What a login that is refused is told.
REFUSED = {
    Nats: r"does not let us in .*check `user`",
    Redis: r"transport\.password: Redis at .* refuses the login",
}


@pytest.fixture(scope="module", params=["nats", pytest.param("redis", marks=pytest.mark.full)])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nats | Redis]:
    """Yield a server that keeps nothing, and lets in one user."""
    tmp_path = tmp_path_factory.mktemp("broker")
    if request.param == "nats":
        made: Nats | Redis = Nats(tmp_path, f'authorization {{ user: tests, password: "{PASSWORD}" }}')
    else:
        made = Redis(tmp_path, "--user", "tests", "on", f">{PASSWORD}", "~test:*", "&test:*", "+@all")
    with made:
        yield made


def config(broker: Nats | Redis, folder: Path) -> str:
    head = NATS if isinstance(broker, Nats) else REDIS
    return head % {"url": broker.url} + CONFIG % {"folder": folder / "discovery", "port": free_port(2)}


@pytest.fixture(scope="module")
def server(serve_for_module: Any, broker: Nats | Redis, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a frontend and two workers, which are seen, each in a process of its own."""
    text, env = config(broker, tmp_path_factory.mktemp("records")), {"TEST_PASSWORD": PASSWORD}
    for replica in ("0", "1"):
        own = ["--only", "workers.mock", "--replica", replica]
        serve_for_module(text, *own, env=env, ready="health and metrics of this process are")
    server = serve_for_module(text, env=env, command="frontend")
    assert server.until(lambda: len(server.instances()) == 2, 20), server.log
    return server


def test_many_tokens_pass_in_few_messages(server: Any, broker: Nats | Redis) -> None:
    ask(server)
    before = broker.received()

    streams = [Stream(server, max_tokens=50) for _ in range(40)]
    for stream in streams:
        stream.text()

    assert broker.received() - before < 40 * 50
    assert PASSWORD not in server.log


def test_while_the_server_is_away_streams_wait_for_it_and_new_requests_are_refused(
    server: Any, broker: Nats | Redis
) -> None:
    expected = ask(server, max_tokens=150)
    streams = [Stream(server, max_tokens=150) for _ in range(4)]
    for stream in streams:
        stream.begun()

    broker.kill()
    status, headers, body = server.request("POST", PATH, chat())
    broker.start()

    assert status == 503
    assert 1 <= int(headers["retry-after"]) <= 60
    assert b"message broker" in body
    assert b"127.0.0.1" not in body
    assert [stream.text() for stream in streams] == [expected] * 4
    assert ask(server, max_tokens=150) == expected


def test_a_wrong_password_ends_the_start_with_one_line(serve: Any, broker: Nats | Redis, tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=REFUSED[type(broker)]) as caught:
        serve(config(broker, tmp_path), env={"TEST_PASSWORD": "another"}, command="frontend")

    assert "Traceback" not in str(caught.value)
