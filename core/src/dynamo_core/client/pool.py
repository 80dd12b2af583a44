"""The workers of one model in one role."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from dynamo_core.protocol.records import Instance, ModelCard

#: Seconds that a worker which could not be reached is left alone, unless its record changes before.
COOL_DOWN = 10.0


class Pool:
    """A versioned view of workers, as discovery shows them; see `dynamo_core.contracts.router.PoolView`."""

    def __init__(self, model: str, role: str) -> None:
        self.model = model
        self.role = role
        self.version = 0
        self._instances: dict[int, Instance] = {}
        self._cards: dict[int, ModelCard] = {}
        #: Those that are not down, or all; made when asked for after a change, since many may come at once.
        self._up: Sequence[Instance] | None = None
        #: Until when workers are left alone that were found to be down, by the clock of `time.monotonic`.
        self._down: dict[int, float] = {}

    @property
    def instances(self) -> Mapping[int, Instance]:
        """All registered workers by instance id."""
        return self._instances

    @property
    def cards(self) -> Mapping[int, ModelCard]:
        """Their model cards by instance id."""
        return self._cards

    def eligible(self, excluded: Collection[int] = ()) -> Sequence[Instance]:
        """Workers that may be routed to now, in order of registration.

        One that was reported down is left out for a while, unless all others are excluded or down as well.
        """
        if self._down:
            self._forgive()
        up = self._up
        if up is None:
            everybody = tuple(self._instances.values())
            up = self._up = [one for one in everybody if one.instance_id not in self._down] or everybody
        if not excluded:
            return up
        allowed = [instance for instance in up if instance.instance_id not in excluded]
        if allowed or not self._down:
            return allowed
        return [instance for instance in self._instances.values() if instance.instance_id not in excluded]

    def report_down(self, instance_id: int) -> None:
        """A call found that a worker cannot be reached, or does not work; discovery may say so later."""
        if instance_id in self._instances:
            self._down[instance_id] = time.monotonic() + COOL_DOWN
            self._up = None

    def report_up(self, instance_id: int) -> None:
        """A worker has accepted a call."""
        if self._down and self._down.pop(instance_id, None) is not None:
            self._up = None

    def add(self, instance: Instance, card: ModelCard) -> None:
        """Adds a worker, or renews its record."""
        self._instances[instance.instance_id] = instance
        self._down.pop(instance.instance_id, None)
        self._cards[instance.instance_id] = card
        self._changed()

    def remove(self, instance_id: int) -> Instance | None:
        """Removes a worker; None if it was not there."""
        instance = self._instances.pop(instance_id, None)
        if instance is not None:
            del self._cards[instance_id]
            self._down.pop(instance_id, None)
            self._changed()
        return instance

    def _forgive(self) -> None:
        now = time.monotonic()
        for instance_id in [known for known, until in self._down.items() if until <= now]:
            del self._down[instance_id]
            self._up = None

    def _changed(self) -> None:
        self.version += 1
        self._up = None
