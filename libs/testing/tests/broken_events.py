"""Event planes that break one promise each, and what of the kit must find it.

Not collected with the other tests: `test_kits_on_broken_parts` runs this file and compares.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from dynamo_core import Discovery, Lease, PluginConfig
from dynamo_core.protocol import EVENT_SOURCES, EventSource
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_plugin_transport_inproc.events import InprocEvents
from dynamo_telemetry import Metrics
from dynamo_testing.events_kit import EventPlanes, EventsKit

from libs.testing.tests.planted import Planted, first, items, made, mutant, nothing, own, then

Event = tuple[int, int, bytes]


class Plane(InprocEvents):
    """An event plane without a fault."""

    backlog = 10_000

    def __init__(self, directory: Discovery) -> None:
        super().__init__(Metrics(), self.backlog)
        self.directory = directory


class Broken(Planted, EventsKit):
    """The kit over one event plane."""

    OVERFLOW = 20_000
    PART = Plane
    #: The seconds that a check waits which must fail, and any other.
    PATIENCE = (0.2, 10.0)

    @pytest.fixture
    async def events(self) -> AsyncIterator[EventPlanes]:
        directory = MemoryDiscovery(PluginConfig(), Metrics())
        plane = self.PART(directory)
        yield EventPlanes(plane, plane, directory, **self.closing(plane))
        plane.close()
        await directory.aclose()

    def closing(self, plane: Plane) -> dict[str, Any]:
        """Return what the test closes, and how."""
        return {}


class TestWithoutAFault(Broken):
    pass


def swapped(seen: list[Event], event: Event) -> list[Event]:
    """Return the event with payload 101 before that with payload 100."""
    source, number, payload = event
    if payload == b"101" and seen and seen[-1][2] == b"100":
        return [(source, number - 1, payload), (source, number, b"100")]
    return [] if payload == b"100" else [event]


TestReorders = Broken.failing(
    "test_events_arrive_in_the_order_they_were_sent",
    "test_dropped_events_show_as_a_gap_in_the_numbers",
    subscribe=items(swapped),
)


def number(real: Any, self: Any, payload: bytes) -> Any:
    self.inner._number = self.owner.sent = getattr(self.owner, "sent", -1) + 1
    return real(payload)


TestNumbersAllSourcesTogether = Broken.failing(
    "test_numbers_count_per_subject_even_if_one_lease_publishes_on_two",
    publisher=made(send=number),
)
# A subscriber cannot know what it missed: each event has the number of events it has received.
TestNumbersFromZeroForEverybody = Broken.failing(
    "test_dropped_events_show_as_a_gap_in_the_numbers",
    subscribe=items(lambda seen, event: [(event[0], sum(one[0] == event[0] for one in seen), event[2])]),
)
TestRepeatsNumbers = Broken.failing(
    "test_the_numbers_of_a_source_count_up_by_one",
    "test_dropped_events_show_as_a_gap_in_the_numbers",
    subscribe=items(lambda seen, event: [(event[0], event[1] - (event[2] == b"30"), event[2])]),
)
TestTellsAnotherSource = Broken.failing(
    "test_the_id_of_the_lease_is_the_source",
    subscribe=items(lambda seen, event: [event, (event[0] ^ 1, *event[1:])] if event[2] == b"probe" else [event]),
)


async def replay(real: Any, self: Any, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
    for event in list(self.old.get(subject, ())):
        yield event
    async with aclosing(real(subject, directory)) as events:
        async for event in events:
            self.old.setdefault(subject, []).append(event)
            yield event


TestReplaysWhatIsOld = Broken.failing(
    "test_a_late_subscriber_gets_only_what_is_sent_later",
    __init__=own(old=lambda self: {}),
    subscribe=replay,
)
TestTakesAPrefixForTheSubject = Broken.failing(
    "test_a_subscriber_gets_nothing_of_other_subjects",
    publisher=lambda real, self, subject, lease: real(subject.removesuffix("-other"), lease),
    subscribe=lambda real, self, subject, directory: real(subject.removesuffix("-other"), directory),
)


async def hear_if_first(real: Any, self: Any, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
    alone = not self._subjects.get(subject)
    async with aclosing(real(subject, directory)) as events:
        async for event in events:
            if alone or event[2] == b"probe":
                yield event


TestKnowsOnlyTheFirstSubscriber = Broken.failing(
    "test_every_subscriber_gets_the_events_of_every_publisher",
    "test_a_late_subscriber_gets_only_what_is_sent_later",
    subscribe=hear_if_first,
)


async def hear_the_known(real: Any, self: Any, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
    known = set(self.known)
    async with aclosing(real(subject, directory)) as events:
        async for event in events:
            if event[0] in known:
                yield event


TestKnowsOnlyPublishersThatWereThereBefore = Broken.failing(
    "test_a_subscriber_receives_from_later_publishers",
    "test_a_publisher_that_closes_leaves_the_subscription_to_the_others",
    __init__=own(known=lambda self: set()),
    publisher=first(lambda self, subject, lease: self.known.add(lease.id)),
    subscribe=hear_the_known,
)
TestHasNoBound = Broken.failing(
    "test_events_over_the_backlog_are_dropped_and_reported_to_the_sender",
    "test_dropped_events_show_as_a_gap_in_the_numbers",
    backlog=1_000_000,
)
TestCutsPayloads = Broken.failing(
    "test_a_payload_arrives_as_it_was_sent",
    subscribe=items(lambda seen, event: [(*event[:2], event[2][:32768])]),
)
TestDropsWithoutSubscribers = Broken.failing(
    "test_sending_without_subscribers_is_no_loss",
    publisher=made(send=lambda real, self, payload: bool(self._mailboxes) and real(payload)),
)
TestSendsAfterClosing = Broken.failing(
    "test_a_closed_publisher_sends_no_more", publisher=made(aclose=lambda real, self: nothing())
)
TestEndsSubscriptionsWithAPublisher = Broken.failing(
    "test_a_publisher_that_closes_leaves_the_subscription_to_the_others",
    "test_a_closed_publisher_sends_no_more",
    publisher=made(aclose=then(lambda self: self._mailboxes.clear())),
)


async def end_all(real: Any, self: Any, subject: str, directory: Discovery) -> AsyncGenerator[Event, None]:
    try:
        async with aclosing(real(subject, directory)) as events:
            async for event in events:
                yield event
    finally:
        self._subjects[subject].clear()


TestForgetsAllSubscribersWithOne = Broken.failing(
    "test_a_subscriber_that_leaves_does_not_disturb_the_others", subscribe=end_all
)


async def publish_with_record(real: Any, self: Any, subject: str, lease: Lease) -> Any:
    key = f"{EVENT_SOURCES}{subject}/{lease.id:x}"
    await self.tell(lease, key, msgspec.json.encode(EventSource(subject=subject, source=lease.id)))
    publish = made(aclose=then(lambda publisher: self.withdraw(lease, key)))
    return await publish(real, self, subject, lease)


class Listed(Broken):
    """With a record for every publisher."""

    PEER_TO_PEER = True
    PART = mutant(
        Plane,
        publisher=publish_with_record,
        tell=lambda real, self, lease, key, value: lease.put(key, value),
        withdraw=lambda real, self, lease, key: lease.remove(key),
    )


class TestPublishesRecords(Listed):
    pass


TestLeavesItsRecord = Listed.failing(
    "test_the_record_of_a_publisher_lives_as_long_as_it", withdraw=lambda real, self, lease, key: nothing()
)
TestPutsItsRecordUnderNoLease = Listed.failing(
    "test_a_publisher_does_not_outlive_its_lease",
    tell=lambda real, self, lease, key, value: self.directory.put_value(key, value),
    withdraw=lambda real, self, lease, key: self.directory.put_value(key, None),
)
TestConfusesOddSubjects = Broken.failing(
    "test_any_text_is_a_subject_of_its_own",
    publisher=lambda real, self, subject, lease: real(subject if "-" in subject else "odd", lease),
)
TestTakesWhatIsTooLarge = Broken.failing(
    "test_an_event_that_is_too_large_is_dropped_and_shows_as_a_gap", kit={"EVENT_LIMIT": 1024}
)
TestDoesNotSurviveABrokenConnection = Broken.failing(
    "test_a_subscription_survives_a_broken_connection_and_shows_the_gap",
    kit={
        "CAN_BREAK_CONNECTION": True,
        "break_connection": lambda real, self, events: nothing(
            *(mailboxes.clear() for mailboxes in events.receiver._subjects.values())
        ),
    },
)
TestForgetsWhatWaitsWhenItCloses = Broken.failing(
    "test_events_sent_before_the_sender_closes_still_arrive",
    kit={
        "closing": lambda real, self, plane: {
            "close_sender": lambda: nothing(
                *(mailbox._events.clear() for mailboxes in plane._subjects.values() for mailbox in mailboxes)
            )
        }
    },
)
TestLeavesSubscriptionsOpen = Broken.failing(
    "test_closing_the_receiver_ends_its_subscriptions",
    kit={"closing": lambda real, self, plane: {"close_receiver": lambda: nothing(plane.close())}},
)
