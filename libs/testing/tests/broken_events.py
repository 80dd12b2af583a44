"""Event planes that break one promise each, and what of the kit must find it.

Not collected with the other tests: `test_the_kits_find_broken_parts` runs this file and compares.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from itertools import count
from typing import Any, ClassVar

import msgspec
import pytest
from dynamo_core import Discovery, Lease, PluginConfig, Publisher
from dynamo_core.protocol import EVENT_SOURCES, EventSource
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_plugin_transport_inproc.events import InprocEvents
from dynamo_telemetry import Metrics
from dynamo_testing.events_kit import EventPlanes, EventsKit

Event = tuple[int, int, bytes]


class Plane(InprocEvents):
    """An event plane without a fault."""

    backlog = 10_000

    def __init__(self, directory: Discovery) -> None:
        super().__init__(Metrics(), self.backlog)
        self.directory = directory


class Broken(EventsKit):
    """The kit over one event plane."""

    OVERFLOW = 20_000
    #: The plane under test.
    plane: ClassVar[type[Plane]] = Plane
    #: The checks that must fail, and no others may.
    FAILS: ClassVar[frozenset[str]] = frozenset()
    #: The seconds that a check waits which must fail, and any other.
    PATIENCE = (0.2, 10.0)

    @pytest.fixture
    async def events(self) -> AsyncIterator[EventPlanes]:
        directory = MemoryDiscovery(PluginConfig(), Metrics())
        plane = self.plane(directory)
        yield EventPlanes(plane, plane, directory, **self.closing(plane))
        plane.close()
        await directory.aclose()

    def closing(self, plane: Plane) -> dict[str, Any]:
        """What the test closes, and how."""
        return {}


class TestWithoutAFault(Broken):
    pass


class TestReorders(Broken):
    class plane(Plane):  # noqa: N801 - the part that is exchanged, as the attribute is named
        async def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
            held: bytes | None = None
            async with aclosing(super().subscribe(subject, directory)) as events:
                async for source, number, payload in events:
                    if payload == b"100":
                        held = payload
                    elif payload == b"101" and held is not None:
                        yield source, number - 1, payload
                        yield source, number, held
                    else:
                        yield source, number, payload

    FAILS = frozenset(
        {
            "test_events_arrive_in_the_order_they_were_sent",
            "test_what_was_dropped_shows_as_a_gap_in_the_numbers",
        }
    )


class TestNumbersAllSourcesTogether(Broken):
    class plane(Plane):  # noqa: N801
        def __init__(self, directory: Discovery) -> None:
            super().__init__(directory)
            self.numbers = count()

        async def publisher(self, subject: str, lease: Lease) -> Publisher:
            publisher: Any = await super().publisher(subject, lease)
            send = publisher.send

            class Numbered(Publisher):
                def send(_, payload: bytes) -> bool:  # noqa: N805
                    publisher._number = next(self.numbers)
                    return bool(send(payload))

                async def aclose(_) -> None:  # noqa: N805
                    await publisher.aclose()

            return Numbered()

    FAILS = frozenset({"test_numbers_count_per_subject_even_if_one_lease_publishes_on_two"})


class TestNumbersFromZeroForEverybody(Broken):
    """A subscriber cannot know what it missed: each event has the number of events it has received."""

    class plane(Plane):  # noqa: N801
        async def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
            counts: dict[int, int] = {}
            async with aclosing(super().subscribe(subject, directory)) as events:
                async for source, _, payload in events:
                    number = counts[source] = counts.get(source, -1) + 1
                    yield source, number, payload

    FAILS = frozenset({"test_what_was_dropped_shows_as_a_gap_in_the_numbers"})


class TestRepeatsNumbers(Broken):
    class plane(Plane):  # noqa: N801
        async def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
            async with aclosing(super().subscribe(subject, directory)) as events:
                async for source, number, payload in events:
                    yield source, number - (payload == b"30"), payload

    FAILS = frozenset(
        {
            "test_the_numbers_of_a_source_count_up_by_one",
            "test_what_was_dropped_shows_as_a_gap_in_the_numbers",
        }
    )


class TestTellsAnotherSource(Broken):
    class plane(Plane):  # noqa: N801
        async def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
            async with aclosing(super().subscribe(subject, directory)) as events:
                async for source, number, payload in events:
                    yield source, number, payload
                    if payload == b"probe":
                        yield source ^ 1, number, payload

    FAILS = frozenset({"test_the_id_of_the_lease_is_the_source"})


class TestReplaysWhatIsOld(Broken):
    class plane(Plane):  # noqa: N801
        def __init__(self, directory: Discovery) -> None:
            super().__init__(directory)
            self.old: dict[str, list[Event]] = {}

        async def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
            for event in list(self.old.get(subject, ())):
                yield event
            async with aclosing(super().subscribe(subject, directory)) as events:
                async for event in events:
                    self.old.setdefault(subject, []).append(event)
                    yield event

    FAILS = frozenset({"test_a_late_subscriber_gets_only_what_is_sent_later"})


class TestTakesAPrefixForTheSubject(Broken):
    class plane(Plane):  # noqa: N801
        async def publisher(self, subject: str, lease: Lease) -> Publisher:
            return await super().publisher(subject.removesuffix("-other"), lease)

        def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
            return super().subscribe(subject.removesuffix("-other"), directory)

    FAILS = frozenset({"test_a_subscriber_gets_nothing_of_other_subjects"})


class TestKnowsOnlyTheFirstSubscriber(Broken):
    class plane(Plane):  # noqa: N801
        async def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
            alone = not self._subjects.get(subject)
            async with aclosing(super().subscribe(subject, directory)) as events:
                async for event in events:
                    if alone or event[2] == b"probe":
                        yield event

    FAILS = frozenset(
        {
            "test_every_subscriber_gets_the_events_of_every_publisher",
            "test_a_late_subscriber_gets_only_what_is_sent_later",
        }
    )


class TestKnowsOnlyPublishersThatWereThereBefore(Broken):
    class plane(Plane):  # noqa: N801
        def __init__(self, directory: Discovery) -> None:
            super().__init__(directory)
            self.known: set[int] = set()

        async def publisher(self, subject: str, lease: Lease) -> Publisher:
            self.known.add(lease.id)
            return await super().publisher(subject, lease)

        async def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
            known = set(self.known)
            async with aclosing(super().subscribe(subject, directory)) as events:
                async for event in events:
                    if event[0] in known:
                        yield event

    FAILS = frozenset(
        {
            "test_a_subscriber_hears_publishers_that_come_later",
            "test_a_publisher_that_closes_leaves_the_subscription_to_the_others",
        }
    )


class TestHasNoBound(Broken):
    class plane(Plane):  # noqa: N801
        backlog = 1_000_000

    FAILS = frozenset(
        {
            "test_more_than_is_kept_is_dropped_and_told_to_the_sender",
            "test_what_was_dropped_shows_as_a_gap_in_the_numbers",
        }
    )


class TestCutsPayloads(Broken):
    class plane(Plane):  # noqa: N801
        async def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
            async with aclosing(super().subscribe(subject, directory)) as events:
                async for source, number, payload in events:
                    yield source, number, payload[:32768]

    FAILS = frozenset({"test_a_payload_arrives_as_it_was_sent"})


class TestDropsWithoutSubscribers(Broken):
    class plane(Plane):  # noqa: N801
        async def publisher(self, subject: str, lease: Lease) -> Publisher:
            publisher = await super().publisher(subject, lease)
            mailboxes = self._subjects[subject]
            return Picky(publisher, lambda: bool(mailboxes))

    FAILS = frozenset({"test_sending_without_subscribers_is_no_loss"})


class Picky(Publisher):
    """A publisher before a publisher, which sends only if asked to."""

    def __init__(self, publisher: Publisher, wanted: Any) -> None:
        self.publisher = publisher
        self.wanted = wanted

    def send(self, payload: bytes) -> bool:
        return self.wanted() and self.publisher.send(payload)

    async def aclose(self) -> None:
        await self.publisher.aclose()


class TestSendsAfterClosing(Broken):
    class plane(Plane):  # noqa: N801
        async def publisher(self, subject: str, lease: Lease) -> Publisher:
            class Open(Picky):
                async def aclose(self) -> None:
                    pass

            return Open(await super().publisher(subject, lease), lambda: True)

    FAILS = frozenset({"test_a_closed_publisher_sends_no_more"})


class TestEndsSubscriptionsWithAPublisher(Broken):
    class plane(Plane):  # noqa: N801
        async def publisher(self, subject: str, lease: Lease) -> Publisher:
            mailboxes = self._subjects.setdefault(subject, set())

            class Last(Picky):
                async def aclose(self) -> None:
                    await super().aclose()
                    mailboxes.clear()

            return Last(await super().publisher(subject, lease), lambda: True)

    FAILS = frozenset(
        {
            "test_a_publisher_that_closes_leaves_the_subscription_to_the_others",
            "test_a_closed_publisher_sends_no_more",
        }
    )


class TestForgetsAllSubscribersWithOne(Broken):
    class plane(Plane):  # noqa: N801
        async def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
            try:
                async with aclosing(super().subscribe(subject, directory)) as events:
                    async for event in events:
                        yield event
            finally:
                self._subjects[subject].clear()

    FAILS = frozenset({"test_a_subscriber_that_leaves_does_not_disturb_the_others"})


class PeerPlane(Plane):
    """Publishes a record for every publisher."""

    async def publisher(self, subject: str, lease: Lease) -> Publisher:
        key = f"{EVENT_SOURCES}{subject}/{lease.id:x}"
        await self.tell(lease, key, msgspec.json.encode(EventSource(subject=subject, source=lease.id)))
        plane = self

        class Listed(Picky):
            async def aclose(self) -> None:
                await super().aclose()
                await plane.withdraw(lease, key)

        return Listed(await super().publisher(subject, lease), lambda: True)

    async def tell(self, lease: Lease, key: str, value: bytes) -> None:
        await lease.put(key, value)

    async def withdraw(self, lease: Lease, key: str) -> None:
        await lease.remove(key)


class TestPublishesRecords(Broken):
    PEER_TO_PEER = True
    plane = PeerPlane


class TestLeavesItsRecord(Broken):
    PEER_TO_PEER = True

    class plane(PeerPlane):  # noqa: N801
        async def withdraw(self, lease: Lease, key: str) -> None:
            pass

    FAILS = frozenset({"test_the_record_of_a_publisher_lives_as_long_as_it"})


class TestPutsItsRecordUnderNoLease(Broken):
    PEER_TO_PEER = True

    class plane(PeerPlane):  # noqa: N801
        async def tell(self, lease: Lease, key: str, value: bytes) -> None:
            await self.directory.put_value(key, value)

        async def withdraw(self, lease: Lease, key: str) -> None:
            await self.directory.put_value(key, None)

    FAILS = frozenset({"test_a_publisher_does_not_outlive_its_lease"})


class TestConfusesOddSubjects(Broken):
    class plane(Plane):  # noqa: N801
        async def publisher(self, subject: str, lease: Lease) -> Publisher:
            return await super().publisher(subject if "-" in subject else "odd", lease)

    FAILS = frozenset({"test_any_text_is_a_subject_of_its_own"})


class TestTakesWhatIsTooLarge(Broken):
    EVENT_LIMIT = 1024

    FAILS = frozenset({"test_an_event_that_is_too_large_is_dropped_and_shows_as_a_gap"})


class TestDoesNotSurviveABrokenConnection(Broken):
    CAN_BREAK_CONNECTION = True

    async def break_connection(self, events: EventPlanes) -> None:
        assert isinstance(events.receiver, Plane)
        for mailboxes in events.receiver._subjects.values():
            mailboxes.clear()

    FAILS = frozenset({"test_a_subscription_survives_a_broken_connection_and_shows_the_gap"})


class TestForgetsWhatWaitsWhenItCloses(Broken):
    def closing(self, plane: Plane) -> dict[str, Any]:
        async def close() -> None:
            for mailboxes in plane._subjects.values():
                for mailbox in mailboxes:
                    mailbox._events.clear()

        return {"close_sender": close}

    FAILS = frozenset({"test_what_was_sent_before_the_sender_closes_still_arrives"})


class TestLeavesSubscriptionsOpen(Broken):
    def closing(self, plane: Plane) -> dict[str, Any]:
        async def close() -> None:
            plane.close()

        return {"close_receiver": close}

    FAILS = frozenset({"test_closing_the_receiver_ends_its_subscriptions"})
