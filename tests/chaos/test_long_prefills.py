"""A prompt that is computed for minutes is legitimate: at defaults it is moved nowhere, whatever its engine does to the
event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from dynamo_testing.ports import free_port

from tests.chaos.processes import Part
from tests.e2e.brokers import Servers

pytestmark = pytest.mark.full

CONFIG = """
workers:
  waiting: {model: {name: waiting}, engine: {use: mocker}, grace_period: 0.2}
  blocking: {model: {name: blocking}, engine: {use: mocker}, grace_period: 0.2}
transport: %s
discovery: %s
"""
ENGINES = ("waiting", "blocking")
WORKERS = 2

STARTS = 60.0

Prefills = Callable[..., AbstractAsyncContextManager["Fleet"]]


class Fleet:
    """A frontend, and two workers of each engine."""

    def __init__(self, url: str, parts: list[Part], workers: dict[str, list[Part]]) -> None:
        self.url = url
        self.parts = parts
        self.workers = workers

    @property
    def logs(self) -> str:
        return "\n".join(part.log for part in self.parts)

    def prefills(self, engine: str) -> int:
        """How many prompts were begun, by all workers of an engine."""
        return sum(worker.log.count("it prefills") for worker in self.workers[engine])


@asynccontextmanager
async def prefilling(folder: Path, profile: str, seconds: float) -> AsyncIterator[Fleet]:
    await asyncio.to_thread(folder.mkdir)
    servers = Servers(profile, folder)
    config = folder / "config.yaml"
    config.write_text(CONFIG % (json.dumps(servers.transport()), json.dumps(servers.discovery(quick=False))))
    port = free_port()
    workers = {
        name: [Part(config, name, str(seconds), command=("tests.chaos.prefilling",)) for _ in range(WORKERS)]
        for name in ENGINES
    }
    frontend = Part(config, "--only", "frontend", "--set", f"frontend.port={port}")
    parts = [*workers["waiting"], *workers["blocking"], frontend]
    fleet = Fleet(f"http://127.0.0.1:{port}", parts, workers)
    try:
        with servers:
            for part in parts:
                part.start()
            await seen(fleet)
            yield fleet
            await asyncio.gather(*(part.end() for part in parts))
    finally:
        for part in parts:
            part.abandon()


async def seen(fleet: Fleet) -> None:
    """Returns when the frontend sees all workers."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(STARTS):
        while True:
            try:
                async with session.get(f"{fleet.url}/health") as response:
                    if len((await response.json())["instances"]) == WORKERS * len(ENGINES):
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.1)


async def ask(fleet: Fleet, model: str, seconds: float) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": "a long story"}]}
    timeout = aiohttp.ClientTimeout(total=seconds + 60)
    url = f"{fleet.url}/v1/chat/completions"
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=body) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    "seconds",
    [
        # Longer than any lease lives, and a sample of the next one.
        pytest.param(20.0, marks=pytest.mark.timeout(300)),
        pytest.param(120.0, marks=pytest.mark.timeout(360)),
    ],
)
async def test_a_prompt_that_is_computed_for_long_is_moved_nowhere(tmp_path: Path, seconds: float) -> None:
    async def over(profile: str) -> None:
        async with prefilling(tmp_path / profile, profile, seconds) as fleet:
            answers = await asyncio.gather(*(ask(fleet, name, seconds) for name in ENGINES))

            for name, (status, body) in zip(ENGINES, answers, strict=True):
                assert status == 200, f"{profile}, {name}: {body}\n{fleet.logs}"
                assert body["choices"][0]["message"]["content"] == "done"
                assert fleet.prefills(name) == 1, f"{profile}, {name}:\n{fleet.logs}"

    await asyncio.gather(*(over(profile) for profile in ("tcp-file", "nats-etcd", "redis-redis")))
