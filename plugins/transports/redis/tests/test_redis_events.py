"""Events over a real server: what the kit cannot know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_testing.events.harness import heard

Events = AsyncGenerator[tuple[int, int, bytes], None]

WAIT = 10.0


async def test_a_subject_stays_subscribed_while_the_process_has_a_subscriber(
    bench: Any, directory: MemoryDiscovery
) -> None:
    broker = bench.server()
    sender, receiver = await bench.pair(broker)
    publisher = await sender.events().publisher("loads", await directory.lease())

    def listened_to() -> bool:
        return any(channel.endswith(b":ev:loads") for channel in broker.channels())

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
