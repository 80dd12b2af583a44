"""Checks of events over a broker: the number of messages, and events without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from dynamo_core.contracts.discovery import Discovery
from dynamo_telemetry.metrics import Metrics

from dynamo_testing.brokered.bench import WAIT, BrokerBench
from dynamo_testing.optional_packages import pytest


@pytest.mark.asyncio
class EventChecks:
    """Checks of events that the kit for event planes cannot make."""

    async def test_events_that_cannot_be_sent_are_refused_and_counted(
        self, bench: BrokerBench, directory: Discovery
    ) -> None:
        broker, metrics = bench.server(), Metrics()
        sender = await bench.transport(broker, metrics)
        publisher = await sender.events().publisher("loads", await directory.lease())
        broker.kill()

        async with asyncio.timeout(WAIT):
            while publisher.send(b"x"):  # noqa: ASYNC110 - nothing else tells that the server is gone
                await asyncio.sleep(0.01)

        assert b'dynamo_event_plane_dropped_total{subject="loads"} 1' in await metrics.render()

    async def test_the_events_of_one_turn_leave_in_few_messages(self, bench: BrokerBench, directory: Discovery) -> None:
        broker = bench.server()
        sender, receiver = await bench.pair(broker)
        publisher = await sender.events().publisher("loads", await directory.lease())
        async with aclosing(receiver.events().subscribe("loads", directory)) as events:
            async with asyncio.timeout(WAIT), asyncio.TaskGroup() as group:
                first = group.create_task(_next(events))
                while not first.done():
                    publisher.send(b"begin")
                    await asyncio.sleep(0.005)
            before = broker.published()

            for _ in range(1000):
                publisher.send(b"x")
            publisher.send(b"end")
            async with asyncio.timeout(WAIT):
                async for _, _, payload in events:
                    if payload == b"end":
                        break

        assert broker.published() - before < 10

    async def test_a_lease_publishes_on_a_subject_once(self, bench: BrokerBench, directory: Discovery) -> None:
        sender, lease = await bench.transport(), await directory.lease()
        first = await sender.events().publisher("loads", lease)

        with pytest.raises(ValueError, match="already"):
            await sender.events().publisher("loads", lease)
        await first.aclose()
        again = await sender.events().publisher("loads", lease)

        assert again.send(b"x")


async def _next(events: AsyncIterator[tuple[int, int, bytes]]) -> None:
    await anext(events)
