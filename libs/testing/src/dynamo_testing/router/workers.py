"""A pool of made-up workers, for tests of routers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dynamo_core.protocol.records import Instance, ModelCard, RuntimeConfig


class Workers:
    """A pool as the contract describes it, with all workers eligible but the excluded."""

    model = "m"
    role = "aggregated"
    version = 1

    def __init__(self, count: int, ranks: int = 1, start: int = 0) -> None:
        """Workers 1 to `count`, each with so many ranks from rank `start` on."""
        self.instances = {number: Instance(instance_id=number) for number in range(1, count + 1)}
        facts = RuntimeConfig(data_parallel_size=ranks, data_parallel_start_rank=start)
        self.cards = {
            number: ModelCard(name="m", instance_id=number, runtime_config=facts) for number in self.instances
        }
        self.in_service = self.instances.keys()
        self._all = tuple(self.instances.values())

    def eligible(self, excluded: Collection[int] = ()) -> Sequence[Instance]:
        """Return the workers that may be chosen."""
        if not excluded:
            return self._all
        return [instance for instance in self._all if instance.instance_id not in excluded]
