"""What an engine tells of its cache and load reaches the event plane, whole and in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
from dynamo_core import (
    KV_EVENTS,
    ActiveLoad,
    KvCleared,
    KvEvent,
    KvEventSource,
    KvRemoved,
    KvStored,
    PluginConfig,
    PreprocessedRequest,
    RouterEvent,
    RoutingHints,
    StopConditions,
    TaskSet,
    WorkerConfig,
)
from dynamo_core.kv import block_hashes, sequence_hashes
from dynamo_core.protocol.events import KV_METRICS
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.engine import MockerEngine
from dynamo_runtime.worker import publishers


class SmallMocker(MockerEngine):
    """Six blocks of four tokens on each of two ranks, and no delays."""

    def __init__(self, config: PluginConfig, worker: WorkerConfig) -> None:
        settings = MockerConfig(block_size=4, num_gpu_blocks=6, data_parallel_size=2, speedup_ratio=0)
        super().__init__(settings, worker)


class Subscription:
    """Everything that was told on a subject since it began."""

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(list[kind]).decode
        self._changed = asyncio.Event()
        self.numbers: list[tuple[int, int]] = []
        self.messages: list[list[Any]] = []

    @property
    def items(self) -> list[Any]:
        return [item for message in self.messages for item in message]

    async def follow(self, stream: AsyncGenerator[tuple[int, int, bytes], None]) -> None:
        async with aclosing(stream):
            async for source, number, payload in stream:
                self.numbers.append((source, number))
                self.messages.append(self._decode(payload))
                self._changed.set()

    async def until(self, condition: Callable[[list[Any]], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition(self.items):
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def subscribed(house: Any, subject: str, kind: Any) -> AsyncIterator[Subscription]:
    tasks = TaskSet()
    subscription = Subscription(kind)
    tasks.spawn(subscription.follow(house.transport.events().subscribe(subject, house.discovery)), name="follow")
    # A subscription begins with its first wait.
    await asyncio.sleep(0)
    try:
        yield subscription
    finally:
        await tasks.aclose()


async def ask(house: Any, prompt: list[int], tokens_of: Any) -> None:
    request = PreprocessedRequest(model="m", token_ids=prompt, stop_conditions=StopConditions(max_tokens=2))
    request.routing = RoutingHints(dp_rank=0)
    await tokens_of(await house.ask(request))


async def test_a_subscriber_gets_all_kv_events_with_the_workers_id(house: Any, tokens_of: Any) -> None:
    async with subscribed(house, KV_EVENTS, RouterEvent) as told:
        worker = await house.run(SmallMocker)
        assert worker.instance is not None
        prompts = [[number] * 13 for number in range(4)]
        for prompt in prompts:
            await ask(house, prompt, tokens_of)
        await worker.stop(grace=False)
        await told.until(lambda items: sum(isinstance(item.event.data, KvCleared) for item in items) == 2)

    source = worker.instance.instance_id
    assert told.numbers == [(source, number) for number in range(len(told.numbers))]
    assert {item.worker_id for item in told.items} == {source}
    events = [item.event for item in told.items if item.event.dp_rank == 0]
    assert [event.event_id for event in events] == [*range(len(events))]
    stored = [event.data for event in events if isinstance(event.data, KvStored)]
    assert [[block.block_hash for block in data.blocks] for data in stored] == [
        sequence_hashes(block_hashes(prompt, 4)) for prompt in prompts
    ]
    assert [[block.tokens_hash for block in data.blocks] for data in stored] == [
        block_hashes(prompt, 4) for prompt in prompts
    ]
    # Three full blocks of each prompt were left behind, where six have place beside those in use.
    removed = [one for event in events if isinstance(event.data, KvRemoved) for one in event.data.block_hashes]
    assert removed[:3] == list(reversed(sequence_hashes(block_hashes(prompts[0], 4))))


class StuckMocker(MockerEngine):
    """Admits requests and never finishes a step."""

    def __init__(self, config: PluginConfig, worker: WorkerConfig) -> None:
        super().__init__(MockerConfig(block_size=4, data_parallel_size=2, fixed_itl_ms=3_600_000), worker)


async def test_a_subscriber_sees_the_load_rise_and_return_to_zero(house: Any) -> None:
    async with subscribed(house, KV_METRICS, ActiveLoad) as told:
        worker = await house.run(StuckMocker)
        assert worker.instance is not None
        source = worker.instance.instance_id
        # What the engine does not tell is on its card.
        total = MockerConfig().num_gpu_blocks
        nothing = [ActiveLoad(source, rank, 0, 0, 0, total) for rank in (0, 1)]
        await told.until(lambda items: items == nothing)

        stream = await house.generate([1] * 13)
        await told.until(lambda items: items[-1] == ActiveLoad(source, 0, 4, 13, 4, total))
        await stream.aclose()
        await told.until(lambda items: items[-1] == nothing[0])

    assert told.numbers == [(source, number) for number in range(len(told.numbers))]


class Teller(SmallMocker):
    """Lets the test tell what it likes."""

    tell: Callable[[KvEvent], None]

    async def kv_event_sources(self) -> list[KvEventSource]:
        return [KvEventSource(0, self._listen)]

    def _listen(self, tell: Callable[[KvEvent], None]) -> None:
        type(self).tell = staticmethod(tell)


async def test_events_of_one_turn_travel_together_in_messages_of_bounded_size(house: Any) -> None:
    async with subscribed(house, KV_EVENTS, RouterEvent) as told:
        await house.run(Teller)

        for number in range(publishers.MAX_BATCH + 3):
            Teller.tell(KvEvent(number, KvRemoved([number])))
        await told.until(lambda items: len(items) == publishers.MAX_BATCH + 3)
        Teller.tell(KvEvent(0, KvCleared()))
        Teller.tell(KvEvent(1, KvCleared()))
        await told.until(lambda items: len(items) == publishers.MAX_BATCH + 5)

    assert [len(message) for message in told.messages] == [publishers.MAX_BATCH, 3, 2]
    assert [item.event.event_id for item in told.items[:-2]] == [*range(publishers.MAX_BATCH + 3)]


async def test_the_last_events_are_sent_before_the_publisher_closes(house: Any) -> None:
    async with subscribed(house, KV_EVENTS, RouterEvent) as told:
        worker = await house.run(Teller)
        Teller.tell(KvEvent(0, KvRemoved([1])))

        await worker.stop(grace=False)
        Teller.tell(KvEvent(1, KvRemoved([2])))
        await told.until(lambda items: len(items) == 1)
        await asyncio.sleep(0)

    assert [item.event for item in told.items] == [KvEvent(0, KvRemoved([1]))]
