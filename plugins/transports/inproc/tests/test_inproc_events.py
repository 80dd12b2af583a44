"""Events within one process."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, cast

from dynamo_core import Lease
from dynamo_plugin_transport_inproc.events import InprocEvents
from dynamo_telemetry import Metrics


class Held:
    """A lease of which only the id matters here."""

    def __init__(self, number: int) -> None:
        self.id = number


def lease(number: int) -> Lease:
    return cast(Lease, Held(number))


NOWHERE = cast(Any, None)


async def test_a_subscriber_gets_the_events_of_all_publishers_of_its_subject() -> None:
    events = InprocEvents(Metrics())
    first, second = await events.publisher("loads", lease(1)), await events.publisher("loads", lease(2))
    other = await events.publisher("other", lease(3))
    async with aclosing(events.subscribe("loads", NOWHERE)) as subscription:
        waiting = cast(Any, subscription).asend(None)
        # The subscription begins with its first wait.
        waiting.send(None)
        first.send(b"a")
        other.send(b"x")
        second.send(b"b")
        first.send(b"c")

        seen = []
        try:
            waiting.send(None)
        except StopIteration as stop:
            seen.append(stop.value)
        seen += [await anext(subscription), await anext(subscription)]

    assert seen == [(1, 0, b"a"), (2, 0, b"b"), (1, 1, b"c")]


async def test_a_subscriber_that_is_behind_sees_the_gap_and_the_drop_is_counted() -> None:
    metrics = Metrics()
    events = InprocEvents(metrics, backlog=2)
    publisher = await events.publisher("loads", lease(1))
    async with aclosing(events.subscribe("loads", NOWHERE)) as subscription:
        waiting = cast(Any, subscription).asend(None)
        waiting.send(None)
        sent = [publisher.send(str(number).encode()) for number in range(4)]
        numbers = []
        try:
            waiting.send(None)
        except StopIteration as stop:
            numbers.append(stop.value[1])
        numbers.append((await anext(subscription))[1])
        publisher.send(b"later")
        numbers.append((await anext(subscription))[1])

    assert sent == [True, True, False, False]
    assert numbers == [0, 1, 4]
    assert b'dynamo_event_plane_dropped_total{subject="loads"} 2' in await metrics.render()


async def test_without_subscribers_sending_costs_nothing_and_a_closed_publisher_sends_no_more() -> None:
    events = InprocEvents(Metrics())
    publisher = await events.publisher("loads", lease(1))

    assert publisher.send(b"a")
    await publisher.aclose()
    assert not publisher.send(b"b")
