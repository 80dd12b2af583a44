"""Many requests that add to one conversation at the same time, in one process and in several."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_core import Expected, FrontendServices, ResponseStoreServices
from dynamo_plugin_frontend_responses.config import ResponsesConfig
from dynamo_plugin_frontend_responses.memory import ResponseMemory
from dynamo_plugin_frontend_responses.memory_store import MemoryStore, MemoryStoreConfig
from dynamo_runtime.telemetry.request_accounting import RequestTracker
from dynamo_telemetry import Metrics

WRITERS = 40


class Shared(MemoryStore):
    """A store that several processes ask: between the look of one and its write come others."""

    def __init__(self) -> None:
        super().__init__(MemoryStoreConfig(), ResponseStoreServices(Metrics()))
        self.writes = 0

    async def get(self, owner: str, keys: Sequence[str], ttl: float | None = None) -> list[bytes | None]:
        found = await super().get(owner, keys, ttl)
        await asyncio.sleep(0)
        return found

    async def put(self, owner: str, records: Mapping[str, bytes], ttl: float, expected: Expected = None) -> bool:
        await asyncio.sleep(0)
        self.writes += 1
        return await super().put(owner, records, ttl, expected)


def frontend(store: Shared, models: Any) -> ResponseMemory:
    """Return the memory of one frontend process."""
    metrics = Metrics()
    services = FrontendServices(models, RequestTracker(metrics, lambda record: None), metrics, 5.0, 15.0)
    return ResponseMemory(store, ResponsesConfig(), services)


async def add_at_once(*frontends: ResponseMemory) -> int:
    """Have many requests add an item each to a new conversation; return the number of its items afterwards."""
    talk = (await frontends[0].begin_conversation("me", [], {})).id
    await asyncio.gather(
        *(
            frontends[number % len(frontends)].add("me", talk, [{"role": "user", "content": str(number)}])
            for number in range(WRITERS)
        )
    )
    return len({item["content"][0]["text"] for item in await frontends[0].items_of("me", talk)})


async def test_requests_of_one_process_take_turns(cold_server: Any) -> None:
    store = Shared()

    assert await add_at_once(frontend(store, cold_server.directory)) == WRITERS
    # The conversation itself is the first. No write was tried in vain.
    assert store.writes == 1 + WRITERS


async def test_requests_of_several_processes_all_come_through(cold_server: Any) -> None:
    store = Shared()

    assert await add_at_once(*(frontend(store, cold_server.directory) for _ in range(WRITERS))) == WRITERS
