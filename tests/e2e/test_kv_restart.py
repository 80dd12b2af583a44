"""A router that is restarted while requests come, when the caches of its workers hold a million blocks."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

#: A block is a token, and a token is a byte, so that a few requests fill many blocks.
CONFIG = """
frontend: {use: openai}
client: {drain_grace: 0.5}
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, speedup_ratio: 0, block_size: 1, num_gpu_blocks: 400000, context_length: 131072}
    replicas: 4
    grace_period: 0.5
transport: {use: tcp}
discovery: {use: file, path: "%s", ttl: 5}
"""
PROMPTS = 16
LENGTH = 2**16
#: Tokens of a filled prompt that the first question begins with, and how many more with each question: so that a worker
#: that was sent a prompt by mistake does not have what the next question with it asks for.
FIRST, MORE = 500, 4

Server = Any


def prompt_of(number: int, length: int) -> str:
    """A prompt that differs from every other number's from the first token."""
    return f"{chr(ord('a') + number)}: so it goes, and goes".ljust(length, "!")


def complete(server: Server, prompt: str) -> int:
    """Asks, and returns how many tokens of the prompt the worker had."""
    body = {"model": "mock-model", "prompt": prompt, "max_tokens": 2}
    status, _, answer = server.request("POST", "/v1/completions", body)
    assert status == 200, answer
    return (json.loads(answer)["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def index_blocks(server: Server) -> float:
    """How many blocks the router of a frontend knows of."""
    return float(server.metric("dynamo_router_kv_index_blocks", model="mock-model"))


@dataclass
class Run:
    """Clients that ask one question after the other. The newest of `fronts` is asked."""

    fronts: list[Server]
    #: Whether each answer of a frontend, by its place in `fronts`, came from a worker that had what was asked before.
    hits: dict[int, list[bool]] = field(default_factory=dict)
    failures: list[BaseException] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def client(self, first: int) -> None:
        number = first
        while not self.over.is_set():
            number += 2
            front = len(self.fronts) - 1
            known = FIRST + MORE * number
            prompt = prompt_of(number % PROMPTS, known) + f" and {number} times more"
            try:
                cached = complete(self.fronts[front], prompt)
            except BaseException as error:
                self.failures.append(error)
            else:
                self.hits.setdefault(front, []).append(cached >= known)

    def all_hit(self, front: int, count: int = 2 * PROMPTS) -> bool:
        """Whether the newest answers of a frontend, so many, all came from where their prompts are."""
        newest = self.hits.get(front, [])[-count:]
        return len(newest) == count and all(newest)


@contextmanager
def running(*fronts: Server) -> Iterator[Run]:
    run = Run(list(fronts))
    with ThreadPoolExecutor(2) as clients:
        asking = [clients.submit(run.client, first) for first in range(2)]
        try:
            yield run
        finally:
            run.over.set()
    for one in asking:
        one.result()


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_router_that_is_restarted_at_a_million_blocks_soon_hits_again_and_no_request_fails(
    serve: Any, tmp_path: Path
) -> None:
    config = CONFIG % (tmp_path / "discovery")
    # Its own frontend only spreads the prompts evenly.
    workers = serve(config, "--set", "router.use=round-robin")
    assert workers.until(lambda: len(workers.instances()) == 4, 30), workers.log
    before = serve(config, "--set", "router.use=kv", command="frontend")
    assert before.until(lambda: len(before.instances()) == 4, 20), before.log
    for number in range(PROMPTS):
        assert complete(workers, prompt_of(number, LENGTH)) == 0
    assert before.until(lambda: index_blocks(before) >= PROMPTS * LENGTH, 60), index_blocks(before)

    with running(before) as run:
        assert before.until(lambda: run.all_hit(0), 30), run.hits
        after = serve(config, "--set", "router.use=kv", command="frontend")
        assert after.until(lambda: len(after.instances()) == 4, 20), after.log
        run.fronts.append(after)
        before.signal(signal.SIGTERM)

        # From here on, as is promised: ten seconds.
        assert after.until(lambda: run.all_hit(1), 10), run.hits
        assert before.wait() == 0, before.log
        answered = len(run.hits[1])
        assert after.until(lambda: len(run.hits[1]) > answered + PROMPTS, 10)

    assert run.failures == []
    assert run.all_hit(1)
    assert index_blocks(after) >= PROMPTS * LENGTH
