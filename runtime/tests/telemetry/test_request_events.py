"""The way of request events: order is kept, a slow reader loses the oldest, and no request waits or knows."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.contracts.requests.request_events import (
    RequestEvent,
    RequestFinished,
    RequestFirstToken,
    RequestReceived,
    Subscription,
)
from dynamo_core.errors import BackendError, InvalidArgument, Unavailable
from dynamo_runtime.telemetry import request_events
from dynamo_runtime.telemetry.request_accounting import RequestTracker
from dynamo_runtime.telemetry.request_events import ExtensionRequestEvents, RequestEventHub
from dynamo_telemetry.metrics import Counter, Metrics
from hypothesis import given
from hypothesis import strategies as st


def token(number: int) -> RequestEvent:
    return RequestFirstToken(f"r{number}", float(number))


@pytest.fixture
def hub() -> RequestEventHub:
    return RequestEventHub()


def subscribe(hub: RequestEventHub, capacity: int = 10, candidates: int = 0) -> Subscription:
    return ExtensionRequestEvents(hub, Counter()).subscribe(capacity, candidates)


#: What a run does: publishes an event, or has the reader take one, or all.
STEPS = st.lists(st.sampled_from(["publish", "publish", "publish", "one", "batch"]), max_size=80)


@given(capacity=st.integers(1, 8), steps=STEPS)
def test_order_is_kept_and_the_oldest_events_are_dropped_and_counted(capacity: int, steps: list[str]) -> None:
    async def run() -> None:
        hub, counter = RequestEventHub(), Counter()
        subscription = hub.subscribe(capacity, 0, counter)
        model: deque[RequestEvent] = deque(maxlen=capacity)
        published = dropped = 0
        for step in steps:
            if step == "publish":
                dropped += len(model) == capacity
                event = token(published)
                published += 1
                model.append(event)
                hub.publish(event)
            elif model and step == "one":
                assert await anext(subscription) == model.popleft()
            elif model:
                assert await subscription.batch() == list(model)
                model.clear()
            assert subscription.dropped == counter.value == dropped
        await subscription.aclose()
        assert [event async for event in subscription] == list(model)
        assert await subscription.batch() == []

    asyncio.run(run())


async def test_readers_do_not_take_from_each_other(hub: RequestEventHub) -> None:
    slow, quick = subscribe(hub, 1), subscribe(hub, 5)
    events = [token(number) for number in range(3)]
    for event in events:
        hub.publish(event)

    assert await slow.batch() == events[2:]
    assert await quick.batch() == events
    assert (slow.dropped, quick.dropped) == (2, 0)


async def test_a_waiting_reader_wakes_once_for_simultaneous_events(
    hub: RequestEventHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_events, "WAKE", 0.0)
    subscription = subscribe(hub)
    batches: list[int] = []

    async def read() -> None:
        while batch := await subscription.batch():
            batches.append(len(batch))

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(read())
        await asyncio.sleep(0)
        for number in range(3):
            hub.publish(token(number))
        while not batches:  # noqa: ASYNC110 - the reader is what is waited for
            await asyncio.sleep(0)
        await subscription.aclose()

    assert batches == [3]


async def test_the_hub_is_inactive_after_the_last_subscription(hub: RequestEventHub) -> None:
    assert (hub.active, hub.candidates) == (False, 0)
    few, many = subscribe(hub, candidates=2), subscribe(hub, candidates=8)
    assert (hub.active, hub.candidates) == (True, 8)

    await many.aclose()
    assert (hub.active, hub.candidates) == (True, 2)
    await few.aclose()
    await few.aclose()
    assert (hub.active, hub.candidates) == (False, 0)


async def test_an_extension_that_ends_leaves_no_subscription(hub: RequestEventHub) -> None:
    events = ExtensionRequestEvents(hub, Counter())
    left = events.subscribe()
    hub.publish(token(1))

    events.close()
    hub.publish(token(2))

    assert not hub.active
    assert [event async for event in left] == [token(1)]


async def test_a_second_reader_at_the_same_time_is_refused(hub: RequestEventHub) -> None:
    subscription = subscribe(hub)
    async with asyncio.TaskGroup() as group:
        group.create_task(subscription.batch())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one reader"):
            await subscription.batch()
        await subscription.aclose()


async def test_a_reader_that_was_cancelled_may_come_back(hub: RequestEventHub) -> None:
    subscription = subscribe(hub)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await anext(subscription)
    hub.publish(token(1))

    assert await anext(subscription) == token(1)


@pytest.mark.parametrize(("capacity", "candidates"), [(0, 0), (1, -1)])
def test_a_subscription_that_can_hold_nothing_is_refused(hub: RequestEventHub, capacity: int, candidates: int) -> None:
    with pytest.raises(ValueError, match="at least one event"):
        hub.subscribe(capacity, candidates, Counter())


# The accounting of requests.


async def test_accounting_publishes_begin_first_token_and_end(hub: RequestEventHub) -> None:
    subscription = subscribe(hub)
    requests = RequestTracker(Metrics(), lambda record: None, events=hub)
    headers = {"x-request-id": "mine"}
    with requests.begin(
        model="m", endpoint="chat", streaming=True, headers=headers, principal=Principal(key_id="alice")
    ) as request:
        for _ in range(3):
            request.output(5)
        request.succeed("stop")

    received, first, finished = await subscription.batch()
    assert isinstance(received, RequestReceived)
    assert (received.model, received.endpoint, received.request_type) == ("m", "chat", "stream")
    assert (received.principal.key_id, received.x_request_id, received.trace_id) == ("alice", "mine", request.trace_id)
    assert isinstance(first, RequestFirstToken)
    assert isinstance(finished, RequestFinished)
    assert finished.record.output_tokens == 15
    assert received.request_id == first.request_id == finished.request_id == request.request_id
    assert received.time <= first.time <= finished.time


async def test_a_request_without_output_has_no_first_token(hub: RequestEventHub) -> None:
    subscription = subscribe(hub)
    requests = RequestTracker(Metrics(), lambda record: None, events=hub)
    with requests.begin(model="m", endpoint="chat", streaming=False, headers={}) as request:
        request.fail("internal", 500)

    assert [type(event) for event in await subscription.batch()] == [RequestReceived, RequestFinished]


#: Errors with the status of their answer, and what is told of them.
BLAMED = {
    "Backend(Unknown): out of memory": (BackendError.Unknown("out of memory"), 500),
    "Unavailable: no worker": (Unavailable("no worker"), 503),
    # What is not ours may hold anything.
    "KeyError": (KeyError("a secret"), 500),
}


@pytest.mark.parametrize(
    ("reason", "error", "status"),
    # So may what a client has sent.
    [*((reason, *one) for reason, one in BLAMED.items()), ("", InvalidArgument("a prompt"), 400), ("", None, 500)],
)
async def test_the_end_of_a_request_has_the_reason_if_the_server_is_to_blame(
    hub: RequestEventHub, reason: str, error: Exception | None, status: int
) -> None:
    subscription = subscribe(hub)
    tracker = RequestTracker(Metrics(), lambda record: None, events=hub)

    with tracker.begin(model="m", endpoint="chat_completions", streaming=True, headers={}) as request:
        request.fail("internal", status, error)

    *_, last = await subscription.batch()
    assert isinstance(last, RequestFinished)
    assert last.reason == reason
