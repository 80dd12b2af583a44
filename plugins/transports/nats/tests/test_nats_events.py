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
from dynamo_plugin_transport_nats.transport import NatsTransport

Make = Callable[..., Coroutine[Any, Any, NatsTransport]]
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
    nats = make_server()
    sender, receiver = await make_transport(servers=[nats.url]), await make_transport(servers=[nats.url])
    publisher = await sender.events().publisher("loads", await directory.lease())
    async with aclosing(receiver.events().subscribe("loads", directory)) as events:
        _, before, _ = await heard(events, publisher, b"before")

        nats.kill()
        nats.start()
        number, payload = before, b"before"
        while payload == b"before":
            _, number, payload = await heard(events, publisher, b"after")

    assert number > before


async def test_events_that_cannot_be_sent_are_told_counted_and_seen_as_a_gap(
    make_server: Any, make_transport: Make, directory: MemoryDiscovery
) -> None:
    nats, metrics = make_server(), Metrics()
    sender = await make_transport(metrics, servers=[nats.url])
    publisher = await sender.events().publisher("loads", await directory.lease())
    nats.kill()

    async with asyncio.timeout(WAIT):
        while publisher.send(b"x"):  # noqa: ASYNC110 - nothing else tells that the server is gone
            await asyncio.sleep(0.01)

    assert b'dynamo_event_plane_dropped_total{subject="loads"} 1' in await metrics.render()


async def test_an_event_larger_than_the_server_takes_is_dropped_and_the_next_one_arrives(
    make_server: Any, make_transport: Make, directory: MemoryDiscovery
) -> None:
    nats = make_server("max_payload: 4096")
    sender, receiver = await make_transport(servers=[nats.url]), await make_transport(servers=[nats.url])
    publisher = await sender.events().publisher("loads", await directory.lease())
    async with aclosing(receiver.events().subscribe("loads", directory)) as events:
        _, before, _ = await heard(events, publisher, b"before")

        taken = publisher.send(bytes(5000))
        number, payload = before, b"before"
        while payload == b"before":
            _, number, payload = await heard(events, publisher, b"after")

    assert taken is False
    assert number > before + 1


async def test_the_events_of_one_turn_leave_in_few_messages(
    make_server: Any, make_transport: Make, directory: MemoryDiscovery
) -> None:
    nats = make_server()
    sender, receiver = await make_transport(servers=[nats.url]), await make_transport(servers=[nats.url])
    publisher = await sender.events().publisher("loads", await directory.lease())
    async with aclosing(receiver.events().subscribe("loads", directory)) as events:
        await heard(events, publisher, b"begin")
        before = nats.seen()["in_msgs"]

        for _ in range(1000):
            publisher.send(b"x")
        publisher.send(b"end")
        async for _, _, payload in events:
            if payload == b"end":
                break

    assert nats.seen()["in_msgs"] - before < 10


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
