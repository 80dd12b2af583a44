"""The delivery of request events to extensions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Self

from dynamo_core.contracts.metrics import CounterLike
from dynamo_core.contracts.requests.request_events import CAPACITY, RequestEvent, Subscription

#: Seconds between an event and the waking of a reader that waits: what happens meanwhile is read with it.
WAKE: Final = 0.01


class RequestEventHub:
    """Hands the events of this process to all subscriptions.

    Code on the way of a request reads `active` and makes no event while it is false. `candidates` is how many ranks a
    router is to list.
    """

    __slots__ = ("_subscriptions", "active", "candidates")

    def __init__(self) -> None:
        self.active = False
        self.candidates = 0
        self._subscriptions: tuple[BoundedSubscription, ...] = ()

    def publish(self, event: RequestEvent) -> None:
        """Give an event to each subscription. Never waits, never raises."""
        for subscription in self._subscriptions:
            subscription.put(event)

    def subscribe(self, capacity: int, candidates: int, dropped: CounterLike) -> BoundedSubscription:
        """Return a new subscription; `dropped` counts what its reader loses."""
        if capacity < 1 or candidates < 0:
            raise ValueError("a subscription holds at least one event, and no less than 0 candidates")
        subscription = BoundedSubscription(capacity, candidates, dropped, self._remove)
        self._set((*self._subscriptions, subscription))
        return subscription

    def _remove(self, closed: BoundedSubscription) -> None:
        self._set(tuple(one for one in self._subscriptions if one is not closed))

    def _set(self, subscriptions: tuple[BoundedSubscription, ...]) -> None:
        self._subscriptions = subscriptions
        self.active = bool(subscriptions)
        self.candidates = max((one.candidates for one in subscriptions), default=0)


class BoundedSubscription(Subscription):
    """See `Subscription`. Not for use from another thread than the event loop's."""

    __slots__ = (
        "_capacity",
        "_closed",
        "_counter",
        "_dropped",
        "_events",
        "_remove",
        "_timer",
        "_waiter",
        "candidates",
    )

    def __init__(
        self, capacity: int, candidates: int, counter: CounterLike, remove: Callable[[BoundedSubscription], None]
    ) -> None:
        self.candidates = candidates
        self._capacity = capacity
        self._counter = counter
        self._remove = remove
        self._events: deque[RequestEvent] = deque()
        self._dropped = 0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def dropped(self) -> int:
        return self._dropped

    @property
    def waiting(self) -> int:
        """The number of events it holds."""
        return len(self._events)

    def put(self, event: RequestEvent) -> None:
        """Hold an event, in place of the oldest if there is no room."""
        events = self._events
        if len(events) >= self._capacity:
            events.popleft()
            self._dropped += 1
            self._counter.inc()
        events.append(event)
        if self._timer is None and self._waiter is not None:
            self._timer = self._waiter.get_loop().call_later(WAKE, self._wake)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestEvent:
        if not self._events and not await self._filled():
            raise StopAsyncIteration
        return self._events.popleft()

    async def batch(self) -> list[RequestEvent]:
        if not self._events:
            await self._filled()
        events = list(self._events)
        self._events.clear()
        return events

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Close like `aclose`, at once."""
        self._closed = True
        self._remove(self)
        self._wake()

    async def _filled(self) -> bool:
        """Return once there is an event, or none will come any more; whether there is one."""
        if self._waiter is not None:
            raise RuntimeError("a subscription has one reader")
        while not self._events and not self._closed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return bool(self._events)

    def _wake(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ExtensionRequestEvents:
    """See `dynamo_core.contracts.requests.request_events.RequestEvents`: the events for one extension."""

    def __init__(self, hub: RequestEventHub, dropped: CounterLike) -> None:
        self._hub = hub
        self._dropped = dropped
        self._made: list[BoundedSubscription] = []

    def subscribe(self, capacity: int = CAPACITY, candidates: int = 0) -> Subscription:
        """See `RequestEvents.subscribe`."""
        subscription = self._hub.subscribe(capacity, candidates, self._dropped)
        self._made.append(subscription)
        return subscription

    def close(self) -> None:
        """Close the subscriptions that the extension has left open."""
        for subscription in self._made:
            subscription.close()
        self._made.clear()
