"""Events over TCP: what the kit cannot know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from dynamo_core import PluginConfig, WatchEvent, WatchKind
from dynamo_core.protocol import EventSource
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_plugin_transport_tcp import events as plane
from dynamo_plugin_transport_tcp.address import Address, split_host_port
from dynamo_plugin_transport_tcp.transport import TcpTransport
from dynamo_telemetry import Metrics
from dynamo_testing.events.harness import heard
from dynamo_testing.servers.ports import free_port

Make = Callable[..., TcpTransport]
Events = AsyncGenerator[tuple[int, int, bytes], None]

WAIT = 10.0
#: The tag of the message.
UNSUBSCRIBE = 31

DROPPED = "dynamo_event_plane_dropped_total"


async def through(wire: Any, make: Make, **options: Any) -> TcpTransport:
    """Return a transport whose listener is reached through the wire."""
    bind = f"127.0.0.1:{free_port()}"
    transport = make(bind=bind, advertise=f"127.0.0.1:{wire.port}", **options)
    await transport.events().publisher("unused", await MemoryDiscovery(PluginConfig(), Metrics()).lease())
    host, port = split_host_port(bind)
    wire.target = Address(host, port or 0, b"")
    return transport


async def test_a_subscription_survives_a_broken_connection_and_shows_the_gap(
    make_transport: Make, make_wire: Any, directory: MemoryDiscovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane, "RETRY_FIRST", 0.01)
    wire = await make_wire()
    sender, receiver = await through(wire, make_transport), make_transport()
    publisher = await sender.events().publisher("loads", await directory.lease())
    async with aclosing(receiver.events().subscribe("loads", directory)) as events:
        _, before, _ = await heard(events, publisher, b"before")

        wire.cut()
        # What was on its way before the cut may still be waiting.
        number, payload = before, b"before"
        while payload == b"before":
            _, number, payload = await heard(events, publisher, b"after")

    assert number > before


async def test_a_subscriber_that_does_not_read_loses_events_and_they_are_counted(
    make_transport: Make, directory: MemoryDiscovery
) -> None:
    metrics = Metrics()
    sender, receiver = make_transport(), make_transport(metrics, event_backlog=10)
    publisher = await sender.events().publisher("loads", await directory.lease())
    dropped = metrics.counter(DROPPED, "", ("subject",)).labels("loads")
    async with aclosing(receiver.events().subscribe("loads", directory)) as events:
        await heard(events, publisher, b"first")

        async with asyncio.timeout(WAIT):
            while not dropped.value:
                publisher.send(b"more")
                await asyncio.sleep(0)
        numbers = [(await anext(events))[1] for _ in range(10)]
        later = (await heard(events, publisher, b"later"))[1]

    assert numbers == list(range(numbers[0], numbers[0] + 10))
    assert later > numbers[-1] + 1


async def test_an_event_larger_than_any_frame_is_dropped_and_counted(
    make_transport: Make, directory: MemoryDiscovery
) -> None:
    metrics = Metrics()
    sender, receiver = make_transport(metrics), make_transport(max_frame_mb=1)
    publisher = await sender.events().publisher("loads", await directory.lease())
    async with aclosing(receiver.events().subscribe("loads", directory)) as events:
        await heard(events, publisher, b"first")

        taken = publisher.send(bytes(1 << 20))
        _, _, payload = await heard(events, publisher, b"next")

    assert taken is False
    assert metrics.counter(DROPPED, "", ("subject",)).labels("loads").value == 1
    assert payload in (b"first", b"next")


async def test_a_lease_publishes_once_per_subject(make_transport: Make, directory: MemoryDiscovery) -> None:
    transport, lease = make_transport(), await directory.lease()
    first = await transport.events().publisher("loads", lease)

    with pytest.raises(ValueError, match="loads"):
        await transport.events().publisher("loads", lease)
    await first.aclose()
    again = await transport.events().publisher("loads", lease)

    assert again.send(b"x")


async def test_records_that_are_no_use_are_passed_over(make_transport: Make, directory: MemoryDiscovery) -> None:
    lease = await directory.lease()
    await lease.put("v1/event_sources/loads/1", b"{")
    await lease.put("v1/event_sources/loads/2", msgspec.json.encode(EventSource(subject="loads", source=2)))
    other = EventSource(subject="other", source=3, address={"tcp": "127.0.0.1:1/" + "0" * 32})
    await lease.put("v1/event_sources/loads/3", msgspec.json.encode(other))
    sender, receiver = make_transport(), make_transport()
    publisher = await sender.events().publisher("loads", await directory.lease())

    async with aclosing(receiver.events().subscribe("loads", directory)) as events:
        _, _, payload = await heard(events, publisher, b"heard")

    assert payload == b"heard"


class Forgetful(MemoryDiscovery):
    """A directory whose first watch ends after the snapshot, when `end` is set."""

    def __init__(self) -> None:
        super().__init__(PluginConfig(), Metrics())
        self.end = asyncio.Event()
        self._watches = 0

    async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
        self._watches += 1
        first = self._watches == 1
        async with aclosing(super().watch(prefix)) as events:
            async for event in events:
                yield event
                if first and event.kind is WatchKind.SYNCED:
                    await self.end.wait()
                    return


async def test_a_source_whose_record_vanished_unwatched_is_dropped(
    make_transport: Make, make_wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane, "RETRY_FIRST", 0.01)
    directory, wire = Forgetful(), await make_wire()
    sender, receiver, lease = await through(wire, make_transport), make_transport(), await directory.lease()
    publisher = await sender.events().publisher("loads", lease)
    async with aclosing(receiver.events().subscribe("loads", directory)) as events:
        await heard(events, publisher, b"first")

        # The publisher does not notice that its record is gone.
        await lease.aclose()
        directory.end.set()
        await wire.until(lambda: UNSUBSCRIBE in wire.tags)
