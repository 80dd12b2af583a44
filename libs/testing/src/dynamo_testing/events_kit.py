"""The kit for event planes: the promises of a transport about its events, as one check each.

The author's whole test file::

    from collections.abc import AsyncIterator

    import pytest
    from dynamo_core.contracts.config import PluginConfig
    from dynamo_telemetry.metrics import Metrics
    from dynamo_testing.events_kit import EventPlanes, EventsKit

    class TestMyEvents(EventsKit):
        @pytest.fixture
        async def events(self) -> AsyncIterator[EventPlanes]:
            sender, receiver = (MyTransport(PluginConfig(), Metrics()) for _ in range(2))
            directory = …  # any discovery
            await sender.start()
            await receiver.start()
            yield EventPlanes(sender.events(), receiver.events(), directory)
            await receiver.aclose()
            await sender.aclose()

With pytest-asyncio in strict mode, decorate the fixture with ``pytest_asyncio.fixture``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import ClassVar

from dynamo_testing.events.harness import PROBE, EventPlanes, Listener, Market, Sender, Subject
from dynamo_testing.optional_packages import pytest

__all__ = ["EventPlanes", "EventsKit"]


@pytest.mark.asyncio
class EventsKit:
    """All checks of an event plane. Subclass it as ``Test…`` and write the fixture `events`."""

    #: Seconds that anything may take before a check fails.
    WAIT: ClassVar[float] = 5.0
    #: Events sent at one go that are more than the plane keeps for a subscriber.
    OVERFLOW: ClassVar[int] = 100_000
    #: Whether publishers put a record under their lease, by which subscribers find them.
    PEER_TO_PEER: ClassVar[bool] = False
    #: The size in bytes of a payload that is too large to be sent; None where there is none.
    EVENT_LIMIT: ClassVar[int | None] = None
    #: Whether `break_connection` can be called.
    CAN_BREAK_CONNECTION: ClassVar[bool] = False

    @pytest.fixture
    def events(self) -> EventPlanes:
        """Return the planes under test, started; the fixture closes them. Every author writes this one."""
        raise NotImplementedError("write a fixture `events` that yields EventPlanes(sender, receiver, directory)")

    async def break_connection(self, events: EventPlanes) -> None:
        """Break every connection between the two planes; they may connect again at once."""
        raise NotImplementedError

    @asynccontextmanager
    async def market(self, events: EventPlanes) -> AsyncIterator[Market]:
        """Yield what the checks work with."""
        market = Market(events, self.WAIT)
        try:
            yield market
        finally:
            async with asyncio.timeout(self.WAIT):
                await market.aclose()

    async def test_events_arrive_in_the_order_they_were_sent(self, events: EventPlanes) -> None:
        async with self.market(events) as market:
            sender, listener = await market.sender(), market.listener()
            await market.settle([sender], [listener])

            payloads = [str(number).encode() for number in range(300)]
            for start in range(0, 300, 20):
                sender.send(*payloads[start : start + 20])
                await asyncio.sleep(0)
            await listener.has(sender.source, payloads[-1])

            assert listener.payloads(sender.source) == payloads

    async def test_the_numbers_of_a_source_count_up_by_one(self, events: EventPlanes) -> None:
        async with self.market(events) as market:
            sender, listener = await market.sender(), market.listener()
            await market.settle([sender], [listener])

            sender.send(*(str(number).encode() for number in range(50)))
            await listener.has(sender.source, b"49")

            assert _gaps(listener, sender.source) == []

    async def test_numbers_count_per_subject_even_if_one_lease_publishes_on_two(self, events: EventPlanes) -> None:
        async with self.market(events) as market:
            loads = await market.sender("loads")
            blocks = await market.sender("blocks", lease=loads.lease)
            listener, other = market.listener("loads"), market.listener("blocks")
            await market.settle([loads], [listener])
            await market.settle([blocks], [other])

            for number in range(20):
                loads.send(str(number).encode())
                blocks.send(b"x")
            await listener.has(loads.source, b"19")

            assert _gaps(listener, loads.source) == []

    async def test_the_id_of_the_lease_is_the_source(self, events: EventPlanes) -> None:
        async with self.market(events) as market:
            first, second, listener = await market.sender(), await market.sender(), market.listener()
            await market.settle([first, second], [listener])

            assert {source for source, _, _ in listener.log} == {first.lease.id, second.lease.id}

    async def test_every_subscriber_gets_the_events_of_every_publisher(self, events: EventPlanes) -> None:
        async with self.market(events) as market:
            senders = [await market.sender() for _ in range(3)]
            listeners = [market.listener() for _ in range(3)]
            await market.settle(senders, listeners)

            for number in range(40):
                for sender in senders:
                    sender.send(str(number).encode())
            for listener in listeners:
                for sender in senders:
                    await listener.has(sender.source, b"39")

            expected = [str(number).encode() for number in range(40)]
            for listener in listeners:
                assert [listener.payloads(sender.source) for sender in senders] == [expected] * 3

    async def test_a_subscriber_receives_from_later_publishers(self, events: EventPlanes) -> None:
        async with self.market(events) as market:
            listener = market.listener()
            early = await market.sender()
            await market.settle([early], [listener])

            late = await market.sender()
            await market.settle([late], [listener])
            late.send(b"here")

            await listener.has(late.source, b"here")

    async def test_a_late_subscriber_gets_only_what_is_sent_later(self, events: EventPlanes) -> None:
        async with self.market(events) as market:
            sender, early = await market.sender(), market.listener()
            await market.settle([sender], [early])
            sender.send(b"old-1", b"old-2")
            await early.has(sender.source, b"old-2")

            late = market.listener()
            await market.settle([sender], [late])
            sender.send(b"new")
            await late.has(sender.source, b"new")

            assert late.payloads(sender.source) == [b"new"]

    async def test_a_subscriber_gets_nothing_of_other_subjects(self, events: EventPlanes) -> None:
        async with self.market(events) as market:
            here, there = await market.sender("loads"), await market.sender("loads-other")
            listener, other = market.listener("loads"), market.listener("loads-other")
            await market.settle([here], [listener])
            await market.settle([there], [other])

            there.send(b"not for you")
            await other.has(there.source, b"not for you")
            here.send(b"for you")
            await listener.has(here.source, b"for you")

            assert listener.of(there.source) == []

    @pytest.mark.parametrize("subject", ["a.b", "*", ">", "größe und mehr", "a/b", "", "x" * 100])
    async def test_any_text_is_a_subject_of_its_own(self, events: EventPlanes, subject: str) -> None:
        async with self.market(events) as market:
            right = await market.sender(Subject(subject))
            wrong = await market.sender("loads", lease=right.lease)
            listener = market.listener(Subject(subject))
            await market.settle([right], [listener])

            wrong.send(b"wrong")
            right.send(b"end")
            await listener.has(right.source, b"end")

            assert listener.payloads(right.source) == [b"end"]

    @pytest.mark.parametrize("payload", [b"", bytes(range(256)), b"\x00" * 65536], ids=["empty", "all bytes", "64 KiB"])
    async def test_a_payload_arrives_as_it_was_sent(self, events: EventPlanes, payload: bytes) -> None:
        async with self.market(events) as market:
            sender, listener = await market.sender(), market.listener()
            await market.settle([sender], [listener])

            sender.send(payload)

            await listener.has(sender.source, payload)

    async def test_sending_without_subscribers_is_no_loss(self, events: EventPlanes) -> None:
        async with self.market(events) as market:
            sender = await market.sender()

            assert sender.send(b"1", b"2") == [True, True]

    async def test_events_over_the_backlog_are_dropped_and_reported_to_the_sender(self, events: EventPlanes) -> None:
        async with self.market(events) as market:
            sender, listener = await market.sender(), market.listener()
            await market.settle([sender], [listener])

            taken = self._flood(sender)

            assert not all(taken), f"{len(taken)} events were taken at one go: nothing bounds them"

    async def test_dropped_events_show_as_a_gap_in_the_numbers(self, events: EventPlanes) -> None:
        async with self.market(events) as market:
            sender, listener = await market.sender(), market.listener()
            await market.settle([sender], [listener])

            flooded = len(self._flood(sender))
            # Once the subscriber has taken what was kept, events get through again.
            last = await self._until_heard(market, sender, listener, flooded)

            heard = [(number, int(payload)) for number, payload in listener.of(sender.source) if payload != PROBE]
            assert len(heard) < last + 1, "nothing was lost"
            wrong = [
                (earlier, later) for earlier, later in pairwise(heard) if later[0] - earlier[0] != later[1] - earlier[1]
            ]
            assert wrong == [], "the numbers hide that events are missing"

    async def test_an_event_that_is_too_large_is_dropped_and_shows_as_a_gap(self, events: EventPlanes) -> None:
        if self.EVENT_LIMIT is None:
            pytest.skip("EVENT_LIMIT is None: no event is too large")
        async with self.market(events) as market:
            sender, listener = await market.sender(), market.listener()
            await market.settle([sender], [listener])

            taken = sender.send(b"before", bytes(self.EVENT_LIMIT), b"after")
            await listener.has(sender.source, b"after")

            assert taken == [True, False, True]
            numbers = {payload: number for number, payload in listener.of(sender.source)}
            assert numbers[b"after"] == numbers[b"before"] + 2

    async def test_a_subscription_survives_a_broken_connection_and_shows_the_gap(self, events: EventPlanes) -> None:
        if not self.CAN_BREAK_CONNECTION:
            pytest.skip("CAN_BREAK_CONNECTION is False")
        async with self.market(events) as market:
            sender, listener = await market.sender(), market.listener()
            await market.settle([sender], [listener])
            before = listener.of(sender.source)[-1][0]

            await self.break_connection(events)
            await self._until_heard(market, sender, listener, 0)

            numbers = [number for number, payload in listener.of(sender.source) if payload != PROBE]
            assert before < numbers[0]
            assert numbers == sorted(set(numbers))

    async def test_events_sent_before_the_sender_closes_still_arrive(self, events: EventPlanes) -> None:
        if events.close_sender is None:
            pytest.skip("EventPlanes.close_sender is None")
        async with self.market(events) as market:
            sender, listener = await market.sender(), market.listener()
            await market.settle([sender], [listener])

            payloads = [str(number).encode() for number in range(100)]
            sender.send(*payloads)
            await events.close_sender()
            await listener.has(sender.source, payloads[-1])

            assert listener.payloads(sender.source) == payloads

    async def test_closing_the_receiver_ends_its_subscriptions(self, events: EventPlanes) -> None:
        if events.close_receiver is None:
            pytest.skip("EventPlanes.close_receiver is None")
        async with self.market(events) as market:
            sender, listener = await market.sender(), market.listener()
            await market.settle([sender], [listener])

            await events.close_receiver()

            await listener.ends()

    async def test_a_closed_publisher_sends_no_more(self, events: EventPlanes) -> None:
        async with self.market(events) as market:
            closed, open_, listener = await market.sender(), await market.sender(), market.listener()
            await market.settle([closed, open_], [listener])

            await closed.publisher.aclose()
            await closed.publisher.aclose()
            taken = closed.send(b"too late")
            open_.send(b"still here")
            await listener.has(open_.source, b"still here")

            assert taken == [False]
            assert listener.payloads(closed.source) == []

    async def test_a_publisher_that_closes_leaves_the_subscription_to_the_others(self, events: EventPlanes) -> None:
        async with self.market(events) as market:
            first, second, listener = await market.sender(), await market.sender(), market.listener()
            await market.settle([first, second], [listener])

            await first.publisher.aclose()
            await first.lease.aclose()
            third = await market.sender()
            await market.settle([third], [listener])
            second.send(b"still here")

            await listener.has(second.source, b"still here")

    async def test_a_subscriber_that_leaves_does_not_disturb_the_others(self, events: EventPlanes) -> None:
        async with self.market(events) as market:
            sender, stays, leaves = await market.sender(), market.listener(), market.listener()
            await market.settle([sender], [stays, leaves])

            await leaves.close()
            sender.send(b"more")
            await stays.has(sender.source, b"more")

            assert leaves.payloads(sender.source) == []
            assert _gaps(stays, sender.source) == []

    async def test_the_record_of_a_publisher_lives_as_long_as_it(self, events: EventPlanes) -> None:
        await self._record_ends_with(events, lambda sender: sender.publisher.aclose())

    async def test_a_publisher_does_not_outlive_its_lease(self, events: EventPlanes) -> None:
        await self._record_ends_with(events, lambda sender: sender.lease.aclose())

    async def _record_ends_with(self, events: EventPlanes, close: Callable[[Sender], Awaitable[None]]) -> None:
        if not self.PEER_TO_PEER:
            pytest.skip("PEER_TO_PEER is False")
        async with self.market(events) as market:
            sender = await market.sender()
            there = await market.sources()

            await close(sender)

            assert there == {sender.source}
            assert await market.sources() == set()

    def _flood(self, sender: Sender) -> list[bool]:
        """Send numbered events in one turn of the loop, until some have been dropped."""
        taken: list[bool] = []
        while len(taken) < self.OVERFLOW and taken[-10:] != [False] * 10:
            taken += sender.send(str(len(taken)).encode())
        return taken

    async def _until_heard(self, market: Market, sender: Sender, listener: Listener, start: int) -> int:
        """Send further numbered events until one of them is heard; its number."""
        last = start
        try:
            async with asyncio.timeout(market.wait):
                while not any(
                    payload != PROBE and int(payload) >= start for payload in listener.payloads(sender.source)
                ):
                    sender.send(str(last).encode())
                    last += 1
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"after dropping, nothing was heard within {market.wait} s") from None
        return last - 1


def _gaps(listener: Listener, source: int) -> list[tuple[int, int]]:
    numbers = [number for number, _ in listener.of(source)]
    return [(earlier, later) for earlier, later in pairwise(numbers) if later != earlier + 1]
