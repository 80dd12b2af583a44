"""What engines tell, on its way to the event plane: limits, repetition, engines that tell nothing."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest
from dynamo_core.contracts.engine import LLMEngine
from dynamo_core.contracts.transports.events import EventPlane, Publisher
from dynamo_core.protocol.events import ActiveLoad
from dynamo_core.tasks import TaskSet
from dynamo_runtime.worker import publishers
from dynamo_runtime.worker.publishers import EnginePublishers, LoadPublisher


class Recorder(Publisher):
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[list[ActiveLoad]] = []
        self._more = asyncio.Event()

    def send(self, payload: bytes) -> bool:
        self.sent.append(msgspec.msgpack.decode(payload, type=list[ActiveLoad]))
        self._more.set()
        return True

    async def aclose(self) -> None:
        return None

    async def until(self, messages: int) -> None:
        async with asyncio.timeout(5):
            while len(self.sent) < messages:
                self._more.clear()
                await self._more.wait()


def load(blocks: int, rank: int = 0) -> ActiveLoad:
    return ActiveLoad(1, rank, kv_used_blocks=blocks)


async def test_the_first_load_is_sent_at_once_and_of_many_that_follow_only_the_newest() -> None:
    recorder, tasks = Recorder(), TaskSet()
    loads = LoadPublisher(recorder)
    tasks.spawn(loads.run(), name="loads")

    loads.send(load(0))
    await recorder.until(1)
    for blocks in range(1, 1000):
        loads.send(load(blocks))
        await asyncio.sleep(0)
    loads.send(load(5, rank=1))
    await recorder.until(2)
    await tasks.aclose()

    assert recorder.sent == [[load(0)], [load(999), load(5, rank=1)]]


async def test_an_unchanged_load_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers, "LOAD_INTERVAL", 0)
    recorder, tasks = Recorder(), TaskSet()
    loads = LoadPublisher(recorder)
    tasks.spawn(loads.run(), name="loads")

    for blocks in (1, 1, 1, 2):
        loads.send(load(blocks))
        for _ in range(5):
            await asyncio.sleep(0)
    await recorder.until(2)
    await tasks.aclose()

    assert recorder.sent == [[load(1)], [load(2)]]


async def test_loads_are_refreshed_periodically(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishers, "LOAD_INTERVAL", 0.001)
    monkeypatch.setattr(publishers, "LOAD_REFRESH", 0.005)
    recorder, tasks = Recorder(), TaskSet()
    loads = LoadPublisher(recorder)
    tasks.spawn(loads.run(), name="loads")
    loads.send(load(3))
    loads.send(load(4, rank=1))

    await recorder.until(3)
    await tasks.aclose()

    assert recorder.sent[0] == recorder.sent[1] == recorder.sent[2] == [load(3), load(4, rank=1)]


class Silent:
    """Everything of an engine that matters here: the defaults."""

    kv_event_sources = LLMEngine.kv_event_sources
    load_sources = LLMEngine.load_sources


class Closed(EventPlane):
    """A plane that no test should use."""

    async def publisher(self, subject: str, lease: Any) -> Publisher:
        raise AssertionError(subject)

    def subscribe(self, subject: str, directory: Any) -> Any:
        raise AssertionError(subject)


async def test_an_engine_without_sources_has_no_publisher() -> None:
    before = asyncio.all_tasks()
    engine = EnginePublishers()

    await engine.start(cast(LLMEngine, Silent()), Closed(), cast(Any, None))

    assert asyncio.all_tasks() == before
    await engine.aclose()
    await engine.aclose()
