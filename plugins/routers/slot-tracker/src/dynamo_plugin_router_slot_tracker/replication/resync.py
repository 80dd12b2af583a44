"""The repair of losses between two replicas: notice gaps in the numbers of events, and request the active state.

A replica that repairs gaps publishes its last number every second. A listener that has not heard that number, or that
hears an event which does not follow the last one, has lost something. It then subscribes to a topic that names the
other replica and a bucket of request ids. The other replica publishes on that topic all requests of its own clients in
that bucket, as they are after its last event. So each part is exact by itself, and one part at a time is on its way.
Once all parts have come without another gap, both replicas hold the same requests. Pure: no I/O, no timer.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dynamo_plugin_router_slot_tracker.registry import Registry
from dynamo_plugin_router_slot_tracker.replication.events import Part, PartTopic, Progress
from dynamo_plugin_router_slot_tracker.replication.reconciliation import reconcile

log = logging.getLogger(__name__)

#: Replicas whose numbers are remembered. One that was restarted is another replica.
MAX_SOURCES = 1024
#: Seconds after which a part that has not come is requested again, from the first bucket on.
PATIENCE = 5.0


@dataclass(slots=True)
class SyncCounts:
    """Counts of the synchronization.

    `dropped` are events of others for unknown objects; `malformed` are no events at all.

    `missed` are those that never came; `repaired` is how often all that a replica has was fetched because of that.
    """

    published: int = 0
    applied: int = 0
    dropped: int = 0
    malformed: int = 0
    missed: int = 0
    repaired: int = 0


class Subscriptions(Protocol):
    """The subscription interface for requesting a part."""

    def subscribe(self, topic: bytes) -> None:
        """Subscribe to a topic at all peers."""

    def unsubscribe(self, topic: bytes) -> None:
        """End the subscription."""


@dataclass(slots=True, eq=False)
class _Source:
    """A replica that numbers its events."""

    last: int
    #: Whether something before `last` has been missed.
    behind: bool
    #: The part that is on its way, and when it was requested.
    requested: PartTopic | None = None
    requested_at: float = 0.0
    #: Requests of it that could not be held here, lately.
    misfits: int = 0


class Resync:
    """A follower of other replicas' numbers. `clock` gives seconds and never goes back."""

    def __init__(
        self, registry: Registry, subscriptions: Subscriptions, counts: SyncCounts, clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._counts = counts
        self._subscriptions = subscriptions
        self._clock = clock
        #: The one heard last is the last.
        self._sources: OrderedDict[int, _Source] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sources)

    def on_event(self, replica: int, number: int) -> bool:
        """Apply an event that has come; False if it came before, over another connection."""
        source = self._sources.get(replica)
        if source is None:
            self._remember(replica, _Source(number, behind=number > 1))
            return True
        self._sources.move_to_end(replica)
        if number <= source.last:
            return False
        self._advance(replica, source, number, number - source.last - 1)
        return True

    def on_progress(self, progress: Progress) -> None:
        """Record that a replica has published its number, and thereby that it answers requests for parts."""
        replica, number = progress.router_id, progress.number
        source = self._sources.get(replica)
        if source is None:
            source = _Source(number, behind=number > 0)
            self._remember(replica, source)
        else:
            self._sources.move_to_end(replica)
            self._advance(replica, source, number, number - source.last)
        if source.behind and (source.requested is None or self._clock() - source.requested_at >= PATIENCE):
            source.misfits = 0
            self._request(replica, source, bucket=0, of=0)

    def on_part(self, topic: PartTopic, part: Part) -> None:
        """Apply a part that has come."""
        source = self._sources.get(topic.replica)
        if source is None or source.requested != topic:
            return
        self._cancel(source)
        if part.number != source.last:
            # Something was lost just before it: what came of the other buckets is out of date.
            self._advance(topic.replica, source, part.number, part.number - source.last)
            return
        source.misfits += reconcile(self._registry, part)
        if part.bucket + 1 < part.of:
            self._request(topic.replica, source, part.bucket + 1, part.of)
            return
        source.behind = False
        self._counts.repaired += 1
        log.info("the active requests of replica %016x were fetched after a gap", topic.replica)

    def on_misfit(self, replica: int) -> None:
        """Handle an event that did not fit the state here."""
        source = self._sources.get(replica)
        if source is not None:
            source.misfits += 1

    def on_worker_registered(self) -> None:
        """Handle the registration of a worker: an event that did not fit before may fit now."""
        for source in self._sources.values():
            if source.misfits:
                source.behind = True
                self._cancel(source)

    def _advance(self, replica: int, source: _Source, number: int, missing: int) -> None:
        if missing > 0:
            self._counts.missed += missing
            source.behind = True
            self._cancel(source)
            log.warning(
                "%d events of replica %016x were lost; its loads are off until it is asked, or until requests expire",
                missing,
                replica,
            )
        source.last = max(source.last, number)

    def _request(self, replica: int, source: _Source, bucket: int, of: int) -> None:
        self._cancel(source)
        source.requested = PartTopic(replica, secrets.randbits(64), bucket, of)
        source.requested_at = self._clock()
        self._subscriptions.subscribe(source.requested.encode())

    def _cancel(self, source: _Source) -> None:
        if source.requested is not None:
            self._subscriptions.unsubscribe(source.requested.encode())
            source.requested = None

    def _remember(self, replica: int, source: _Source) -> None:
        self._sources[replica] = source
        if len(self._sources) > MAX_SOURCES:
            _, oldest = self._sources.popitem(last=False)
            self._cancel(oldest)
