"""The workers of one model in one role."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

from dynamo_core.protocol.records import Instance, ModelCard

#: Seconds that a worker which could not be reached is left alone, unless its record changes before.
COOL_DOWN = 10.0
#: Seconds that a worker which refused a request because it was full is asked last, unless it tells of its load before.
FULL_TIME = 1.0


class Pool:
    """A versioned view of workers, as discovery shows them; see `dynamo_core.contracts.router.PoolView`.

    A worker may be *out of service* (by its record: cordoned or draining), *down* (calls fail), *busy* (by the loads
    that are watched) or *full* (it has just refused a request). One that is out of service or busy gets no requests;
    one that is down or full gets those for which there is no other.
    """

    def __init__(self, model: str, role: str) -> None:
        self.model = model
        self.role = role
        self.version = 0
        self._instances: dict[int, Instance] = {}
        self._cards: dict[int, ModelCard] = {}
        self._out_of_service: set[int] = set()
        self._in_service: Set[int] | None = None
        #: Those that may be routed to; made when asked for after a change, since many may come at once.
        self._up: Sequence[Instance] | None = None
        #: Until when workers are left alone that are down or full, by the clock of `time.monotonic`.
        self._down: dict[int, float] = {}
        self._full: dict[int, float] = {}
        self._busy: set[int] = set()
        #: Called with a worker that has come, or whose records are others now, and with one that has gone.
        self.on_add: Callable[[Pool, int], None] | None = None
        self.on_remove: Callable[[int], None] | None = None

    @property
    def instances(self) -> Mapping[int, Instance]:
        """All registered workers by instance id."""
        return self._instances

    @property
    def cards(self) -> Mapping[int, ModelCard]:
        """Their model cards by instance id."""
        return self._cards

    @property
    def in_service(self) -> Set[int]:
        """Workers that take new requests, by their records."""
        if self._in_service is None:
            known, out = self._instances.keys(), self._out_of_service
            self._in_service = known - out if out else known
        return self._in_service

    @property
    def limited(self) -> bool:
        """Whether a worker is busy or out of service."""
        return bool(self._busy or self._out_of_service)

    @property
    def busy(self) -> Collection[int]:
        """Workers that are busy."""
        return self._busy

    def eligible(self, excluded: Collection[int] = ()) -> Sequence[Instance]:
        """Return workers that may be routed to now, in order of registration.

        One that was reported down is left out for a while, unless all others are excluded or down as well. One that was
        reported full is left out for a moment, unless no worker is excluded and all others are down, busy or full as
        well: then it is asked once more, as it may have room by now.
        """
        if self._down or self._full:
            self._forgive()
        up = self._up
        if up is None:
            up = self._up = self._find()
        if not excluded:
            return up
        down, full = self._down, self._full
        allowed = [one for one in up if one.instance_id not in excluded and one.instance_id not in full]
        if allowed or not down:
            return allowed
        left = [one for one in self._serving() if one.instance_id not in excluded]
        if any(one.instance_id not in down for one in left):
            return allowed
        return [one for one in left if one.instance_id not in self._busy]

    def state(self, instance_id: int) -> str:
        """Return for people why a worker is not routed to now, as `RankView.state` has it."""
        if instance_id in self._out_of_service:
            return self._instances[instance_id].state
        if instance_id in self._busy:
            return "busy"
        if self._down or self._full:
            self._forgive()
        if instance_id in self._down:
            return "down"
        return "full" if instance_id in self._full else "free"

    def report_down(self, instance_id: int) -> None:
        """Record that a call found a worker out of reach or out of work; discovery may say so later."""
        if instance_id in self._instances:
            self._down[instance_id] = time.monotonic() + COOL_DOWN
            self._up = None

    def report_full(self, instance_id: int) -> None:
        """Record that a worker refused a call because it is at capacity."""
        if instance_id in self._instances:
            self._full[instance_id] = time.monotonic() + FULL_TIME
            self._up = None

    def report_up(self, instance_id: int) -> None:
        """Record that a worker has accepted a call."""
        if self._down and self._down.pop(instance_id, None) is not None:
            self._up = None
        if self._full:
            self.report_load(instance_id)

    def report_load(self, instance_id: int) -> None:
        """Record a new report of a worker's load: it counts as full only once it refuses again."""
        if self._full.pop(instance_id, None) is not None:
            self._up = None

    def set_busy(self, instance_id: int, busy: bool) -> None:
        """Set whether a worker is busy."""
        if busy is (instance_id in self._busy) or instance_id not in self._instances:
            return
        if busy:
            self._busy.add(instance_id)
        else:
            self._busy.discard(instance_id)
        self._up = None

    def add(self, instance: Instance, card: ModelCard) -> None:
        """Add a worker, or renew its record."""
        instance_id = instance.instance_id
        self._instances[instance_id] = instance
        self._down.pop(instance_id, None)
        self._full.pop(instance_id, None)
        self._cards[instance_id] = card
        if instance.state:
            self._out_of_service.add(instance_id)
        else:
            self._out_of_service.discard(instance_id)
        self._changed()
        if self.on_add is not None:
            self.on_add(self, instance_id)

    def remove(self, instance_id: int) -> Instance | None:
        """Remove a worker; None if it was not there."""
        instance = self._instances.pop(instance_id, None)
        if instance is not None:
            del self._cards[instance_id]
            self._down.pop(instance_id, None)
            self._full.pop(instance_id, None)
            self._busy.discard(instance_id)
            self._out_of_service.discard(instance_id)
            self._changed()
            if self.on_remove is not None:
                self.on_remove(instance_id)
        return instance

    def _find(self) -> Sequence[Instance]:
        down, busy, full = self._down, self._busy, self._full
        everybody = tuple(self._serving())
        up: Sequence[Instance] = everybody
        if down:
            up = [one for one in everybody if one.instance_id not in down] or everybody
        if busy:
            up = [one for one in up if one.instance_id not in busy]
        if full:
            up = [one for one in up if one.instance_id not in full] or up
        return up

    def _serving(self) -> Iterable[Instance]:
        out = self._out_of_service
        everybody = self._instances.values()
        return [one for one in everybody if one.instance_id not in out] if out else everybody

    def _forgive(self) -> None:
        now = time.monotonic()
        for marks in (self._down, self._full):
            for instance_id in [known for known, until in marks.items() if until <= now]:
                del marks[instance_id]
                self._up = None

    def _changed(self) -> None:
        self.version += 1
        self._up = self._in_service = None
