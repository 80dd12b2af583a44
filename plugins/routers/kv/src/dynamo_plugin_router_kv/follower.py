"""The follower of worker events: applies them to the index in order, without gaps, and through restarts.

The events of a rank are numbered. The worker is asked for a missing one: it keeps the newest events and the contents of
its cache. Until it has answered, later events wait. Pure: the router decides when to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dynamo_core import KvEvent, KvHistoryPart, KvRemoved, KvSeen, KvStored, RouterEvent

from dynamo_plugin_router_kv.index import KvIndex, Status

#: Events that may wait for one worker's answer; if there are more, it is asked again.
MAX_PENDING = 10_000

#: Called with the kind of an event and its result.
OnApplied = Callable[[str, Status], None]
#: Called with what was odd about an event: ``duplicate``, ``gap``, ``restart`` or ``overflow``.
OnWarning = Callable[[str], None]


@dataclass(slots=True, eq=False)
class _Feed:
    """The position in one rank's events; `last` is -1 before its first event."""

    epoch: int
    last: int


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker."""

    #: Whether it can be asked for what was missed.
    has_history: bool
    overflown: bool = False
    feeds: dict[int, _Feed] = field(default_factory=dict)
    #: What has come while something before it is missing.
    pending: list[RouterEvent] = field(default_factory=list)


class EventFollower:
    """Applies events and histories of the workers that were added; it ignores others."""

    def __init__(self, index: KvIndex, on_applied: OnApplied, on_warning: OnWarning) -> None:
        self._index = index
        self._on_applied = on_applied
        self._on_warning = on_warning
        self._workers: dict[int, _Worker] = {}
        #: Workers that are to be asked for their history; their events wait.
        self.missing: set[int] = set()

    # Who is there.

    @property
    def workers(self) -> Iterable[int]:
        """The ranks that were added."""
        return self._workers.keys()

    def add(self, worker_id: int, *, has_history: bool) -> bool:
        """Add a worker; whether it is new. One that `has_history` is asked for it: its cache may hold much already."""
        if worker_id in self._workers:
            return False
        self._workers[worker_id] = _Worker(has_history)
        self.ask(worker_id)
        return True

    def ask(self, worker_id: int) -> None:
        """Ask a worker for its history, if it was added and has one."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.has_history:
            self.missing.add(worker_id)

    def remove(self, worker_id: int) -> None:
        """Remove a worker and all that it held."""
        worker = self._workers.pop(worker_id, None)
        self.missing.discard(worker_id)
        if worker is not None:
            for dp_rank in worker.feeds:
                self._index.clear((worker_id, dp_rank))

    # What they tell.

    def on_event(self, router_event: RouterEvent) -> bool:
        """Apply an event; False if its worker was not added."""
        worker = self._workers.get(router_event.worker_id)
        if worker is None:
            return False
        if router_event.worker_id in self.missing:
            if len(worker.pending) < MAX_PENDING:
                worker.pending.append(router_event)
            else:
                self._on_warning("overflow")
                worker.overflown = True
        else:
            self._follow(worker, router_event)
        return True

    def _follow(self, worker: _Worker, router_event: RouterEvent) -> None:
        event = router_event.event
        feed = worker.feeds.get(event.dp_rank)
        if feed is None:
            # A worker with a history has sent nothing before; what another worker sent before stays unknown.
            last = -1 if worker.has_history else event.event_id - 1
            feed = worker.feeds[event.dp_rank] = _Feed(router_event.epoch, last)
        number = event.event_id
        if number == feed.last + 1 and router_event.epoch == feed.epoch:
            # As it nearly always is.
            feed.last = number
            self._apply(router_event.worker_id, event)
            return
        if router_event.epoch > feed.epoch or (not router_event.epoch and not number and feed.last >= 0):
            self._on_warning("restart")
            self._index.clear((router_event.worker_id, event.dp_rank))
            feed.epoch, feed.last = router_event.epoch, -1
        elif router_event.epoch < feed.epoch:
            # Late, from before a restart.
            self._on_warning("duplicate")
            return
        if number <= feed.last:
            self._on_warning("duplicate")
            return
        if number > feed.last + 1:
            self._on_warning("gap")
            if worker.has_history:
                self.missing.add(router_event.worker_id)
                worker.pending.append(router_event)
                return
        self._apply(router_event.worker_id, event)
        feed.last = number

    # What was missed.

    def on_gap(self) -> None:
        """Record that events of any worker may have been missed."""
        self.missing.update(worker_id for worker_id, worker in self._workers.items() if worker.has_history)

    def positions(self, worker_id: int) -> list[KvSeen]:
        """Return the positions to send with a request for history."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return []
        return [KvSeen(rank, feed.epoch, feed.last) for rank, feed in worker.feeds.items() if feed.last >= 0]

    def on_history_part(self, worker_id: int, part: KvHistoryPart) -> None:
        """Apply one part of the answer, in order."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        feed = worker.feeds.get(part.dp_rank)
        if feed is None:
            feed = worker.feeds[part.dp_rank] = _Feed(part.epoch, -1)
        if part.epoch < feed.epoch or (part.epoch > feed.epoch and not part.fresh):
            return
        if part.fresh:
            self._index.clear((worker_id, part.dp_rank))
            feed.epoch = part.epoch
        for event in part.events:
            self._apply(worker_id, event)
        if part.event_id is not None:
            feed.last = part.event_id

    def on_history_complete(self, worker_id: int) -> None:
        """Apply the events that waited for the complete answer."""
        self._resume(worker_id, answered=True)

    def on_history_failed(self, worker_id: int) -> None:
        """Go on without an answer: missed blocks stay unknown, and missed evictions stay in the index for now."""
        self._resume(worker_id, answered=False)

    def _resume(self, worker_id: int, *, answered: bool) -> None:
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        self.missing.discard(worker_id)
        pending, worker.pending = worker.pending, []
        overflown, worker.overflown = worker.overflown, False
        for event in pending:
            feed = worker.feeds.get(event.event.dp_rank)
            if feed is not None and feed.epoch == event.epoch and event.event.event_id <= feed.last:
                # It is in the answer.
                continue
            if not answered and feed is not None and feed.epoch == event.epoch:
                feed.last = max(feed.last, event.event.event_id - 1)
            elif not answered and feed is None:
                worker.feeds[event.event.dp_rank] = _Feed(event.epoch, event.event.event_id - 1)
            self.on_event(event)
        if overflown and worker.has_history:
            self.missing.add(worker_id)

    def _apply(self, worker_id: int, event: KvEvent) -> None:
        status = self._index.apply((worker_id, event.dp_rank), event)
        self._on_applied(_kind(event), status)


def kinds() -> Sequence[str]:
    """Return the kinds of events, as metrics name them."""
    return ("stored", "removed", "cleared")


def _kind(event: KvEvent) -> str:
    data = event.data
    return "stored" if type(data) is KvStored else "removed" if type(data) is KvRemoved else "cleared"
