"""The workers of one model in one role."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dynamo_core.protocol.records import Instance, ModelCard


class Pool:
    """A versioned view of workers, as discovery shows them; see `dynamo_core.contracts.router.PoolView`."""

    def __init__(self, model: str, role: str) -> None:
        self.model = model
        self.role = role
        self.version = 0
        self._instances: dict[int, Instance] = {}
        self._cards: dict[int, ModelCard] = {}
        self._all: tuple[Instance, ...] = ()

    @property
    def instances(self) -> Mapping[int, Instance]:
        """All registered workers by instance id."""
        return self._instances

    @property
    def cards(self) -> Mapping[int, ModelCard]:
        """Their model cards by instance id."""
        return self._cards

    def eligible(self, excluded: Collection[int] = ()) -> Sequence[Instance]:
        """Workers that may be routed to now, in order of registration."""
        if not excluded:
            return self._all
        return [instance for instance in self._all if instance.instance_id not in excluded]

    def add(self, instance: Instance, card: ModelCard) -> None:
        """Adds a worker, or renews its record."""
        self._instances[instance.instance_id] = instance
        self._cards[instance.instance_id] = card
        self._changed()

    def remove(self, instance_id: int) -> Instance | None:
        """Removes a worker; None if it was not there."""
        instance = self._instances.pop(instance_id, None)
        if instance is not None:
            del self._cards[instance_id]
            self._changed()
        return instance

    def _changed(self) -> None:
        self.version += 1
        self._all = tuple(self._instances.values())
