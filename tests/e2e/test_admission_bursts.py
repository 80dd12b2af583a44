"""Requests that come all at once, against real processes: workers are filled up to their threshold, and by one more."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

ACTIVE = "dynamo_frontend_active_requests"
COUNTED = "dynamo_frontend_worker_active_decode_blocks"
TOLD = "dynamo_frontend_worker_kv_blocks_active"
# A prompt of 25 blocks is more than a fifth of the 64. A step of the engine is longer than the pause between bursts. An
# answer needs another block only every six seconds.
CONFIG = """
transport: {{use: tcp}}
discovery: {{use: file, path: "{folder}"}}
client: {{drain_grace: 0}}
router: {{use: {router}}}
admission: {{use: token-capacity, active_decode_blocks_threshold: {threshold}}}
workers:
  mock:
    model: {{name: m}}
    engine: {{use: mocker, fixed_itl_ms: 400, block_size: 16, num_gpu_blocks: 64}}
    replicas: {workers}
    grace_period: 0
"""
BURST = 50
#: Of a prompt.
BLOCKS = 25
PAUSE = 0.2


def request(prompt: str) -> bytes:
    """Return a request for an answer that outlasts the test and fits the blocks."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 200, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    return head.encode() + b"content-type: application/json\r\n\r\n" + data


class Crowd:
    """Clients with an open connection each, to one frontend or to several in turn."""

    def __init__(self, servers: Sequence[Any], name: str) -> None:
        to = [servers[number % len(servers)] for number in range(BURST)]
        self._connections = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for server in to]
        # No two prompts have a block in common.
        self._requests = [request(f"{name}{number:02}".ljust(400, "x")) for number in range(BURST)]

    def ask(self) -> None:
        """Ask all at once."""
        for connection, data in zip(self._connections, self._requests, strict=True):
            connection.sendall(data)

    def let_in(self) -> int:
        """Return how many have not been refused."""
        answered, _, _ = select.select(self._connections, [], [], 0)
        refused = sum(b" 503 " in connection.recv(64, socket.MSG_PEEK) for connection in answered)
        return BURST - refused

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


@contextmanager
def bursts(servers: Sequence[Any], count: int) -> Iterator[list[int]]:
    """Yield how many are let in of each of several bursts, one soon after the other."""
    with ExitStack() as stack:
        crowds = [Crowd(servers, name) for name in "abcdefgh"[:count]]
        for crowd in crowds:
            stack.callback(crowd.close)
        for crowd in crowds:
            crowd.ask()
            time.sleep(PAUSE)

        def decided() -> bool:
            # A request that waits to be decided on is active too, but holds no blocks.
            active: float = sum(server.metric(ACTIVE) for server in servers)
            placed: bool = servers[0].metric(COUNTED) >= BLOCKS * active
            return placed and sum(crowd.let_in() for crowd in crowds) == active

        assert servers[0].until(decided, 10)
        yield [crowd.let_in() for crowd in crowds]


def heard(server: Any, workers: int) -> None:
    """Return once every worker has told of its load, and has nothing to do."""
    streams = [server.raw("POST", "/v1/completions", {"model": "m", "prompt": "a", "stream": True}) for _ in "ab"]
    assert server.until(lambda: server.metric(TOLD) >= workers, 20)
    for stream in streams:
        stream.close()
    assert server.until(lambda: server.metric(TOLD) == server.metric(COUNTED) == server.metric(ACTIVE) == 0, 20)


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("router", "threshold", "workers", "most"),
    [
        # One is above a fifth: it is let in, at each worker.
        ("kv", 0.2, 2, 2),
        pytest.param("round-robin", 0.2, 2, 2, marks=FULL),
        # Two are 50 blocks, just below. The worker begins to compute them with its next step.
        pytest.param("kv", 0.8, 1, 3, marks=FULL),
        pytest.param("round-robin", 0.8, 1, 3, marks=FULL),
    ],
)
def test_a_burst_admits_the_threshold_plus_one_per_worker(
    serve: Callable[..., Any], tmp_path: Path, router: str, threshold: float, workers: int, most: int
) -> None:
    folder = tmp_path / "discovery"
    server = serve(CONFIG.format(folder=folder, router=router, threshold=threshold, workers=workers))
    assert server.until(lambda: len(server.instances()) == workers, 20)
    heard(server, workers)

    with bursts([server], 3) as let_in:
        blocks = server.metric(COUNTED)

    assert 1 <= let_in[0] <= most
    assert let_in[1:] == [0, 0]
    # What is decided by is what operators see; answers have grown by a block or two.
    assert BLOCKS * let_in[0] <= blocks <= 30 * let_in[0]


@pytest.mark.parametrize(
    ("router", "threshold", "alone"),
    [("round-robin", 0.8, 3), pytest.param("round-robin", 0.2, 1, marks=FULL), pytest.param("kv", 0.8, 3, marks=FULL)],
)
def test_two_frontends_admit_at_most_twice_the_burst_before_synchronizing(
    serve: Callable[..., Any], tmp_path: Path, router: str, threshold: float, alone: int
) -> None:
    config = CONFIG.format(folder=tmp_path / "discovery", router=router, threshold=threshold, workers=1)
    servers = [serve(config), serve(config, command="frontend")]
    for server in servers:
        assert server.until(lambda: server.metric("dynamo_frontend_load_peers") == 1, 20)  # noqa: B023 - used at once
    heard(servers[0], 1)

    with bursts(servers, 3) as let_in:
        pass

    assert 1 <= let_in[0] <= 2 * alone
    assert let_in[1:] == [0, 0]
