"""The event plane: many publishers, many subscribers, best effort, gaps visible."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

from dynamo_core.contracts.discovery import Discovery, Lease
from dynamo_core.resources import AsyncResource


class Publisher(AsyncResource):
    """Sends events on one subject."""

    @abstractmethod
    def send(self, payload: bytes) -> bool:
        """Send without waiting. False if the event was dropped because a bound was reached; drops are counted."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop publishing. Safe twice."""


class EventPlane(ABC):
    """Publishing and subscribing by subject."""

    @abstractmethod
    async def publisher(self, subject: str, lease: Lease) -> Publisher:
        """Return a publisher that lives no longer than `lease`, whose id is its source id."""

    @abstractmethod
    def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[tuple[int, int, bytes], None]:
        """Return events of all publishers on a subject, present and future, as (source, number, payload).

        Numbers count up by one per source; a jump is a gap: events were lost. Write it as an async generator; closing
        it unsubscribes.
        """
