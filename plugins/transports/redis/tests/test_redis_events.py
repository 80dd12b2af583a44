"""Events over a real server: what the kit cannot know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.events import Publisher
from dynamo_core.telemetry.metrics import Metrics
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_plugin_transport_redis.transport import RedisTransport

Make = Callable[..., Coroutine[Any, Any, RedisTransport]]
Events = AsyncGenerator[tuple[int, int, bytes], None]

WAIT = 10.0


@pytest.fixture
async def directory() -> AsyncIterator[MemoryDiscovery]:
    directory = MemoryDiscovery(PluginConfig(), Metrics())
    yield directory
    await directory.aclose()


async def heard(events: Events, publisher: Publisher, word: bytes) -> tuple[int, int, bytes]:
    """The first event that gets through; the same is sent until then."""
    waiting = asyncio.ensure_future(anext(events))
    async with asyncio.timeout(WAIT):
        while not waiting.done():
            publisher.send(word)
            await asyncio.sleep(0.005)
    return await waiting


async def test_a_subscription_survives_a_server_that_comes_back_empty_and_shows_the_gap(
    make_server: Any, make_transport: Make, directory: MemoryDiscovery
) -> None:
    broker = make_server()
    sender, receiver = await make_transport(url=broker.url), await make_transport(url=broker.url)
    publisher = await sender.events().publisher("loads", await directory.lease())
    async with aclosing(receiver.events().subscribe("loads", directory)) as events:
        _, before, _ = await heard(events, publisher, b"before")

        broker.kill()
        broker.start()
        number, payload = before, b"before"
        while payload == b"before":
            _, number, payload = await heard(events, publisher, b"after")

    assert number > before


async def test_events_that_cannot_be_sent_are_told_counted_and_seen_as_a_gap(
    make_server: Any, make_transport: Make, directory: MemoryDiscovery
) -> None:
    broker, metrics = make_server(), Metrics()
    sender = await make_transport(metrics, url=broker.url)
    publisher = await sender.events().publisher("loads", await directory.lease())
    broker.kill()

    async with asyncio.timeout(WAIT):
        while publisher.send(b"x"):  # noqa: ASYNC110 - nothing else tells that the server is gone
            await asyncio.sleep(0.01)

    assert b'dynamo_event_plane_dropped_total{subject="loads"} 1' in await metrics.render()


async def test_an_event_larger_than_a_message_may_be_is_dropped_and_the_next_one_arrives(
    make_server: Any, make_transport: Make, directory: MemoryDiscovery
) -> None:
    broker = make_server()
    sender, receiver = await make_transport(url=broker.url), await make_transport(url=broker.url)
    publisher = await sender.events().publisher("loads", await directory.lease())
    async with aclosing(receiver.events().subscribe("loads", directory)) as events:
        _, before, _ = await heard(events, publisher, b"before")

        taken = publisher.send(bytes(1024 * 1024))
        number, payload = before, b"before"
        while payload == b"before":
            _, number, payload = await heard(events, publisher, b"after")

    assert taken is False
    assert number > before + 1


async def test_the_events_of_one_turn_leave_in_few_messages(
    make_server: Any, make_transport: Make, directory: MemoryDiscovery
) -> None:
    broker = make_server()
    sender, receiver = await make_transport(url=broker.url), await make_transport(url=broker.url)
    publisher = await sender.events().publisher("loads", await directory.lease())
    async with aclosing(receiver.events().subscribe("loads", directory)) as events:
        await heard(events, publisher, b"begin")
        before = broker.published()

        for _ in range(1000):
            publisher.send(b"x")
        publisher.send(b"end")
        async for _, _, payload in events:
            if payload == b"end":
                break

    assert broker.published() - before < 10


async def test_a_subject_is_listened_to_as_long_as_somebody_in_the_process_wants_it(
    make_server: Any, make_transport: Make, directory: MemoryDiscovery
) -> None:
    broker = make_server()
    sender, receiver = await make_transport(url=broker.url), await make_transport(url=broker.url)
    publisher = await sender.events().publisher("loads", await directory.lease())

    def listened_to() -> bool:
        return any(channel.endswith(b":ev:loads") for channel in broker.listened_to())

    async with aclosing(receiver.events().subscribe("loads", directory)) as stays:
        await heard(stays, publisher, b"begin")
        async with aclosing(receiver.events().subscribe("loads", directory)) as leaves:
            await heard(leaves, publisher, b"both")
        publisher.send(b"one")
        async with asyncio.timeout(WAIT):
            async for _, _, payload in stays:
                if payload == b"one":
                    break
        there = listened_to()

    assert there
    async with asyncio.timeout(WAIT):
        while listened_to():  # noqa: ASYNC110 - nothing tells when it holds
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("subject", ["a.b", "*", ">", "größe und mehr", "a/b", "", "x" * 100])
async def test_any_text_is_a_subject_of_its_own(make_transport: Make, directory: MemoryDiscovery, subject: str) -> None:
    sender, receiver = await make_transport(), await make_transport()
    lease = await directory.lease()
    right = await sender.events().publisher(subject, lease)
    wrong = await sender.events().publisher("loads", lease)
    async with aclosing(receiver.events().subscribe(subject, directory)) as events:
        await heard(events, right, b"right")

        wrong.send(b"wrong")
        right.send(b"end")
        seen = set()
        async for source, _, payload in events:
            seen.add((source, payload))
            if payload == b"end":
                break

    assert seen <= {(lease.id, b"right"), (lease.id, b"end")}


async def test_a_lease_publishes_on_a_subject_once(make_transport: Make, directory: MemoryDiscovery) -> None:
    sender = await make_transport()
    lease = await directory.lease()
    first = await sender.events().publisher("loads", lease)

    with pytest.raises(ValueError, match="already"):
        await sender.events().publisher("loads", lease)

    await first.aclose()
    await sender.events().publisher("loads", lease)


async def test_what_was_sent_before_closing_still_arrives(make_transport: Make, directory: MemoryDiscovery) -> None:
    sender, receiver = await make_transport(), await make_transport()
    publisher = await sender.events().publisher("loads", await directory.lease())
    async with aclosing(receiver.events().subscribe("loads", directory)) as events:
        await heard(events, publisher, b"begin")

        for number in range(100):
            publisher.send(str(number).encode())
        await sender.aclose()
        async with asyncio.timeout(WAIT):
            async for _, _, payload in events:
                if payload == b"99":
                    break


async def test_closing_the_transport_ends_its_subscriptions(make_transport: Make, directory: MemoryDiscovery) -> None:
    sender, receiver = await make_transport(), await make_transport()
    publisher = await sender.events().publisher("loads", await directory.lease())
    events = receiver.events().subscribe("loads", directory)
    await heard(events, publisher, b"begin")

    await receiver.aclose()

    async with asyncio.timeout(WAIT):
        assert [payload async for _, _, payload in events if payload != b"begin"] == []
